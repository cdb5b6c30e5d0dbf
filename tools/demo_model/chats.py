"""Questions and answers, stories on request and small exercises, as chat exchanges."""

import random
from collections.abc import Callable

from . import facts, plots_heart, plots_home, plots_road, plots_wild, words
from .cast import Actor, draw_animal, draw_friend, draw_person
from .conversation import Message
from .grammar import expand, fill, listing, pick
from .stories import Wish, tell, tell_scene

Exchange = tuple[Message, ...]

NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six")


def ask(question: str, answer: str) -> Exchange:
    """Return one question of the user with its answer."""
    return (Message("user", question), Message("assistant", answer))


def casual(rng: random.Random, question: str) -> str:
    """Write a question as people type it: now and then without capitals or the last mark."""
    roll = rng.random()
    if roll < 0.1:
        return question.lower().rstrip(".?!")
    if roll < 0.18:
        return question.rstrip(".?!")
    return question


def small_talk(rng: random.Random) -> Exchange:
    """Greetings, thanks, jokes and who the model is."""
    question, answer = pick(rng, facts.SMALL_TALK)
    return ask(casual(rng, fill(rng, question, {})), fill(rng, answer, {}))


def fact(rng: random.Random) -> Exchange:
    """A fact about the world, the real one or Lornwick, or an honest "I do not know"."""
    roll = rng.random()
    if roll < 0.12:
        country, city = pick(rng, tuple(facts.CAPITALS.items()))
        question = f"[What is|What's|Name|Tell me] the capital of {country}?"
        answer = f"The capital of {country} is {city}."
    elif roll < 0.4:
        question, answer = pick(rng, facts.LORNWICK)
    elif roll < 0.8:
        question, answer = pick(rng, facts.NATURE)
    else:
        question, answer = pick(rng, facts.UNKNOWN_QUESTIONS), pick(rng, facts.UNKNOWN_ANSWERS)
    answer = fill(rng, answer, {})
    return ask(casual(rng, fill(rng, question, {})), answer)


def word_task(rng: random.Random) -> Exchange:
    """Opposites, plurals, animals and their homes, spelling."""
    kind = rng.randrange(5)
    if kind == 0:
        pair = pick(rng, facts.OPPOSITES)
        first, second = pair if rng.random() < 0.5 else pair[::-1]
        question = f"What is the opposite of {first}?"
        answer = f"The opposite of {first} is {second}."
    elif kind == 1:
        one, many = pick(rng, facts.PLURALS)
        question, answer = f"What is the plural of {one}?", f"The plural of {one} is {many}."
    elif kind == 2:
        animal = pick(rng, words.ANIMALS)
        question = f"[Where does a {animal.noun} live|What is the home of a {animal.noun}]?"
        answer = f"a {animal.noun} lives in a {animal.den}."
    elif kind == 3:
        animal = pick(rng, words.ANIMALS)
        question = f"What is a young {animal.noun} called?"
        answer = f"a young {animal.noun} is called a {animal.young}."
    else:
        nouns = words.COLOURS + words.FRUITS + words.CROPS + tuple(a.noun for a in words.ANIMALS)
        word = pick(rng, nouns)
        question, answer = (
            f"[Spell the word {word}.|How do you spell {word}?]",
            "-".join(word) + ".",
        )
        return ask(expand(rng, question, {}), answer)
    return ask(casual(rng, expand(rng, question, {})), expand(rng, answer, {}))


def name_some(rng: random.Random) -> Exchange:
    """A list of things: animals, colours, fruits."""
    category, members = pick(
        rng,
        (
            ("animals", tuple(animal.noun for animal in words.ANIMALS)),
            ("colours", words.COLOURS),
            ("kinds of fruit", words.FRUITS),
            ("seasons", words.SEASONS),
            ("cities", words.CITIES),
            ("jobs", words.JOBS),
            ("names", words.NAMES),
            ("things made by hand", words.GIFTS),
        ),
    )
    count = rng.randint(2, min(5, len(members)))
    chosen = rng.sample(members, count)
    question = f"[Name|List|Give me|Tell me] {NUMBER_WORDS[count]} {category}."
    if rng.random() < 0.25:
        question = question[:-1] + " as a numbered list."
        answer = "\n".join(f"{i}. {item}" for i, item in enumerate(chosen, 1))
    else:
        answer = listing(chosen)
        answer = answer[0].upper() + answer[1:] + "."
    return ask(casual(rng, fill(rng, question, {})), answer)


def counting(rng: random.Random) -> Exchange:
    """Count up, count down, or put numbers in order."""
    if rng.random() < 0.3:
        numbers = rng.sample(range(100), rng.randint(3, 5))
        shown, ordered = (", ".join(map(str, row)) for row in (numbers, sorted(numbers)))
        return ask(f"Sort these numbers: {shown}", ordered)
    first = rng.choice((1, 1, rng.randint(0, 60)))
    last = first + rng.randint(3, 12)
    numbers = list(range(first, last + 1))
    if rng.random() < 0.3:
        first, last, numbers = last, first, numbers[::-1]
    return ask(casual(rng, f"Count from {first} to {last}."), ", ".join(map(str, numbers)) + ".")


def memory(rng: random.Random) -> Exchange:
    """The user says a name or a favourite thing, and asks for it later."""
    name = words.some_name(rng)
    thing = pick(rng, words.COLOURS)
    told = pick(
        rng,
        (
            ("My name is {name}.", "What is my name?", "Your name is {name}."),
            ("I am {name}.", "Who am I?", "You are {name}."),
            ("Hi, I am {name}.", "What is my name?", "Your name is {name}."),
            ("Hello, my name is {name}.", "Do you know my name?", "Yes, your name is {name}."),
            ("My favourite colour is {thing}.", "What is my favourite colour?",
             "Your favourite colour is {thing}."),
        ),
    )  # fmt: skip
    slots = {"name": name, "thing": thing}
    reply = "Nice to meet you, {name}!" if "{name}" in told[0] else "[{thing}|{thing}] is lovely."
    turns = ask(expand(rng, told[0], slots), expand(rng, reply, slots))
    if rng.random() < 0.5:
        turns += rng.choice((fact, small_talk, word_task))(rng)
    return turns + ask(casual(rng, expand(rng, told[1], slots)), expand(rng, told[2], slots))


def recall(rng: random.Random, most: int = 12) -> Exchange:
    """A list of who has what or which box holds what, and questions about it."""
    count = rng.randint(3, most)
    things = rng.sample(words.TREASURES, min(count, len(words.TREASURES)))
    people = rng.sample(words.NAMES, len(things))
    lines = [f"{who} has the {what}." for who, what in zip(people, things, strict=True)]
    start = fill(rng, "[Read|Remember|Here is] [this|a] list[:|.]\n", {})
    turns: Exchange = ()
    for i in rng.sample(range(len(things)), 2):
        if rng.random() < 0.5:
            question, answer = f"What does {people[i]} have?", f"{people[i]} has the {things[i]}."
        else:
            question, answer = f"Who has the {things[i]}?", f"{people[i]} has the {things[i]}."
        text = question if turns else start + "\n".join(lines) + "\n" + question
        turns += ask(text, answer)
    return turns


def copying(rng: random.Random) -> Exchange:
    """Repeat a sentence word for word, or say something to someone."""
    if rng.random() < 0.3:
        name = words.some_name(rng)
        word = pick(rng, ("hello", "goodbye", "good morning", "thank you"))
        return ask(f"Say {word} to {name}.", f"{word.capitalize()}, {name}!")
    sentence = pick(rng, tell_scene(rng).split(". ")).rstrip(".") + "."
    return ask(fill(rng, "[Repeat|Repeat after me|Say]: ", {}) + sentence, sentence)


def story(rng: random.Random) -> Exchange:
    """A story on request, often with questions about it afterwards."""
    hero: Actor = draw_person(rng) if rng.random() < 0.4 else draw_animal(rng)
    about, wish = _draw_wish(rng, hero)
    told = tell(rng, wish)
    request = pick(rng, _STORY_REQUESTS) + (" about " + about if about else "") + "[.|.||!]"
    slots = {"trait": wish.trait, "kind": hero.kind, "hero": hero.name}
    if wish.friend:
        slots |= {"friend": wish.friend.name, "fkind": wish.friend.kind}
    turns = ask(casual(rng, expand(rng, request, slots)), told.text)
    return turns + _follow_up(rng, told.questions, told.summary)


def _draw_wish(rng: random.Random, hero: Actor) -> tuple[str, Wish]:
    """Return what the story should be about, in words with slots, and the wish that says so."""
    roll = rng.random()
    if roll < 0.3:
        return "", Wish()
    if roll < 0.5:
        topic, plot = pick(rng, _TOPICS)
        return topic, Wish(plot=plot)
    if roll < 0.6:
        friend = draw_friend(rng)
        if friend.kind != hero.kind and friend.name != hero.name:
            both = pick(rng, ("a {kind} and a {fkind}", "{hero} and {friend} the {fkind}"))
            return both, Wish(hero, friend=friend)
    if roll < 0.8:
        about = pick(rng, ("a {trait} {kind}", "a {trait} {kind} called {hero}"))
        return about, Wish(hero, pick(rng, words.TRAITS))
    return pick(rng, ("a {kind}", "a {kind} named {hero}", "{hero} the {kind}")), Wish(hero)


_TOPICS = (
    ("a dragon", plots_road.DRAGON),
    ("the moon", plots_road.MOON),
    ("a treasure", plots_road.MAP),
    ("a storm", plots_road.STORM),
    ("a letter", plots_road.LETTER),
    ("a race", plots_heart.RACE),
    ("music", plots_heart.MUSIC),
    ("friendship", plots_heart.NEWCOMER),
    ("winter", plots_heart.WINTER),
    ("the night", plots_heart.DARK),
    ("a garden", plots_home.GARDEN),
    ("a gift", plots_home.GIFT),
    ("a wolf", plots_wild.TRICK),
    ("a bird", plots_wild.BIRD),
    ("a machine", plots_wild.INVENTION),
)
_STORY_REQUESTS = (
    "[Tell|Tell|Read] me a [|short |little |nice ]story",
    "[Write|Write me|Make up] a [|short |little |happy ]story",
    "[Can you|Please|Could you please] tell me a [|short ]story",
    "I [want|would like] [to hear |]a [|short |bedtime ]story",
)


def _follow_up(
    rng: random.Random, questions: tuple[tuple[str, str], ...], summary: str
) -> Exchange:
    turns: Exchange = ()
    for question, answer in rng.sample(questions, rng.choice((0, 1, 1, 2))):
        turns += ask(casual(rng, question), answer)
    if rng.random() < 0.2:
        request = fill(rng, "[Summarise the story in one sentence.|What happens in the story?]", {})
        turns += ask(casual(rng, request), summary)
    return turns


def reading(rng: random.Random) -> Exchange:
    """A story that the user gives, with questions or a wish for a summary."""
    told = tell(rng)
    if rng.random() < 0.3:
        head = fill(rng, "[Summarise this story|Summarise|Give me a summary]:\n\n", {})
        return ask(head + told.text, told.summary)
    first, second = rng.sample(told.questions, 2)
    turns = ask(told.text + "\n\n" + first[0], first[1])
    return turns + ask(*second) if rng.random() < 0.5 else turns


EXCHANGES: tuple[tuple[float, Callable[[random.Random], Exchange]], ...] = (
    (1.0, small_talk),
    (2.4, fact),
    (1.0, word_task),
    (0.6, name_some),
    (0.6, counting),
    (0.5, memory),
    (0.5, recall),
    (0.5, copying),
    (2.0, story),
    (0.5, reading),
)
