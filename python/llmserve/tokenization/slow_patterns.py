"""Patterns of a tokenizer's file that take too long to match.

The library's regular expressions (Oniguruma) backtrack, 10^7 steps a match before they give up:
some 0.3 s for a word of 30 characters, and as long for the next. So a pattern that is not known is
tried on repeated parts of itself, which is where such patterns are slow, before a text comes.
"""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from llmserve.errors import CorruptFile
from llmserve.tokenization.library_calls import is_library_error
from llmserve.tokenization.long_texts import KNOWN_PATTERNS, canonical, elements

if TYPE_CHECKING:
    import tokenizers

# Processor time of one try; published patterns take 0.05 ms.
_MAX_S = 0.02
_LENGTHS = (8, 12, 16, 20, 24, 28, 32, 48, 64)  # a step doubles what an exponential one takes
_MAX_PARTS = 64
# What classes such as \w, \s and \p{L} stand for, and what is in none of these.
_OF_CLASSES = ("a", "A", "1", " ", "\n", ".", "\u00e9", "\u4e2d", "a1", "a ", "a.")
_LITERALS = re.compile(r"[^\W\d_]{1,16}|\d|[^\w\s\\()\[\]{}|*+?^$.]")


def check_patterns(tokenizer: "tokenizers.Tokenizer", path: Path) -> None:
    """Raises CorruptFile that names the pattern."""
    for element in elements(tokenizer.normalizer, "normalizers"):
        if element["type"] == "Replace" and (regex := element["pattern"].get("Regex")):
            from tokenizers import Regex, normalizers

            replace = normalizers.Replace(Regex(regex), element["content"])
            _check(replace.normalize_str, regex, f"{path}: normalizer")
    for element in elements(tokenizer.pre_tokenizer, "pretokenizers"):
        if element["type"] == "Split" and (regex := element["pattern"].get("Regex")):
            from tokenizers import Regex, pre_tokenizers

            split = pre_tokenizers.Split(Regex(regex), "isolated")
            _check(split.pre_tokenize_str, regex, f"{path}: pre_tokenizer")


def _check(match: Callable[[str], object], pattern: str, label: str) -> None:
    if canonical(pattern) in KNOWN_PATTERNS:
        return
    for text in _tries(pattern):
        began = time.thread_time()
        try:
            match(text)
        except BaseException as error:
            if not is_library_error(error):
                raise
            raise CorruptFile(
                f"{label}: the pattern {pattern!r:.80} gives up on {len(text)} characters: {error}"
            ) from error
        took = time.thread_time() - began
        if took > _MAX_S:
            raise CorruptFile(
                f"{label}: the pattern {pattern!r:.80} takes {took * 1e3:.0f} ms for {len(text)} "
                f"characters, more than a text's words may"
            )


def _tries(pattern: str) -> Iterator[str]:
    """Parts of the pattern, and of what its classes stand for, repeated; the shortest first."""
    found = dict.fromkeys((*_LITERALS.findall(pattern), *_OF_CLASSES))
    parts = list(dict.fromkeys((*found, *(part[:1] for part in found))))[:_MAX_PARTS]
    # A match is only tried where all that it must have is in the text.
    rest = "\x01" + "".join(found)
    for length in _LENGTHS:
        for part in parts:
            yield part * length + rest
