"""What the commands need of a terminal."""

import os
import unicodedata
from typing import TextIO


def dim(stream: TextIO, text: str, end: str = "\n") -> None:
    """Writes text that stands back, where the stream is a terminal with colours."""
    stream.write(f"\033[2m{text}\033[0m{end}" if has_colours(stream) else text + end)
    stream.flush()


def has_colours(stream: TextIO) -> bool:
    """Whether the stream is a terminal with colours."""
    is_wanted = "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    return is_wanted and stream.isatty()


def printable(text: str) -> str:
    """The text without control characters other than tab and line end: what a model writes must not
    drive the terminal."""
    if text.isprintable():
        return text
    return "".join(
        character
        for character in text
        if character in "\t\n" or unicodedata.category(character) != "Cc"
    )
