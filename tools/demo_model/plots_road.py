"""Plots about journeys, storms, maps and things seen at night."""

from .plot import Plot

STORM = Plot(
    "storm",
    (
        (
            "One {season} evening, a [great|terrible] storm came. The wind [howled|roared], and the"
            " rain beat on the roof.",
            "One night, dark clouds covered the moon. Thunder rolled over {region}.",
        ),
        (
            "{hero} looked out of the window and [saw|heard] something. Far away, near {spot1},"
            " someone was calling for help.",
            'Then {hero} heard a [small|weak] voice. "Help me!" it cried. It came from {spot1}.',
        ),
        (
            "{he} was afraid, but {he} [took a lantern|lit {his} lamp] and went out into the rain."
            " The path was full of water, and {he} [fell twice|held on to the trees].",
            '"I must go," {he} said, although {his} [knees|hands] were shaking. {he} took a'
            " [lantern|rope] and walked into the wind.",
        ),
        (
            "At {spot1} {he} found {friend}, a [little|wet] {fkind}. {fhis} foot was caught under a"
            " branch. {hero} pulled [and pulled|with all {his} strength] until {friend} was free.",
            "There was {friend} the {fkind}, [holding on to a rock|shaking with cold]. The water"
            " was rising fast. {hero} threw {fhim} a rope and pulled {fhim} out.",
        ),
        (
            "They walked home side by side. By the fire {friend} drank warm [milk|soup] and fell"
            " asleep. In the morning [the sky was clear|the storm was over], and {hero} had a new"
            " friend.",
            '"You are very brave," said {friend}. "[I was afraid|My heart was beating fast]," said'
            ' {hero}, "but I came." They sat by the fire until the storm was over.',
        ),
    ),
    "{hero} goes out into a storm and saves {friend} at {spot1}.",
    (
        ("Who was in danger?", "{friend} the {fkind} was in danger."),
        ("Where was {friend}?", "{friend} was at {spot1}."),
    ),
)

MAP = Plot(
    "map",
    (
        (
            "One rainy {day}, {he} found an old map [inside a book|under the floor|in a dusty"
            " box]. There was a {colour} cross on it.",
            "One {day}, the wind blew a piece of paper to {his} door. It was a map, and it showed"
            " the way to a treasure.",
        ),
        (
            '{he} showed it to {friend} the {fkind}. "Let us go at once!" said {friend}. They'
            " packed some {fruit} and set off.",
            "{he} could not wait. {he} [woke|called] {his} friend {friend} the {fkind}, and they"
            " left [before the sun was up|that same hour].",
        ),
        (
            "The map led them past {spot1} and over {spot2}. It was a long way, and [their feet"
            ' hurt|the road was steep]. {friend} wanted to go home. "Only a little more," said'
            " {hero}.",
            "First they went to {spot1}. Then they turned left at {spot2}. [Once they were lost,"
            " but {friend} found the way again.|They got wet, but they did not stop.]",
        ),
        (
            "The cross was at {spot3}. They began to dig. After an hour they hit something hard."
            " It was a box made of wood.",
            "At {spot3} they found a flat stone with a {colour} mark. Under the stone there was an"
            " old box.",
        ),
        (
            'There was no gold inside. There was only a letter. It said: "[The friend who came with'
            ' you is the treasure|You have walked far together, and that is the treasure]." {hero}'
            " looked at {friend}, and they both began to laugh.",
            "Inside the box they found a {thing} and a bag of seeds. They planted the seeds"
            " together, and the next year [flowers grew all the way to their doors|there were"
            " flowers everywhere].",
        ),
    ),
    "{hero} and {friend} follow an old map to {spot3}.",
    (
        ("What did {hero} find?", "{hero} found an old map."),
        ("Where was the box?", "The box was at {spot3}."),
    ),
)

NOISE = Plot(
    "noise",
    (
        (
            "One night {he} was woken by a strange noise. [Tap, tap, tap|Scratch, scratch,"
            " scratch]! It came from [the roof|behind the door|the cellar].",
            "One dark night, {he} could not sleep. Something was [knocking|scratching] at the"
            " window.",
        ),
        (
            '"Is it a [ghost|monster]?" {he} whispered, and pulled the blanket over {his} head.'
            " The noise did not stop.",
            "{his} heart beat fast. {he} held {his} breath and listened. There it was again!",
        ),
        (
            "At last {he} [took a candle|lit a lamp] and went to look. Step by step, {he} came"
            " closer.",
            '"I cannot hide forever," {he} said. So {he} got up, [took a broom|lit a candle], and'
            " opened the door very slowly.",
        ),
        (
            "It was not a monster at all. It was {friend} the {fkind}, who had lost {fhis} way in"
            ' the dark. "I am sorry," said {friend}. "I only wanted to [get warm|ask the way]."',
            "And there sat {friend}, a small {fkind}, with [a paw in a jar of honey|snow on {fhis}"
            ' nose]. "Good evening," said {friend}. "I saw your light and hoped for a friend."',
        ),
        (
            "{hero} laughed so hard that {he} had to sit down. {he} made some tea, and they ate"
            " {treat} until the sun came up.",
            "{hero} let {fhim} in and gave {fhim} {treat}. After that night, {he} was never afraid"
            " of [a noise|the dark] again.",
        ),
    ),
    "{hero} hears a strange noise at night and finds {friend} the {fkind}.",
    (
        ("What woke {hero}?", "A strange noise woke {hero}."),
        ("Who made the noise?", "{friend} the {fkind} made the noise."),
    ),
)

LETTER = Plot(
    "letter",
    (
        (
            "One {day}, {he} found a letter [on the road|near {spot1}]. On the front was written:"
            ' "For {elder} the {job}."',
            "One {day}, the wind blew a letter into {his} hands. It was for {elder}, an old {job}"
            " who lived far away, beyond {spot1}.",
        ),
        (
            '{hero} could have left it there. But {he} thought, "[Someone is waiting for this|It'
            ' may be important]." So {he} put on {his} hat and went.',
            '"I will take it there myself," said {hero}, and {he} set off with some bread in'
            " {his} bag.",
        ),
        (
            "{he} walked past {spot2} and slept under a tree. In the morning {he} met {friend} the"
            " {fkind}, who [showed {him} the way|carried {his} bag for a while].",
            'The road was long. At {spot2} {he} met {friend} the {fkind}. "[Turn left at the big'
            ' stone|Follow the stream]," said {friend}, "and you will find the house."',
        ),
        (
            "At last {he} came to a small house and knocked. {elder} opened the letter and began"
            ' to [cry|shake]. "It is from my [sister|brother|son]," {ehe} said. "I thought I was'
            ' forgotten."',
            '{elder} read the letter twice. Then {ehe} smiled. "My [daughter|old friend] is coming'
            ' home," {ehe} said. "You have brought me the best news of my life."',
        ),
        (
            "{elder} gave {him} {treat} and a {thing} to say thank you. {hero} walked home under"
            " the stars, and the way seemed much shorter.",
            "{hero} stayed for supper and listened to stories until late. {he} had carried only a"
            " letter, but {he} had brought joy.",
        ),
    ),
    "{hero} finds a letter and carries it all the way to {elder}.",
    (
        ("Who was the letter for?", "The letter was for {elder} the {job}."),
        ("What did {hero} find?", "{hero} found a letter."),
    ),
)

WELL = Plot(
    "well",
    (
        (
            "One hot summer there was no rain for many weeks. The well was dry, and the [plants|"
            "fields] turned brown.",
            "One year the rain did not come. The stream became smaller every day, until there was"
            " no water left.",
        ),
        (
            'Everyone was {sad}. "We must leave this place," said {elder} the {job}. But'
            " {hero} did not want to leave.",
            '"What shall we do?" asked {elder} the {job}. Nobody knew an answer.',
        ),
        (
            'That {day}, {he} saw {friend} the {fkind} with wet feet. "Where have you been?"'
            ' asked {hero}. "That is my secret," said {friend}, "but I will show you, because you'
            ' [are kind|asked me nicely]."',
            "Then {hero} noticed a small {colour} bird. Every evening it flew toward {spot1}, and"
            ' its feathers came back wet. "It knows where the water is!" {he} told {friend} the'
            " {fkind}, and they followed it.",
        ),
        (
            "Behind {spot1}, under the roots of an old tree, clear water came out of the ground."
            " {hero} drank and drank. It was cold and sweet.",
            "They climbed over stones and came to {spot1}. There, between two rocks, {hero} heard"
            " a soft sound. It was a spring!",
        ),
        (
            "Everyone came with [spades|buckets], and in three days they dug a little channel."
            " The water ran down to the fields, and [the land was green again|nobody had to"
            " leave].",
            "{he} ran home and called the others. That night they all drank fresh water, and"
            " {elder} said that the spring should be named after {hero}.",
        ),
    ),
    "There is no rain, but {hero} and {friend} find a spring near {spot1}.",
    (
        ("Why was everyone {sad}?", "Everyone was {sad} because there was no water."),
        ("What did {hero} find near {spot1}?", "{hero} found a spring."),
    ),
)

MOON = Plot(
    "moon",
    (
        (
            "Every night {he} looked at the moon and wished that {he} could [touch|hold] it.",
            "{hero} had one great wish. {he} wanted to touch the moon.",
        ),
        (
            "First {he} climbed on the roof, but the moon was still too far away. Then {he} climbed"
            " the tallest tree, but [it was too far as well|that was not high enough].",
            "{he} climbed to the top of a hill near {spot1} and stretched out {his} arms. The moon"
            " was no closer than before.",
        ),
        (
            '"What are you doing up there?" asked {friend} the {fkind}. When {hero} told {fhim},'
            " {friend} did not laugh. {fhe} [thought for a while|closed {fhis} eyes and thought].",
            '{friend} the {fkind} was watching. "You do not have to climb," {fhe} said. "I know a'
            ' place where the moon comes down."',
        ),
        (
            "{friend} led {him} to a small pond behind {spot2}. The water was as still as glass,"
            " and in the middle of it lay the moon, round and bright.",
            "That night they walked to the water near {spot2}. There was no wind. The moon [was"
            " shining in the water|lay on the water like a silver coin].",
        ),
        (
            "{hero} put one finger into the water. The moon broke into a hundred pieces, and then"
            ' it was whole again. "I have touched it," {he} whispered, and {he} was {glad}.',
            "Slowly, {hero} reached down and touched it. It was cold, and it danced. {he} smiled"
            " all the way home.",
        ),
    ),
    "{hero} wants to touch the moon, and {friend} shows {him} the moon in the water.",
    (
        ("What did {hero} wish?", "{hero} wished to touch the moon."),
        ("Where was the moon in the end?", "The moon was in the water near {spot2}."),
    ),
)

DRAGON = Plot(
    "dragon",
    (
        (
            "Behind {spot1} lived a dragon, and everyone was afraid of it. [Every night smoke rose"
            " into the sky.|At night they could hear it roar.]",
            "One day, a {colour} dragon came to {region}. The people locked their doors and hid.",
        ),
        (
            '"Somebody should talk to it," said {hero}. "Are you mad?" cried {elder} the {job}. But'
            " {hero} took a basket of {fruit} and went alone.",
            "Only {hero} wondered why the dragon roared. So one {day}, {he} [put on {his} coat|took"
            " a deep breath] and walked to {spot1}.",
        ),
        (
            'The dragon was as big as a house. "Why do you come here?" it [growled|asked]. "I'
            ' wanted to ask how you are," said {hero} in a small voice.',
            'There it lay, with its head on the ground. "Go away," it said. "Everyone runs away'
            ' from me." {hero} did not run. {he} sat down on a stone.',
        ),
        (
            'A big tear fell from its eye. "I have a [thorn in my foot|bad tooth]," said the'
            " dragon. {hero} looked, and with one strong pull {he} took it out.",
            '"I am not angry," said the dragon. "I am only [cold|lonely]. Nobody has ever come to'
            ' talk to me." So {hero} stayed, and they talked until evening.',
        ),
        (
            "After that, the dragon never roared again. In winter it [lit the fires of the whole"
            " village|warmed the bread oven], and [children slid down its tail|everyone came to"
            " visit it].",
            'The next day they came back together, and the people opened their doors. "It is not'
            ' always wise to be afraid," said {elder}, and {ehe} gave the dragon {treat}.',
        ),
    ),
    "{hero} visits a dragon that everyone fears and makes it a friend.",
    (
        ("Who was everyone afraid of?", "Everyone was afraid of a dragon."),
        ("What did {hero} do?", "{hero} went to talk to the dragon."),
    ),
)

PLOTS = (STORM, MAP, NOISE, LETTER, WELL, MOON, DRAGON)
