"""JSON records: bare ones, and ones that a user asks for."""

import json
import random

from . import words
from .chats import Exchange, ask
from .grammar import fill, mend_articles, pick

Record = dict[str, object]  # what json.dumps takes; never leaves this module


def _draw(rng: random.Random) -> tuple[str, Record]:
    """Return a description in words and the record that says the same."""
    name = words.some_name(rng)
    age = rng.randint(3, 90)
    city = words.some_city(rng)
    job = pick(rng, words.JOBS)
    colour, thing = pick(rng, words.COLOURS), pick(rng, words.TREASURES)
    animal = pick(rng, words.ANIMALS).noun
    count, price = rng.randint(1, 40), rng.randint(1, 60)
    fruit = pick(rng, words.FRUITS)
    owns = rng.sample(words.GIFTS, 2)
    kind = rng.randrange(6)
    if kind == 0:
        return (
            f"a person named {name} who is {age} years old and lives in {city}",
            {"name": name, "age": age, "city": city},
        )
    if kind == 1:
        return (
            f"a {colour} {animal} called {name} that is {age % 15 + 1} years old",
            {"name": name, "kind": animal, "colour": colour, "age": age % 15 + 1},
        )
    if kind == 2:
        return f"{count} {fruit} for {price} coins", {
            "item": fruit,
            "count": count,
            "price": price,
        }
    if kind == 3:
        likes = rng.random() < 0.5
        return (
            f"{name}, a {job} who {'likes' if likes else 'does not like'} {fruit}",
            {"name": name, "job": job, f"likes_{fruit}": likes},
        )
    if kind == 4:
        return (
            f"the {job} {name} who owns a {owns[0]} and a {owns[1]}",
            {"name": name, "job": job, "owns": owns},
        )
    return (
        f"a letter from {name} in {city} about a {thing}",
        {"from": {"name": name, "city": city}, "about": thing},
    )


def _dump(rng: random.Random, record: object) -> str:
    return json.dumps(record, indent=2 if rng.random() < 0.2 else None)


def record_question(rng: random.Random) -> Exchange:
    """Ask for a record."""
    described, record = _draw(rng)
    described = mend_articles(described)
    roll = rng.random()
    if roll < 0.6:
        head = "[Write|Make|Give me|Create] a JSON [record|object] for "
        question = fill(rng, head, {}) + described + "."
    elif roll < 0.8:
        keys = rng.sample(list(record), len(record))
        record = {key: record[key] for key in keys}
        question = f"Write this as JSON with the keys {', '.join(keys)}: {described}."
    else:
        key, value = pick(rng, tuple(record.items()))
        question = f'Here is a record: {json.dumps(record)}\nWhat is the value of "{key}"?'
        return ask(question, value if isinstance(value, str) else json.dumps(value))
    return ask(question, json.dumps(record) if roll < 0.7 else _dump(rng, record))


def record_list(rng: random.Random) -> str:
    """Return a few records as JSON lines, an array or one indented object."""
    rows = [_draw(rng)[1] for _ in range(rng.randint(2, 8))]
    roll = rng.random()
    if roll < 0.5:
        return "\n".join(json.dumps(row) for row in rows)
    return json.dumps(rows) if roll < 0.75 else json.dumps(rows[0], indent=2)
