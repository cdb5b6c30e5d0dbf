"""Write the training corpus of the demo model: the same text for the same seed.

python -m tools.demo_model.corpus --documents 1000 --seed 1 --out corpus.txt
"""

import argparse
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from . import arithmetic, chats, code, records, tool_use
from .conversation import END_OF_TEXT, Conversation, Message, render
from .grammar import pick
from .stories import tell, tell_scene

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "You are a small language model.",
    "You are a kind storyteller.",
    "Answer briefly.",
    "You are helpful and honest.",
)
SYSTEM_CHANCE = 0.35

_EXCHANGES: tuple[tuple[float, Callable[[random.Random], chats.Exchange]], ...] = (
    *chats.EXCHANGES,
    (1.6, arithmetic.sum_question),
    (0.8, arithmetic.word_problem),
    (1.2, records.record_question),
    (1.0, code.code_question),
)
_WEIGHTS = [weight for weight, _ in _EXCHANGES]


def chat(rng: random.Random) -> str:
    """Return a chat of one to five exchanges, as the chat template renders it."""
    turns: chats.Exchange = ()
    for _ in range(rng.choice((1, 1, 2, 3, 5))):
        turns += rng.choices(_EXCHANGES, _WEIGHTS)[0][1](rng)
    if rng.random() < SYSTEM_CHANCE:
        turns = (Message("system", pick(rng, SYSTEM_PROMPTS)), *turns)
    return render(Conversation(turns))


def tool_chat(rng: random.Random) -> str:
    """Return a chat that offers tools."""
    tools, turns = tool_use.tool_chat(rng)
    if rng.random() < SYSTEM_CHANCE:
        turns = (Message("system", pick(rng, SYSTEM_PROMPTS)), *turns)
    return render(Conversation(turns, tools))


def long_recall(rng: random.Random) -> str:
    """Return a long chat whose last question reaches back to its first message."""
    turns = chats.recall(rng, most=15)
    first, last = turns[:-2], turns[-2:]
    middle: chats.Exchange = ()
    for _ in range(rng.randint(1, 7)):
        middle += chats.story(rng)
    return render(Conversation(first + middle + last))


# The share of documents, not of tokens: drills and chats are longer than scenes.
DOCUMENTS: tuple[tuple[float, Callable[[random.Random], str]], ...] = (
    (0.40, lambda rng: tell(rng).text),
    (0.05, tell_scene),
    (0.36, chat),
    (0.04, arithmetic.drill),
    (0.04, records.record_list),
    (0.025, code.code_file),
    (0.07, tool_chat),
    (0.015, long_recall),
)
_DOCUMENT_WEIGHTS = [weight for weight, _ in DOCUMENTS]


def documents(seed: int) -> Iterator[str]:
    """Yield documents without end, the same ones for the same seed.

    >>> next(documents(7)) == next(documents(7))
    True
    """
    rng = random.Random(seed)
    while True:
        yield rng.choices(DOCUMENTS, _DOCUMENT_WEIGHTS)[0][1](rng)


def main() -> None:
    """Write a sample of the corpus to a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=1000, help="how many to write")
    parser.add_argument("--seed", type=int, default=1, help="seed of the generator")
    parser.add_argument("--out", type=Path, required=True, help="text file to write")
    args = parser.parse_args()
    stream = documents(args.seed)
    with args.out.open("w", encoding="utf-8") as file:
        for _ in range(args.documents):
            file.write(next(stream) + END_OF_TEXT + "\n")


if __name__ == "__main__":
    main()
