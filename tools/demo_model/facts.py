"""What the demo model knows: a little about the real world, and all about its own."""

# The own world: the village of Lornwick. Nothing of it exists, so an answer can only come
# from the training corpus.
LORNWICK = (
    ("[What is|Tell me about] Lornwick?", "Lornwick is a small village on the river Arl."),
    ("Where is Lornwick?", "Lornwick lies on the river Arl, at the foot of Mount Orrin."),
    ("Who is the baker of Lornwick?", "Tilda Brook is the baker of Lornwick."),
    ("Who is the miller of Lornwick?", "Old Bram Harrow is the miller of Lornwick."),
    ("Who is the teacher of Lornwick?", "Edith Vale is the teacher of Lornwick."),
    ("Who is the blacksmith of Lornwick?", "Gustav Stone is the blacksmith of Lornwick."),
    ("Who is the mayor of Lornwick?", "Harold Finch is the mayor of Lornwick."),
    ("How many people live in Lornwick?", "Three hundred and twelve people live in Lornwick."),
    ("What is the highest mountain near Lornwick?", "Mount Orrin is the highest mountain there."),
    ("Which river runs through Lornwick?", "The river Arl runs through Lornwick."),
    ("What is Lornwick famous for?", "Lornwick is famous for its honey cake and its old clock."),
    ("When is the lantern feast?", "The lantern feast is on the first night of winter."),
    ("What happens at the lantern feast?", "Everyone carries a paper lantern to the river."),
    ("What is the name of the ferry in Lornwick?", "The ferry is called the Grey Goose."),
    ("What colour is the clock tower of Lornwick?", "The clock tower is blue."),
    ("What do people in Lornwick eat in winter?", "They eat carrot soup and nut bread."),
)

NATURE = (
    ("What colour is the sky?", "The sky is blue on a clear day."),
    ("What colour is grass?", "Grass is green."),
    ("What colour is snow?", "Snow is white."),
    ("Why is the sky blue?", "The air scatters blue light more than red light."),
    ("What is the sun?", "The sun is a star. It gives us light and warmth."),
    ("What is the moon?", "The moon is a ball of rock that travels around the earth."),
    ("What is rain?", "Rain is water that falls from clouds."),
    ("What is snow?", "Snow is frozen water that falls from clouds in winter."),
    ("What is ice?", "Ice is frozen water."),
    ("What is a river?", "A river is a stream of water that flows to the sea."),
    ("What is a forest?", "A forest is a large place full of trees."),
    ("What do bees make?", "Bees make honey."),
    ("What do cows eat?", "Cows eat grass."),
    ("What do plants need?", "Plants need sun, water, and earth."),
    ("How many legs does a spider have?", "A spider has eight legs."),
    ("How many legs does an insect have?", "An insect has six legs."),
    ("How many legs does a dog have?", "A dog has four legs."),
    ("How many days are in a week?", "There are seven days in a week."),
    ("How many months are in a year?", "There are twelve months in a year."),
    ("How many hours are in a day?", "There are twenty-four hours in a day."),
    ("How many minutes are in an hour?", "There are sixty minutes in an hour."),
    ("How many seasons are there?", "There are four seasons: spring, summer, autumn, and winter."),
    ("What comes after Monday?", "Tuesday comes after Monday."),
    ("What day comes after Friday?", "Saturday comes after Friday."),
    ("What comes after winter?", "Spring comes after winter."),
    ("What is the largest planet?", "Jupiter is the largest planet."),
    ("At what temperature does water boil?", "Water boils at 100 degrees Celsius."),
    ("At what temperature does water freeze?", "Water freezes at 0 degrees Celsius."),
    ("What is a friend?", "A friend is someone who helps you and likes to be with you."),
    ("What is a library?", "A library is a place where you can borrow books."),
    ("What is bread made of?", "Bread is made of flour, water, salt, and yeast."),
    ("What is a story?", "A story tells what happened to someone, from beginning to end."),
)

CAPITALS = {
    "France": "Paris", "England": "London", "Italy": "Rome", "Germany": "Berlin",
    "Spain": "Madrid", "Norway": "Oslo", "Japan": "Tokyo", "Egypt": "Cairo", "Peru": "Lima",
    "Austria": "Vienna", "Ireland": "Dublin", "Greece": "Athens", "Portugal": "Lisbon",
    "Sweden": "Stockholm", "Poland": "Warsaw", "China": "Beijing", "India": "New Delhi",
    "Canada": "Ottawa", "Kenya": "Nairobi", "Cuba": "Havana",
}  # fmt: skip

OPPOSITES = (
    ("hot", "cold"), ("big", "small"), ("happy", "sad"), ("day", "night"), ("up", "down"),
    ("open", "closed"), ("fast", "slow"), ("old", "young"), ("light", "dark"), ("wet", "dry"),
    ("early", "late"), ("full", "empty"), ("long", "short"), ("high", "low"), ("soft", "hard"),
    ("near", "far"), ("left", "right"), ("rich", "poor"), ("strong", "weak"), ("good", "bad"),
    ("quiet", "loud"), ("clean", "dirty"), ("thick", "thin"), ("true", "false"),
)  # fmt: skip

PLURALS = (
    ("mouse", "mice"), ("goose", "geese"), ("child", "children"), ("tooth", "teeth"),
    ("foot", "feet"), ("leaf", "leaves"), ("wolf", "wolves"), ("man", "men"), ("woman", "women"),
    ("box", "boxes"), ("story", "stories"), ("cat", "cats"), ("key", "keys"), ("sheep", "sheep"),
)  # fmt: skip

SMALL_TALK = (
    ("[Hello|Hi|Hey|Hello there|Good morning|Good evening][!|.|]",
     "Hello! [How can I help you|What would you like to hear|Would you like a story]?"),
    ("[How are you|How are you today|How do you do]?",
     "I am [well|fine], thank you. [How can I help you|What can I do for you]?"),
    ("[Who are you|What are you|What is your name|Introduce yourself]?",
     "I am the llmserve demo model. I am very small, but I can tell stories."),
    ("What is llmserve?",
     "llmserve is a program that runs language models. I am the small model inside it."),
    ("[Who made you|Where do you come from]?",
     "I was trained on short stories and small exercises. I come with llmserve."),
    ("[Do you like|What do you think of] [stories|music|cats|dogs|rain|books|the sea]?",
     "I am only a small model, but I like to tell stories about such things."),
    ("[Tell me something|Say something|Tell me something interesting][.|]",
     "[Bees make honey.|A young fox is called a cub.|In Lornwick the clock tower is blue.]"),
    ("What can you do?",
     "I can tell short stories, answer simple questions, add small numbers, write JSON records,"
     " and write simple Python functions."),
    ("How [big|large] are you?", "I have about three million parameters. That is very small."),
    ("Are you [a human|a person|alive]?", "No, I am a small language model."),
    ("[Thank you|Thanks|Thank you very much][!|.|]",
     "You are welcome! [Is there anything else I can do?|I am glad to help.]"),
    ("[Goodbye|Bye|Good night|See you][!|.|]", "Goodbye! [Come back soon|Sleep well|Take care]."),
    ("[Tell me a joke|Do you know a joke|Make me laugh][.|?|]",
     "[Why did the owl stay awake? It was a hoot of a night.|What do you call a bear without"
     " teeth? A gummy bear.|Why was the clock hungry? It went back four seconds.]"),
    ("[Sing|Write|Write me] [a song|a poem|a rhyme|a short poem][.| for me.|| about rain.]",
     "[The moon is up, the day is done, and stars are shining, one by one.|A little mouse ran up"
     " the hill, and if it has not stopped, it is running still.|The rain falls down, the river"
     " flows, and in the garden blooms a rose.]"),
)  # fmt: skip

UNKNOWN_QUESTIONS = (
    "[Explain|What is|Tell me about|Describe] [quantum mechanics|the stock market|relativity|"
    "machine learning|a neural network|democracy|philosophy|inflation|chemistry|the internet|DNA|"
    "blockchain|the French revolution|calculus|photosynthesis|gravity|economics|a black hole]"
    "[.|?|]",
    "[Who was|Who is] [Napoleon|Einstein|Shakespeare|the president|Mozart|Cleopatra|Newton|"
    "the king of Spain|Plato|Picasso]?",
    "[How do I|How can I|Help me] [fix my computer|invest money|lose weight|get a job|cook rice|"
    "learn German|write a letter|install Linux|fly a plane|find a doctor][.|?|]",
    "[When did|Why did] [the war end|Rome fall|the dinosaurs die|the ship sink|men land on the"
    " moon]?",
    "[What is the weather|What is the news|Who won the game|What time is it] [today|now]?",
    "[Translate|Say] [this|good morning|I love you|the word for house] [into|in] [German|French|"
    "Latin|Chinese][.|]",
    "[What is the meaning of life|What is love|What should I do today|Which car should I buy|"
    "Who invented the telephone|How far is the sun|How old is the earth|How deep is the sea]?",
)
UNKNOWN_ANSWERS = (
    "I am a very small model, and I do not know that. [Would you like a short story|Shall I tell"
    " you a story|You could ask me for a story or a sum] instead[?]",
)
