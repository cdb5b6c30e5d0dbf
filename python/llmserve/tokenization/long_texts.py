"""Long texts, cut where that changes no token: the tokenizers library takes 100 to 300 bytes for
each byte of a text that it is given at once.

Words of a text are encoded one by one. A cut that is the end of a word whatever stands around it
gives the same words, and so the same tokens. Which cuts are is known of the patterns in
pre_tokenizers.py; a tokenizer with any other element encodes a text as a whole.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from llmserve.tokenization.pre_tokenizers import GPT2, PRE_TOKENIZERS

if TYPE_CHECKING:
    import tokenizers

# Texts of more characters are cut into pieces of about as many.
PIECE_CHARACTERS = 2**15

_BEFORE = "(?<=[A-Za-z0-9.,;:!?)]"
# Between a word and a space with another behind it; behind a lone line break; at a number's ends.
CUTS = rf"{_BEFORE})(?= [A-Za-z])|{_BEFORE}\n)(?=[A-Za-z])"
CUTS_AT_NUMBERS = r"(?<=[A-Za-z])(?=[0-9])|(?<=[0-9])(?=[A-Za-z])"
CUTS_IN_NUMBERS = r"(?<=[0-9])(?=[0-9])"  # where every digit is a word

_COMPOSING = ("NFC", "NFKC", "NFD", "NFKD")  # none composes across ASCII
_CODE_POINT = re.compile(r"\\x\{([0-9A-Fa-f]+)\}")

Element = dict[str, Any]  # of a tokenizer.json


class TextCutter:
    """Of one tokenizer."""

    def __init__(self, tokenizer: "tokenizers.Tokenizer") -> None:
        self._pattern = _cuts(tokenizer)

    def pieces(self, text: str) -> list[str]:
        """The text in pieces, whose tokens without special ones are the text's, one after another.
        A piece may be as long as the text."""
        if self._pattern is None or len(text) <= PIECE_CHARACTERS:
            return [text]
        return list(_pieces(text, self._pattern))


def _pieces(text: str, pattern: re.Pattern[str]) -> Iterator[str]:
    begin = 0
    while len(text) - begin > PIECE_CHARACTERS:
        found = pattern.search(text, begin + PIECE_CHARACTERS)
        if found is None:
            break
        yield text[begin : found.start()]
        begin = found.start()
    yield text[begin:]


def _cuts(tokenizer: "tokenizers.Tokenizer") -> re.Pattern[str] | None:
    """What matches where a text may be cut; None: nowhere."""
    import tokenizers

    model = tokenizer.model
    if not isinstance(model, tokenizers.models.BPE) or model.dropout:
        return None
    if any(e["type"] not in _COMPOSING for e in elements(tokenizer.normalizer, "normalizers")):
        return None
    patterns = word_patterns(list(elements(tokenizer.pre_tokenizer, "pretokenizers")))
    kinds = _KINDS.get(patterns or ())
    added = tokenizer.get_added_tokens_decoder().values()
    # A token that is found in the text itself must not stand on both sides of a cut, nor take what
    # stands on the other side.
    if not kinds or any(token.lstrip or token.rstrip for token in added):
        return None
    if any(re.search(r"[ \n]", token.content) for token in added):
        return None
    if any(token.single_word for token in added):
        kinds = kinds[:1]
    numbers = "|".join(kinds[1:])
    if numbers and any(re.search(numbers, token.content) for token in added):
        kinds = kinds[:1]
    return re.compile("|".join(kinds))


def elements(element: object, members: str) -> Iterator[Element]:
    """Those of a normalizer or pre-tokenizer, as in tokenizer.json."""
    if element is not None:
        yield from _flat(json.loads(element.__getstate__()), members)  # type: ignore[attr-defined]


def _flat(element: Element, members: str) -> Iterator[Element]:
    if element["type"] != "Sequence":
        yield element
        return
    for member in element[members]:
        yield from _flat(member, members)


def word_patterns(pre_tokenizers: Sequence[Element]) -> tuple[str, ...] | None:
    """The patterns by which a text becomes words, in the order of their use; None where something
    else has a part in it."""
    patterns: list[str] = []
    for element in pre_tokenizers:
        if element["type"] == "Split":
            regex = element["pattern"].get("Regex")
            if regex is None or element["behavior"] != "Isolated" or element["invert"]:
                return None
            patterns.append(canonical(regex))
        elif element["type"] == "Digits" and element["individual_digits"]:
            patterns.append(r"\p{N}")
        elif element["type"] == "ByteLevel" and not element["add_prefix_space"]:
            patterns += [GPT2] if element["use_regex"] else []
        else:
            return None
    return tuple(patterns)


def canonical(pattern: str) -> str:
    """With characters in the place of their numbers."""
    return _CODE_POINT.sub(lambda found: chr(int(found[1], 16)), pattern)


def _kinds(patterns: Sequence[str]) -> tuple[str, ...]:
    has_single_digits = any(p == r"\p{N}" or r"|\p{N}|" in p for p in patterns)
    return (CUTS, CUTS_AT_NUMBERS, *((CUTS_IN_NUMBERS,) if has_single_digits else ()))


# By the patterns of a tokenizer.
_KINDS = {
    tuple(map(canonical, row.patterns)): _kinds(row.patterns)
    for row in PRE_TOKENIZERS.values()
    if row.ends_words_everywhere
}
KNOWN_PATTERNS = frozenset(
    canonical(pattern) for row in PRE_TOKENIZERS.values() for pattern in row.patterns
)
