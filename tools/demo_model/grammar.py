"""A tiny text grammar: `[a|b]` picks one alternative, `{slot}` fills in a word."""

import random
import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\{(\w+)\}")
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiouAEIOU]|ho(?:nest|ur))(?!(?:one|use|uni|eu)\w*)")
_SPACES = re.compile(r" {2,}")
# A quoted question or exclamation may run on ("No!" said Ann), so those are left alone.
_SENTENCE_START = re.compile(r'(^|\n|[.!?] |\." )([a-z])')


def pick(rng: random.Random, items: Sequence[T]) -> T:
    """Return one item, each with equal chance."""
    return items[int(rng.random() * len(items))]


def fill(rng: random.Random, template: str, slots: Mapping[str, str]) -> str:
    """Expand every choice (innermost first) and slot of `template`, and nothing else.

    Raises KeyError for a slot without a value.
    """
    while "[" in template:
        template = _CHOICE.sub(lambda m: pick(rng, m.group(1).split("|")), template)
    return _SLOT.sub(lambda m: slots[m.group(1)], template)


def expand(rng: random.Random, template: str, slots: Mapping[str, str]) -> str:
    """Fill `template` and polish what comes out into sentences.

    >>> expand(random.Random(0), "[a|a] {thing}.", {"thing": "owl"})
    'An owl.'
    """
    return polish(fill(rng, template, slots))


def mend_articles(text: str) -> str:
    """Write `an` where a vowel follows.

    >>> mend_articles("a owl in a hat")
    'an owl in a hat'
    """
    return _ARTICLE.sub(lambda m: m.group(1) + "n ", text)


def polish(text: str) -> str:
    """Mend articles, spaces and the capitals at sentence starts."""
    text = _SPACES.sub(" ", text).replace(" .", ".").replace(" ,", ",").strip(" ")
    text = mend_articles(text)
    return _SENTENCE_START.sub(lambda m: m.group(1) + m.group(2).upper(), text)


def listing(items: Sequence[str], joiner: str = "and") -> str:
    """Join words as English does: `a`, `a and b`, `a, b, and c`."""
    if len(items) < 3:
        return f" {joiner} ".join(items)
    return ", ".join(items[:-1]) + f", {joiner} " + items[-1]
