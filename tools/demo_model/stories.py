"""Short stories: an opening, the beats of one plot, and now and then a closing line."""

import random
from dataclasses import dataclass

from . import plots_heart, plots_home, plots_road, plots_wild, words
from .cast import Actor, Cast, draw_cast
from .grammar import expand, fill, pick, polish
from .plot import Plot

PLOTS: tuple[Plot, ...] = (
    *plots_home.PLOTS,
    *plots_road.PLOTS,
    *plots_heart.PLOTS,
    *plots_wild.PLOTS,
)

_ONCE = (
    "once upon a time, there was a {trait} {kind} named {hero}. {he} lived {home} {at}.",
    "once upon a time, a {trait} {kind} called {hero} lived {home} {at}.",
    "once upon a time, {at}, there lived a {kind} named {hero}, who was very {trait}.",
    "once upon a time, there lived a {kind} {at}. {his} name was {hero}, and {he} was"
    " [always|very] {trait}.",
    "once upon a time, {home} {at}, lived {hero} the {kind}.",
)
_OTHER = (
    "there was once a {kind} named {hero} who lived {home} {at}.",
    "long ago, {at}, a {trait} {kind} named {hero} lived {home}.",
    "{hero} was a {trait} {kind}. {he} lived {home} {at}.",
    "{home} {at} there lived a {kind} named {hero}. Everyone said that {he} was {trait}.",
    "this is the story of {hero}, a {trait} {kind} who lived {home} {at}.",
)
_ASIDES = (
    "It was {season}, and {scene}.",
    "That {season}, {scene}.",
    "{he} loved [the smell of rain|long walks|old songs|warm bread] and [the sound of {region}|"
    "stories by the fire|the colour {colour}].",
    "{he} [often walked|liked to walk] to {spot3} in the {day}.",
    "{he} had many friends, and [most of all {he} liked to laugh|every day brought something new].",
)
_CLOSINGS = ("The end.", "And that is the end of the story.", "So ends the story of {hero}.")

# "shepherd girl" and "young woman" already carry an adjective; most asides are left out so that
# a story stays within 256 tokens.
ASIDE_CHANCE = 0.4
CLOSING_CHANCE = 0.12
ONCE_CHANCE = 0.45
PARAGRAPH_CHANCE = 0.35


@dataclass(frozen=True, slots=True)
class Story:
    """A story with what can be asked about it."""

    text: str
    summary: str
    questions: tuple[tuple[str, str], ...]
    cast: Cast
    plot: Plot


@dataclass(frozen=True, slots=True)
class Wish:
    """What a story must have: its hero, the hero's trait, a friend, a plot; all optional."""

    hero: Actor | None = None
    trait: str = ""
    friend: Actor | None = None
    plot: Plot | None = None


_ANYTHING = Wish()


def tell(rng: random.Random, wish: Wish = _ANYTHING) -> Story:
    """Tell one story that fulfils `wish`."""
    cast = draw_cast(rng, wish.hero, wish.trait, wish.friend)
    plot = wish.plot or pick(rng, PLOTS)
    openings = _ONCE if rng.random() < ONCE_CHANCE else _OTHER
    first = fill(rng, pick(rng, openings), cast.slots)
    if rng.random() < ASIDE_CHANCE:
        first += " " + fill(rng, pick(rng, _ASIDES), cast.slots)
    beats = [fill(rng, pick(rng, beat), cast.slots) for beat in plot.beats]
    if rng.random() < CLOSING_CHANCE:
        beats.append(fill(rng, pick(rng, _CLOSINGS), cast.slots))
    text = polish(_lay_out(rng, [first, *beats]))
    questions = tuple(
        (expand(rng, question, cast.slots), expand(rng, answer, cast.slots))
        for question, answer in plot.questions + _GENERAL_QUESTIONS
    )
    return Story(text, expand(rng, plot.summary, cast.slots), questions, cast, plot)


_GENERAL_QUESTIONS = (
    ("[Who is the story about|What is the story about]?", "The story is about {hero} the {kind}."),
    ("What was {hero}?", "{hero} was a {kind}."),
)


def _lay_out(rng: random.Random, parts: list[str]) -> str:
    """Join the parts into one paragraph, or into two or three."""
    if rng.random() > PARAGRAPH_CHANCE:
        return " ".join(parts)
    breaks = rng.sample(range(1, len(parts)), rng.randint(1, 2))
    return "".join(
        part if i == 0 else ("\n\n" if i in breaks else " ") + part for i, part in enumerate(parts)
    )


_DIARY = (
    "Today [I woke up early|I got up late|was a long day]. It is {season} now, and {day} light"
    " [falls|lies] on {region}.",
    "I [went|walked] to {spot1} [with {friend}|alone|after breakfast] and saw a {animal} there. It"
    " [looked at me|did not see me] and [ran away|went on eating].",
    "{friend} [gave|showed] me a {thing}. I [do not know|wonder] where {fhe} found it.",
    "In the {day} I tried to {skill}, but I [am still learning|need more practice].",
    "My {machine} is broken again. Tomorrow I will ask {elder} the {job} to help me.",
    "We ate {treat}, and [it was very good|I ate too much of it].",
    "I feel {glad} [today|tonight], [because {friend} is back|because the rain has stopped|and I"
    " do not know why].",
    "[Now the lamp is going out, and I must sleep.|It is late, and the moon is up. Good night.]",
)
_PLACE = (
    "{at} stands [a|an old] {colour} house. [{elder} the {job}|A {job}] lives there with [a|an"
    " old] {animal}.",
    "Every {day}, {ehe} opens the window and looks [over|toward] {region}.",
    "In {season}, {ehe} [sells|picks] {fruit} and makes {treat}.",
    "On the wall hangs a {thing}, and next to the door stands a {machine}.",
    "When [children|visitors] come, {ehe} [tells them a story|gives them {treat}].",
    "They often ask {ehim} how to {skill}, and {ehe} shows them.",
    "The road [goes|runs] past {spot1} and down to {spot2}. [Few people use it.|It is a"
    " long walk.]",
    "At night [it is quiet there|you can hear an owl], and a light [burns|shines] in the window.",
)


def tell_scene(rng: random.Random) -> str:
    """Return a diary entry in the first person or a description in the present tense."""
    cast = draw_cast(rng)
    slots = {**cast.slots, "animal": pick(rng, words.ANIMALS).noun}
    lines = _DIARY if rng.random() < 0.5 else _PLACE
    first, middle, last = lines[0], list(lines[1:-1]), lines[-1]
    kept = [line for line in middle if rng.random() < 0.6]
    return expand(rng, " ".join([first, *kept, last]), slots)
