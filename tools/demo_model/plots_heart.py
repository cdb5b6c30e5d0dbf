"""Plots about friends, fears, lessons and tricks."""

from .plot import Plot

NEWCOMER = Plot(
    "newcomer",
    (
        (
            "One {day}, a {fkind} named {friend} [moved in next door|came to live near {spot1}]."
            " {fhe} did not know anyone.",
            "One {day}, {he} saw a {fkind} alone at {spot1}. It was {friend}, who was new {at}.",
        ),
        (
            "The others played together, but nobody [asked|called] {friend}. {fhe} sat under a tree"
            " and watched them.",
            '"Why does {fhe} not play with us?" the others whispered. {friend} heard them and'
            " looked at the ground.",
        ),
        (
            "{hero} remembered how it feels to be alone. {he} took {treat} out of {his} bag and"
            ' walked over. "Would you like some?" {he} asked.',
            '"Hello," said {hero}. "I am {hero}. Do you want to see {spot2}?" {friend} looked up in'
            " surprise.",
        ),
        (
            "At first {friend} [was too shy to speak|said only one word]. But then {fhe} began to"
            " tell stories about [the sea|the mountains|a land of ice], and they were so good that"
            " the others came to listen.",
            "They [built a little dam|made a boat of leaves|threw flat stones] and talked about"
            " everything. It turned out that {friend} could {skill} better than anyone.",
        ),
        (
            'Soon {friend} was never alone again. "Thank you for the first hello," {fhe} told'
            " {hero}.",
            '"Shall we meet again tomorrow?" asked {friend}. "[Tomorrow and every day|Of'
            ' course]," said'
            " {hero}. And so they did.",
        ),
    ),
    "{hero} is the first to talk to {friend}, who is new and lonely.",
    (
        ("Who was new?", "{friend} the {fkind} was new."),
        ("Who spoke to {friend} first?", "{hero} spoke to {fhim} first."),
    ),
)

RACE = Plot(
    "race",
    (
        (
            "Every {season} there was a great race from {spot1} to {spot2}. {hero} wanted to win"
            " it.",
            "One day there was a race around {region}. The prize was a {thing}, and {hero} had"
            " trained for weeks.",
        ),
        (
            "When the bell rang, everybody ran. {hero} was fast. Soon only {friend} the {fkind} was"
            " in front of {him}.",
            '"Ready, steady, go!" called {elder} the {job}. {hero} ran like the wind, and {friend}'
            " the {fkind} was close behind {him}.",
        ),
        (
            "Near {spot3}, {friend} fell over a root and cried out. {hero} could have run past"
            " {fhim}. The end was so near!",
            "Then {hero} heard a cry. {friend} had fallen and could not get up. {hero} looked at"
            " the goal, and then {he} looked back.",
        ),
        (
            "But {he} stopped. {he} took {friend} by the hand, and slowly they went on together."
            " All the others ran past them.",
            '"A race comes every year," {he} thought, "but a friend does not." {he} went back and'
            " helped {fhim} up.",
        ),
        (
            'They came last, but [the crowd cheered|everyone clapped]. "The prize is for the one'
            ' with the biggest heart," said {elder}, and {ehe} gave it to {hero}.',
            "They came in last, hand in hand, and laughed. That evening {friend} gave {hero} a"
            " {gift}. It was worth more than any prize.",
        ),
    ),
    "{hero} stops in a race to help {friend}.",
    (
        ("Who fell?", "{friend} the {fkind} fell."),
        ("Did {hero} win the race?", "No, {hero} came last, because {he} helped {friend}."),
    ),
)

TRUTH = Plot(
    "truth",
    (
        (
            "One {day}, {he} was playing with a ball in the house of {elder} the {job}. Crash! The"
            " {colour} [vase|bowl|jug] fell down and broke.",
            "One {day}, {he} helped {elder} the {job} in the workshop. {he} turned around too"
            " quickly, and a {colour} [vase|bowl|jug] fell on the floor.",
        ),
        (
            "Nobody had seen it. {hero} hid the pieces [under the carpet|behind a box] and ran"
            " away.",
            '{hero} quickly put the pieces in a bag. "Nobody will know," {he} thought.',
        ),
        (
            "But {he} could not sleep that night. {his} stomach hurt, and even {treat} did not"
            " taste good.",
            "The next day {friend} the {fkind} wanted to play, but {hero} only shook {his} head."
            ' "Something heavy is lying on my heart," {he} said.',
        ),
        (
            'In the morning {he} went back. "I broke it," {he} said, "and I hid it. I am very'
            ' sorry."',
            'At last {he} knocked at the door. "{elder}, it was me," {he} said, and a tear ran down'
            " {his} nose.",
        ),
        (
            '{elder} was quiet for a moment. Then {ehe} smiled. "A thing can be mended,"'
            " {ehe} said."
            ' "Thank you for the truth." Together they glued the pieces, and {hero} felt as light'
            " as a feather.",
            '"I knew it," said {elder}, "and I waited for you. It takes courage to tell the truth."'
            " {hero} promised to help {ehim} for a week, and {he} slept well that night.",
        ),
    ),
    "{hero} breaks something that belongs to {elder}, hides it, and then tells the truth.",
    (
        ("Who told the truth?", "{hero} told the truth."),
        ("Was {elder} angry?", "No, {elder} was glad to hear the truth."),
    ),
)

LEARN = Plot(
    "learn",
    (
        (
            "More than anything, {he} wanted to learn to {skill}. But {he} did not know how.",
            "All the others could {skill}, but {hero} could not.",
        ),
        (
            "The first time {he} tried, [everything went wrong|it was a disaster]. [The crows"
            " laughed.|Even the sheep turned away.] {hero} felt {sad}.",
            "{he} tried on Monday, and {he} failed. {he} tried on Tuesday, and {he} failed again."
            ' "I shall never learn it," {he} said.',
        ),
        (
            '{friend} the {fkind} had seen it all. "I fell a hundred times before I could do it,"'
            ' said {friend}. "Come to {spot1} tomorrow, and I will teach you."',
            'Old {elder} the {job} sat down beside {him}. "Do not try to be good," {ehe} said.'
            ' "Only try to be a little better than yesterday."',
        ),
        (
            "So {hero} practised every {day}. [Some days were good, and some days were bad.|It was"
            " hard work, but slowly it became easier.] {he} did not give up.",
            "Day after day, {he} practised at {spot1}. When it rained, {he} practised in the rain.",
        ),
        (
            "Then, one {season} {day}, it happened. {hero} could {skill}! {he} was so {glad} that"
            " {he} told everyone {he} met.",
            "At the next feast everyone wanted to see {him}. {hero} could {skill} as if it were the"
            ' easiest thing in the world. And when a little one asked for help, {he} said, "Come, I'
            ' will teach you."',
        ),
    ),
    "{hero} wants to learn to {skill}, and practises until {he} can do it.",
    (
        ("What did {hero} want to learn?", "{hero} wanted to learn to {skill}."),
        ("How did {hero} learn it?", "{hero} practised every day and did not give up."),
    ),
)

DARK = Plot(
    "dark",
    (
        (
            "{hero} was not afraid of [wind or rain|bears or bees]. But {he} was afraid of the"
            " dark.",
            "Every evening, when the lamp went out, {hero} was afraid.",
        ),
        (
            "One night {his} friend {friend} the {fkind} did not come home. {fhe} had gone to"
            " {spot1} and had not come back.",
            'One evening {elder} the {job} came to the door. "{friend} the {fkind} is lost near'
            ' {spot1}," {ehe} said.',
        ),
        (
            "{hero} looked out. It was very dark. {his} legs would not move. Then {he} saw a tiny"
            " light, and a firefly landed on {his} hand.",
            "{hero} stood at the door and could see nothing at all. Then, one by one, the stars"
            ' came out. "We are here too," they seemed to say.',
        ),
        (
            "Step by step, {he} walked through the night and called the name of {friend}. At"
            " {spot1}, a small voice answered.",
            "{he} sang a little song and went on. The song kept {him} warm, and {friend} heard it"
            ' from far away. "I am here!" called {friend}.',
        ),
        (
            'They held hands all the way home. "The dark is only the day with its eyes closed,"'
            " said {hero}, and {he} slept without a lamp.",
            '"Were you not afraid?" asked {friend}. "Yes," said {hero}, "but you were more'
            ' important." Since that night {he} has liked the dark, because it has stars in it.',
        ),
    ),
    "{hero} is afraid of the dark, but goes out to find {friend}.",
    (
        ("What was {hero} afraid of?", "{hero} was afraid of the dark."),
        ("Who was lost?", "{friend} the {fkind} was lost."),
    ),
)

MUSIC = Plot(
    "music",
    (
        (
            "It was a quiet place. Nobody sang there, and nobody danced. The people [only"
            " worked|had forgotten how to laugh].",
            '{hero} loved music, but nobody there liked it. "Too loud," they said. "Go and work!"',
        ),
        (
            "One {day}, {hero} heard the wind play in the trees. It gave {him} an idea. {he} cut a"
            " flute from a branch and began to play.",
            "So {he} cut a flute from a reed, went to {spot1}, and played alone. The birds were"
            " the first to listen.",
        ),
        (
            '{friend} the {fkind} came closer and began to tap {fhis} foot. "[What is that|I have'
            ' never heard such a thing]," {fhe} said. "Do not stop!"',
            "Then {friend} the {fkind} came with a drum made from an old pot. Together they sounded"
            " like rain and thunder.",
        ),
        (
            "The music flew over the roofs. A window opened, and then another. {elder} the {job}"
            " came out and frowned. But {ehis} foot was moving too!",
            "The next evening they played in front of the house of {elder} the {job}, who never"
            " smiled. {elder} listened. Then a tear ran down {ehis} cheek, and {ehe} began"
            " to sing.",
        ),
        (
            "Soon everyone was dancing. They danced until the moon was high, and from then on there"
            " was music every week.",
            '"I had forgotten how good it feels," said {elder}. Since that day nobody has called it'
            " a quiet place.",
        ),
    ),
    "{hero} and {friend} bring music to a quiet place.",
    (
        ("What did {hero} play?", "{hero} played the flute."),
        ("Who came to play with {hero}?", "{friend} the {fkind} came to play."),
    ),
)

WINTER = Plot(
    "winter",
    (
        (
            "In autumn, {hero} gathered {fruit} from morning to night and stored them for the"
            " winter.",
            "The days were getting shorter. Every day {hero} carried {fruit} and wood into {his}"
            " home.",
        ),
        (
            '{friend} the {fkind} lay in the sun. "Why do you work so hard?" {fhe} asked.'
            ' "Winter is'
            ' far away." {hero} only smiled and went on.',
            '"Come and play with me," called {friend} the {fkind}. "I will, when I have finished,"'
            " said {hero}.",
        ),
        (
            "Then the snow came. It covered {spot1} and {spot2}, and there was nothing left"
            " to eat.",
            "One night the first snow fell. In the morning everything was white, and the ground was"
            " as hard as stone.",
        ),
        (
            'There was a knock at the door. {friend} stood outside, thin and cold. "You were'
            ' right,"'
            ' {fhe} said. "I should have listened to you."',
            "{hero} found {friend} near {spot3}. {fhe} was shaking with cold and had not eaten for"
            " two days.",
        ),
        (
            '"Come in," said {hero}. "There is enough for two, if you tell me stories." So {friend}'
            " told a story every night, and the winter was short. The next autumn they worked side"
            " by side.",
            "{hero} could have said no. But {he} gave {fhim} {treat} and a place by the fire. When"
            " autumn came again, {friend} was the first to start work.",
        ),
    ),
    "{hero} stores {fruit} for the winter and shares them with {friend}.",
    (
        ("What did {hero} store?", "{hero} stored {fruit} for the winter."),
        ("Why was {friend} hungry?", "{friend} had not worked in autumn."),
    ),
)

PLOTS = (NEWCOMER, RACE, TRUTH, LEARN, DARK, MUSIC, WINTER)
