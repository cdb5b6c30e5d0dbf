"""Sums: as drills in plain text, as questions and as word problems."""

import random

from . import words
from .chats import Exchange, ask, casual
from .grammar import expand, pick

_NAMES = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}


def draw_sum(rng: random.Random) -> tuple[int, str, int, int]:
    """Return `left, operator, right, result`; every number is a whole one from 0 to 144."""
    operator = rng.choice("+++--**/")
    limit = rng.choice((10, 20, 20))
    left, right = rng.randrange(limit), rng.randrange(limit)
    if operator == "+":
        return left, operator, right, left + right
    if operator == "-":
        left, right = max(left, right), min(left, right)
        return left, operator, right, left - right
    left, right = rng.randint(0, 12), rng.randint(1, 12)
    if operator == "*":
        return left, operator, right, left * right
    return left * right, operator, right, left


def drill(rng: random.Random) -> str:
    """Return lines of sums, one a line."""
    rows = (draw_sum(rng) for _ in range(rng.randint(5, 40)))
    return "\n".join(f"{a} {operator} {b} = {c}" for a, operator, b, c in rows)


def sum_question(rng: random.Random) -> Exchange:
    """A sum in figures or words."""
    left, operator, right, result = draw_sum(rng)
    name = _NAMES[operator]
    question = pick(
        rng,
        (
            f"What is {left} {operator} {right}?",
            f"What is {left} {name} {right}?",
            f"How much is {left} {operator} {right}?",
            f"Calculate {left} {operator} {right}.",
            f"{left} {operator} {right}",
            f"{left} {operator} {right} =",
            f"{left}{operator}{right}",
            f"What is {left}{operator}{right}?",
        ),
    )
    return ask(casual(rng, question), f"{left} {operator} {right} = {result}")


def word_problem(rng: random.Random) -> Exchange:
    """A small story with a number as its answer."""
    is_girl = rng.random() < 0.5
    name = pick(rng, words.GIRLS if is_girl else words.BOYS)
    left, right = rng.randint(2, 20), rng.randint(2, 20)
    slots = {"name": name, "he": "she" if is_girl else "he", "thing": pick(rng, words.FRUITS)}
    kind = rng.randrange(3)
    if kind == 0:
        middle = f"has {left} {{thing}} and [gets|finds|buys|picks] {right} more."
        result, end = left + right, "have now"
    elif kind == 1:
        left, right = max(left, right) + 1, min(left, right)
        middle = f"has {left} {{thing}} and [eats|loses|sells|gives away] {right} of them."
        result, end = left - right, "have left"
    else:
        left, right = rng.randint(2, 10), rng.randint(2, 10)
        middle = f"has {left} baskets with {right} {{thing}} in each."
        result, end = left * right, "have in all"
    question = f"{{name}} {middle} How many {{thing}} does {{he}} {end}?"
    sign = "+-*"[kind]
    answer = f"{left} {sign} {right} = {result}. {{name}} has {result} {{thing}}."
    return ask(expand(rng, question, slots), expand(rng, answer, slots))
