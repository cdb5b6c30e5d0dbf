"""Plots about lost and broken things, gifts and gardens."""

from .plot import Plot

LOST = Plot(
    "lost",
    (
        (
            "[One {day}|One {season} {day}], {he} [reached into {his} bag|looked on the shelf] and"
            " [gasped|stood still]. {his} {thing} was gone!",
            "{he} loved {his} {thing} more than anything. But one {day} it was [gone|lost].",
            "{his} dearest [thing|possession] was a {thing}. One {day}, {he} lost it.",
        ),
        (
            "{he} looked [near|by] {spot1}, but it was not there. {he} looked by {spot2}, but"
            " there was [only a snail|nothing there]. {hero} felt {sad}.",
            "{he} searched [the whole house|under the bed and behind the door]. Then {he} walked"
            " all the way to {spot1}, but {he} found nothing. {he} sat down and felt very {sad}.",
            '"Where can it be?" {he} said. {he} walked to {spot1} and back again, but {he} could'
            " not find it.",
        ),
        (
            '{friend} the {fkind} [came by|saw {him}] and asked, "[What is wrong|Why are you so'
            ' {sad}], {hero}?" "I have lost my {thing}," said {hero}. "Then let us look together,"'
            " said {friend}.",
            "Just then, {he} met a {fkind} called {friend}. When {friend} heard what had happened,"
            ' {fhe} said, "[Four eyes are better than two|I will help you]. [Where were you'
            ' yesterday|Where did you last see it]?"',
        ),
        (
            '{hero} thought for a moment. "[Yesterday I was|I played] at {spot3}," {he} said. They'
            " [ran|hurried] there at once, and [there it was|{friend} saw it first]. The {thing}"
            " was lying [in the grass|under a leaf|between two stones].",
            "Together they went to {spot3}. [{friend} looked high and {hero} looked low.|They"
            " looked in every corner.] At last {hero} saw something [bright|{colour}] on the"
            " ground. It was the {thing}!",
        ),
        (
            '{hero} [jumped for joy|laughed out loud]. "Thank you, {friend}," {he} said. From that'
            " day on, {hero} [kept {his} {thing} in a safe place|and {friend} were good friends].",
            "{hero} was so {glad} that {he} [hugged {friend}|danced in a circle]. That evening"
            " they ate {treat} together, and {hero} never lost {his} {thing} again.",
        ),
    ),
    "{hero} loses {his} {thing}, and {friend} helps {him} to find it at {spot3}.",
    (
        ("What did {hero} lose?", "{hero} lost {his} {thing}."),
        ("Where was the {thing}?", "The {thing} was at {spot3}."),
    ),
)

BROKEN = Plot(
    "broken",
    (
        (
            "{hero} had a {machine} that {he} [loved|used every day]. One {day}, it fell [down|on"
            " the ground] and broke.",
            "One {day}, {he} heard a loud crack. {his} {machine} was broken!",
        ),
        (
            "{he} tried to mend it with [string|glue|a nail and a hammer], but it fell apart again."
            ' "[I cannot do it|It is no use]," {he} [sighed|said]. {he} felt {sad}.',
            "{he} pushed and pulled, but the {machine} would not [move|work]. {he} wanted to throw"
            " it away.",
        ),
        (
            "In the end {he} carried it to old {elder} the {job}, who lived [near|by] {spot1}."
            ' "Can you help me?" {he} asked. {elder} looked at the {machine} for a long time. "I'
            ' will not mend it for you," {ehe} said, "but I will show you how."',
            "An old {job} named {elder} was passing by. {ehe} stopped and smiled."
            ' "[Broken things can be mended|Do not give up yet]," said {elder}. "Sit down, and we'
            ' will do it step by step."',
        ),
        (
            "They worked [until the sun went down|all {day}]. {hero} cut the wood, and {elder}"
            " held it still. [First it was too long, and then it was too short.|Twice they had to"
            " start again.] At last every part was in its place.",
            "{elder} gave {him} a small [knife|hammer] and a piece of [wood|rope]. {hero} worked"
            " slowly and carefully. [It took three days|It took a long time], but {he} did not"
            " stop.",
        ),
        (
            "When {hero} tried the {machine}, it worked better than before! {he} was {glad},"
            " because {he} had mended it with {his} own hands.",
            '"Look, it works!" cried {hero}. {elder} nodded. "Now you can help the next one," {ehe}'
            " said. And that is what {hero} did.",
        ),
    ),
    "{hero} breaks {his} {machine} and learns from {elder} how to mend it.",
    (
        ("What was broken?", "The {machine} of {hero} was broken."),
        ("Who helped {hero}?", "{elder} the {job} helped {hero}."),
    ),
)

GARDEN = Plot(
    "garden",
    (
        (
            "One {day}, {he} found a small {colour} seed near {spot1}. {he} [planted it beside"
            " {his} door|put it in the earth] and gave it water.",
            'In spring, old {elder} gave {him} a tiny seed. "Plant it and wait," {ehe} said. So'
            " {hero} planted it [beside {his} door|in the sun].",
        ),
        (
            "The next day {he} looked, but there was nothing to see. {he} looked again and again."
            ' "Why does it not grow?" {he} asked.',
            "Every morning {he} ran outside to look. A week went by, and nothing happened. {hero}"
            " was {sad}.",
        ),
        (
            '{friend} the {fkind} [laughed|smiled]. "A seed cannot hear you shout," {fhe} said.'
            ' "It needs [sun, rain, and time|water and a little time]." So {hero} learned to wait.',
            '"Be patient," said {friend} the {fkind}. "[Good things grow slowly|The roots grow'
            ' first, where nobody can see them]." So {hero} gave the seed water and waited.',
        ),
        (
            "One morning a small green leaf came out of the ground. Soon there was another, and"
            " then ten more. By the end of summer, the {crop} was [as big as a cart|the biggest"
            " in the whole land].",
            "After many days, a green leaf appeared. It grew and grew. Before long there was a"
            " {crop} that was bigger than {hero}!",
        ),
        (
            "{hero} could not [eat|use] it all alone, so {he} called {his} friends. They [made"
            " a great pot of soup|had a feast under the stars], and everyone went home {glad}.",
            '"It is too big for one," said {hero}. {he} shared it with [everyone|all the people'
            " and animals] {at}, and {he} kept one small seed for the next year.",
        ),
    ),
    "{hero} plants a seed, learns to wait, and shares a giant {crop}.",
    (
        ("What grew from the seed?", "A giant {crop} grew from the seed."),
        ("What did {hero} learn?", "{hero} learned to be patient."),
    ),
)

GIFT = Plot(
    "gift",
    (
        (
            "It was almost the birthday of {his} friend {friend} the {fkind}. {hero} wanted to"
            " give {fhim} [something special|a fine gift], but {he} had no money.",
            "{his} best friend was {friend} the {fkind}. [Tomorrow was|The next day was] the"
            " birthday of {friend}, and {hero} had no gift at all.",
        ),
        (
            "{he} went to the market and looked at the [toys|fine things], but they [cost too"
            " much|were not for {him}]. {he} walked home and felt {sad}.",
            '"What can I give?" {he} thought. {he} walked to {spot1} and back, but {he} had no'
            " [idea|plan].",
        ),
        (
            'Then {he} met {elder} the {job}. "The best gift is the one you make yourself," said'
            " {elder}, and {ehe} gave {him} some [old wood|cloth|clay] and good advice.",
            "Then {he} remembered what old {elder} the {job} had told {him}: a gift does not need"
            " gold, only time and love.",
        ),
        (
            "So {hero} stayed awake [all night|until late] and made a {gift}. It was not perfect."
            " One side was longer than the other. But it was made with love.",
            "{he} worked hard, and by morning {he} had made a {gift}. {he} painted it {colour} and"
            " put it in a box.",
        ),
        (
            'When {friend} opened the box, {fhis} eyes shone. "Did you make this {gift} for me?"'
            ' {fhe} asked. "It is the best gift of all!" The two friends ate {treat} and laughed'
            " until the moon came up.",
            '"A {gift}!" cried {friend}. "[Nobody has one like it|I will keep it forever]." {hero}'
            " smiled and was {glad}.",
        ),
    ),
    "{hero} has no money, so {he} makes a {gift} for {friend}.",
    (
        ("What did {hero} make?", "{hero} made a {gift}."),
        ("Who got the gift?", "{friend} the {fkind} got the gift."),
    ),
)

SHARING = Plot(
    "sharing",
    (
        (
            "One {season} {day}, {he} walked home from {spot1} with a basket full of {fruit}. {he}"
            " [was hungry|wanted to make a pie].",
            "One {day}, {he} picked a whole basket of {fruit} near {spot1}. It had taken {him} all"
            " day.",
        ),
        (
            'On the way {he} met {friend} the {fkind}, who sat by the road. "I have not eaten'
            ' since yesterday," said {friend}. {hero} looked at the {fruit}. Then {he} gave {fhim}'
            " [half of them|some].",
            'At {spot2}, a hungry {fkind} named {friend} was resting. "Please, may I have some'
            ' {fruit}?" {fhe} asked. "Of course," said {hero}.',
        ),
        (
            "A little later {he} met {elder}, an old {job}. {ehe} was hungry too, and {hero} gave"
            " {ehim} the rest. Now the basket was empty.",
            "Next came old {elder} the {job}, who was tired and cold. {hero} gave {ehim} {fruit} as"
            " well. Soon there was nothing left.",
        ),
        (
            "Then the sky grew dark, and it began to rain. {hero} [slipped and hurt {his} foot|"
            'lost the way]. "Help!" {he} called. {friend} heard {him} and came running, and'
            " {elder} brought a lantern.",
            "When {hero} came home, {he} was [hungry and tired|cold and hungry]. There was nothing"
            " to eat. Then {he} heard a knock at the door. It was {friend}, and {elder} was with"
            " {fhim}. They had brought {treat}.",
        ),
        (
            '"You helped us," said {elder}, "and now we help you." They [sat by the fire|took {him}'
            " home] and ate together. {hero} learned that [what you give comes back|a shared meal"
            " tastes best].",
            "They ate and sang until midnight. An empty basket, thought {hero}, can make a full"
            " heart.",
        ),
    ),
    "{hero} gives away all {his} {fruit}, and later the others help {him}.",
    (
        ("What was in the basket?", "The basket was full of {fruit}."),
        ("Who was hungry?", "{friend} and {elder} were hungry."),
    ),
)

TRADE = Plot(
    "trade",
    (
        (
            "{hero} needed a {machine}, but {he} had only a {thing}.",
            "All that {hero} wanted was a {machine}. But all {he} had was a {thing}.",
        ),
        (
            'At the market {he} met {friend} the {fkind}. "I like your {thing}," said {friend}.'
            ' "I will give you a basket of {fruit} for it." {hero} [agreed|thought about it and'
            " said yes].",
            "{he} went to {spot1}, where {friend} the {fkind} was selling {fruit}. They made a"
            " trade: the {thing} for a big basket of {fruit}.",
        ),
        (
            "With the {fruit}, {hero} made {treat}. [It smelled so good that people came from all"
            " sides.|It was the best in the whole town.]",
            "{hero} carried the {fruit} home and made {treat} for [everyone|the whole village].",
        ),
        (
            '{elder} the {job} tasted it and closed {ehis} eyes. "I have not eaten so well for'
            ' years," {ehe} said. "Ask me for anything in my workshop."',
            'Old {elder} the {job} asked for a second piece, and then for a third. "What can I'
            ' give you for this?" {ehe} said.',
        ),
        (
            'And so {hero} got {his} {machine} at last. "[From a {thing} to a {machine}|One good'
            ' trade leads to the next]!" {he} laughed, and went home {glad}.',
            '"A {machine}, please," said {hero}. {elder} made one in a single day, and it was the'
            " finest {machine} in the land.",
        ),
    ),
    "{hero} trades a {thing} for {fruit}, and in the end gets a {machine}.",
    (
        ("What did {hero} need?", "{hero} needed a {machine}."),
        ("What did {hero} trade first?", "{hero} traded a {thing} for {fruit}."),
    ),
)

PLOTS = (LOST, BROKEN, GARDEN, GIFT, SHARING, TRADE)
