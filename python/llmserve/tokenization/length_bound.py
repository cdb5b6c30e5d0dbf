"""How few tokens a text can have, told by its length alone: what cannot fit a model is refused
before it is tokenized, at a microsecond a character.

A token stands for no more characters than its name has, as long as nothing on the way from a text
to tokens leaves characters out or makes one token of any number of them (an unknown word, spaces
beside an added token). Which elements do neither is written down here; with any other there is no
bound. Semantics: tokenizers 0.23.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from llmserve.tokenization.long_texts import elements
from llmserve.tokenization.tokenizer import Tokenizer
from llmserve.tokenization.vocabulary import byte_level_text

if TYPE_CHECKING:
    import tokenizers

_Element = dict[str, Any]  # of a tokenizer.json

# No character's canonical decomposition has more, so that NFC and NFKC make one of no more.
_MAX_COMPOSED = 4


class LengthBound:
    """Of one tokenizer, which is looked at when it is first needed: that takes as long as 100,000
    characters do.

    >>> from llmserve import Tokenizer, demo_model_path
    >>> LengthBound(Tokenizer.from_directory(demo_model_path())).min_num_tokens("a" * 1000)
    77
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def min_num_tokens(self, text: str) -> int:
        """No tokenization of the text has fewer; 0 where its length tells nothing."""
        return 0 if self._ratio is None else self._ratio.min_num_tokens(text)

    @cached_property
    def _ratio(self) -> "LengthRatio | None":
        return read_length_ratio(self._tokenizer._tokenizer)


@dataclass(frozen=True, slots=True)
class LengthRatio:
    """How much of a text is one token at most."""

    max_characters: int  # of a normalized text, that a token stands for
    max_composed: int  # characters beyond ASCII that the normalizer makes one of

    def min_num_tokens(self, text: str) -> int:
        """No tokenization of the text has fewer."""
        num_composed = 1 if text.isascii() else self.max_composed
        return -(-len(text) // (self.max_characters * num_composed))


def read_length_ratio(tokenizer: "tokenizers.Tokenizer") -> LengthRatio | None:
    """None where the length alone bounds nothing."""
    import tokenizers

    model = tokenizer.model
    normalizers = list(elements(tokenizer.normalizer, "normalizers"))
    pre_tokenizers = list(elements(tokenizer.pre_tokenizer, "pretokenizers"))
    added = tokenizer.get_added_tokens_decoder().values()
    if (
        not isinstance(model, tokenizers.models.BPE)
        or model.continuing_subword_prefix
        or model.end_of_word_suffix
        or not all(_keeps(_NORMALIZERS, element) for element in normalizers)
        or not all(_keeps(_PRE_TOKENIZERS, element) for element in pre_tokenizers)
        or any(element["type"] in _COMPOSING for element in normalizers[1:])
        or any(token.lstrip or token.rstrip for token in added)
    ):
        return None
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    is_byte_level = any(e["type"] == "ByteLevel" for e in (*normalizers, *pre_tokenizers))
    if not _knows_all(vocabulary, is_byte_level, model.byte_fallback):
        return None
    names = [*vocabulary]
    if tokenizer.normalizer is not None:  # some added tokens are looked for in what it makes
        names += [tokenizer.normalizer.normalize_str(token.content) for token in added]
    composes = any(element["type"] in _COMPOSING for element in normalizers)
    return LengthRatio(max(map(len, names)), _MAX_COMPOSED if composes else 1)


def _knows_all(vocabulary: Mapping[str, int], is_byte_level: bool, has_fallback: bool) -> bool:
    """Whether no character is unknown: such would be left out, or become one token together."""
    if is_byte_level:
        return vocabulary.keys() >= set(byte_level_text(bytes(range(256))))
    return has_fallback and vocabulary.keys() >= {f"<0x{byte:02X}>" for byte in range(256)}


def _replaces_by_as_many(element: _Element) -> bool:
    pattern = element["pattern"].get("String", "")
    return 0 < len(pattern) <= len(element["content"])


def _always(_: _Element) -> bool:
    return True


# They leave ASCII as it is, unless others have been at it before.
_COMPOSING = ("NFC", "NFKC")
# Whether an element leaves a text at least as long as it is, but for what NFC and NFKC compose.
_NORMALIZERS: Mapping[str, Callable[[_Element], bool]] = {
    **dict.fromkeys((*_COMPOSING, "NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel"), _always),
    "Replace": _replaces_by_as_many,
}
_PRE_TOKENIZERS: Mapping[str, Callable[[_Element], bool]] = {
    **dict.fromkeys(("ByteLevel", "Metaspace", "Digits"), _always),
    "Split": lambda element: element["behavior"] != "Removed",
}


def _keeps(kinds: Mapping[str, Callable[[_Element], bool]], element: _Element) -> bool:
    check = kinds.get(element["type"])
    return check is not None and check(element)
