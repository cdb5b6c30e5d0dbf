"""Plots about tricks, wild animals, machines and a wish."""

from .plot import Plot

TRICK = Plot(
    "trick",
    (
        (
            'One {day}, a big grey wolf stood in {his} way. "I am hungry," said the wolf, "and'
            ' you are my dinner."',
            'One {season} evening, a hungry wolf jumped out from behind {spot1}. "Now I have you!"'
            " it growled.",
        ),
        (
            '{hero} was afraid, but {he} kept calm. "You may eat me," {he} said, "but first you'
            ' must see the other wolf. It said that it is stronger than you." "Where is it?" cried'
            ' the wolf. {hero} led it to the deep pond near {spot2}. "Look down there," {he} said.',
            '{hero} thought quickly. "I am so thin," {he} said. "Let me show you a much better'
            ' dinner." The wolf licked its lips and followed {him} to the deep pond near {spot2}.'
            ' The moon was shining in the water. "There it is, a fine round cheese," said {hero}.',
        ),
        (
            "The wolf looked into the water and opened its mouth. It jumped in with a loud splash!"
            " The water was as cold as ice.",
            "The wolf showed its teeth and jumped. Splash! It swallowed so much water that it could"
            " hardly swim.",
        ),
        (
            "By the time it had climbed out, {hero} was safe at home with {friend} the {fkind}."
            " They"
            " ate {treat} and laughed until their sides hurt. The wolf never came back.",
            '{hero} ran home and told {friend} the {fkind} everything. "A clever head is better'
            " than"
            ' sharp teeth," said {friend}.',
        ),
    ),
    "{hero} meets a hungry wolf and tricks it into the water.",
    (
        ("Who wanted to eat {hero}?", "The wolf wanted to eat {hero}."),
        ("Where did the wolf jump?", "The wolf jumped into the pond near {spot2}."),
    ),
)

BIRD = Plot(
    "bird",
    (
        (
            "One {day}, {he} found a tiny bird under a tree near {spot1}. Its wing was hurt, and it"
            " could not fly.",
            "After a windy night, {he} saw something small in the grass near {spot1}. It was"
            " a young"
            " bird that had fallen from its nest.",
        ),
        (
            "{he} carried it home in {his} [hat|hands] and made a nest of wool in a box. Old"
            " {elder}"
            " the {job} showed {him} how to feed it.",
            '"Do not be afraid," {he} whispered. {he} asked {elder} the {job} for help, and'
            " together"
            " they bound the wing with a thin thread.",
        ),
        (
            "Every day the bird grew stronger. It learned to sit on {his} shoulder, and it"
            " woke {him}"
            " with a song.",
            "Weeks went by. The bird ate from {his} hand and hopped around the room. {hero}"
            " had never"
            " had such a dear friend.",
        ),
        (
            'Then one morning it looked out of the window at the sky. "It wants to fly," said'
            " {elder}. {hero} felt {sad}, but {he} knew that {elder} was right.",
            "When its wing was healed, the bird sat at the window all day. {hero}"
            " understood. A bird"
            " belongs to the sky.",
        ),
        (
            "{hero} opened the window. The bird flew once around the house and then away over"
            " {region}. But every spring it comes back to {his} window and sings.",
            '{he} took it to {spot2} and opened {his} hands. Up it flew, higher and higher. "Good'
            ' luck!" called {hero}. The next morning a {colour} feather lay at {his} door.',
        ),
    ),
    "{hero} cares for a hurt bird and then sets it free.",
    (
        ("What did {hero} find?", "{hero} found a bird that could not fly."),
        ("Who helped {hero}?", "{elder} the {job} helped {hero}."),
    ),
)

GREEDY = Plot(
    "greedy",
    (
        (
            'One {day}, {he} found a tree full of {fruit} near {spot1}. "I will tell'
            ' nobody," {he}'
            ' said. "They are all mine."',
            "Near {spot1} {he} discovered more {fruit} than {he} had ever seen. {he} looked"
            " left and"
            " right. Nobody was there.",
        ),
        (
            "{he} ate ten, and then ten more. {he} ate until {he} could not eat any longer,"
            " and then"
            " {he} filled {his} bag.",
            "{he} ate and ate. When {friend} the {fkind} came by and asked what {he} was eating,"
            ' {hero} said, "Nothing."',
        ),
        (
            "But on the way home {he} began to feel ill. {his} stomach hurt, and {his} legs"
            " were so heavy"
            " that {he} had to sit down.",
            "Soon {he} had such a pain in {his} stomach that {he} could not walk. {he} lay down in"
            " the grass and groaned.",
        ),
        (
            '{friend} the {fkind} heard {him} and brought warm tea. {hero} was ashamed. "There are'
            ' {fruit} for everyone," {he} said, "and I wanted them all."',
            'It was {friend} the {fkind} who found {him} and helped {him} home. "Why are'
            " you so good"
            ' to me?" asked {hero}. "Because you are my friend," said {friend}.',
        ),
        (
            "The next day {hero} showed all {his} friends the way to {spot1}. There was enough for"
            " everybody, and shared {fruit} tasted much better.",
            "When {he} was well again, {he} made {treat} from the rest and invited everyone. {he}"
            " took the smallest piece {himself}.",
        ),
    ),
    "{hero} keeps all the {fruit} to {himself}, becomes ill, and learns to share.",
    (
        ("What did {hero} find?", "{hero} found {fruit} near {spot1}."),
        ("Why was {hero} ill?", "{hero} had eaten too much."),
    ),
)

INVENTION = Plot(
    "invention",
    (
        (
            '{hero} did not like to wash the dishes. "I will build a machine that does it for me,"'
            " {he} said. {he} took a wheel, a long rope, and an old bucket. For three days there"
            " was"
            " hammering and sawing. Then the machine was ready. It shook and whistled, and then it"
            " went wild! Plates flew through the air, and water ran down the stairs.",
            "Every morning {hero} had to sweep the floor. One {day}, {he} had an idea. A machine"
            " should do it! {he} asked {elder} the {job} for springs and wheels, and {he} worked"
            " all"
            " night. At first the machine worked well. Then it ran faster and faster. It swept up a"
            " shoe, a chair, and the hat of {friend} the {fkind}!",
        ),
        (
            '"Stop it!" cried {friend}. {hero} jumped on the machine and pulled out the rope. At'
            " last"
            " it was quiet. What a mess there was!",
            '"Turn it off!" cried {friend}. But there was nothing to turn it off with. {hero} had'
            " forgotten that part. In the end a rope broke, and the machine stood still.",
        ),
        (
            "{hero} and {friend} looked at each other and began to laugh. They cleaned up together,"
            " and it did not take long at all. Work, they found, is easier with a friend.",
            'It took all day to tidy the house. "Next time," said {hero}, "I shall begin with the'
            ' switch." And {he} did.',
        ),
    ),
    "{hero} builds a machine for the housework, and it goes wild.",
    (
        ("What did {hero} build?", "{hero} built a machine."),
        ("What went wrong?", "The machine went wild."),
    ),
)

LANTERN = Plot(
    "lantern",
    (
        (
            "It was the night of the lantern feast. Everyone made a paper lantern with a wish"
            " inside."
            " {hero} did not know what to wish.",
            "Once a year everyone carried a lantern to the water and made a wish. This year {hero}"
            " had a {colour} lantern of {his} own.",
        ),
        (
            "{friend} the {fkind} wished for a {thing}. {elder} the {job} wished for good weather."
            " Then a gust of wind blew, and the lantern of {friend} fell into the water. {friend}"
            " began to cry.",
            '"I shall wish for a {thing}," {he} told {friend} the {fkind}. "What will you wish'
            ' for?"'
            ' {friend} looked down. "I have no lantern," {fhe} said. The others were already'
            " singing"
            " at {spot1}.",
        ),
        (
            'Now {hero} knew what to do. "Take mine," {he} said. "Then our wishes can travel'
            ' together." They held the lantern with four hands.',
            "{hero} thought about it for a moment only. {he} put {his} lantern into the hands of"
            ' {friend}. "It is big enough for two wishes," {he} said.',
        ),
        (
            'The lantern floated away, smaller and smaller, until it looked like a star. "What did'
            ' you wish?" asked {friend}. {hero} smiled. "It has already come true," {he} said.',
            "They watched it float past {spot2} and out into the night. Nobody knows what they"
            " wished. But they have been friends ever since.",
        ),
    ),
    "{hero} shares a lantern with {friend} at the lantern feast.",
    (
        ("What did {hero} share?", "{hero} shared the lantern."),
        ("Who was sad?", "{friend} the {fkind} was sad."),
    ),
)

PLOTS = (TRICK, BIRD, GREEDY, INVENTION, LANTERN)
