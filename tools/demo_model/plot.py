"""The shape of a plot: beats told in order, each with several ways to tell it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plot:
    """One story line, written in the text grammar of `grammar.py`.

    beats: told in order, one alternative each. summary: the story in one sentence.
    questions: pairs of a question about the story and its answer.
    """

    name: str
    beats: tuple[tuple[str, ...], ...]
    summary: str
    questions: tuple[tuple[str, str], ...]
