"""Tokenizers of other formats as tokenizer.json documents, which the tokenizers library runs.

So there is one tokenizer, and what differs between formats is read in one place each.
"""

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmserve.errors import CorruptFile
from llmserve.tokenization.pre_tokenizers import PreTokenizer

Document = dict[str, Any]
# Pairs, or texts with one space between two tokens.
Merges = Sequence[tuple[str, str]] | Sequence[str]
SPACE = "\u2581"


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is cut out of a text before anything else looks at it."""

    token_id: int
    content: str
    is_special: bool  # left out by decode


@dataclass(frozen=True, slots=True)
class Ends:
    """What encode() puts around a text."""

    before: tuple[tuple[str, int], ...] = ()  # tokens and their ids
    after: tuple[tuple[str, int], ...] = ()


def document(
    model: Document,
    added: Iterable[AddedToken],
    ends: Ends,
    normalizer: Sequence[Document] = (),
    pre_tokenizer: Sequence[Document] = (),
    decoder: Sequence[Document] = (),
) -> Document:
    """The whole of a tokenizer.json."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(token) for token in sorted(added, key=lambda t: t.token_id)],
        "normalizer": _sequence("normalizers", normalizer),
        "pre_tokenizer": _sequence("pretokenizers", pre_tokenizer),
        "post_processor": _template(ends),
        "decoder": _sequence("decoders", decoder),
        "model": model,
    }


def byte_level_bpe(
    vocab: Mapping[str, int],
    merges: Merges,
    pre: PreTokenizer,
    added: Iterable[AddedToken],
    ends: Ends,
) -> Document:
    """BPE over GPT-2's characters for bytes; or, where `pre` says so, over a text whose spaces are
    U+2581, with <0x0A> for what has no token."""
    split = [
        {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        }
        for pattern in pre.patterns
    ]
    if not pre.is_byte_level:
        model = bpe_model(vocab, merges, byte_fallback=True, ignore_merges=pre.ignore_merges)
        return document(
            model, added, ends, [_replace(" ", SPACE)], split, sentencepiece_decoder(False)
        )
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    model = bpe_model(vocab, merges, byte_fallback=False, ignore_merges=pre.ignore_merges)
    return document(model, added, ends, (), [*split, byte_level], [byte_level])


def bpe_model(
    vocab: Mapping[str, int],
    merges: Merges,
    *,
    byte_fallback: bool,
    ignore_merges: bool = False,
    unknown: str | None = None,
) -> Document:
    """The model of byte pairs. Unknown characters that follow one another are one unknown token."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": dict(vocab),
        "merges": merges,
    }


# Looking for the pairs that make a token cuts it at every place. Published vocabularies of 200,000
# tokens take 1e8 of these units, of about a nanosecond; one with a token of 20,000 characters 4e8.
_MAX_CUT_WORK = 4 * 10**9
_CUT_WORK = 64  # of a cut, beside its characters


def merges_of_ranks(
    ranks: Mapping[str, float], usable: Iterable[str], path: Path
) -> list[tuple[str, str]]:
    """The pairs of tokens that make a token, in the order in which that is done: by the rank of the
    whole, lowest first. `usable` are the tokens that pairs are made of and make. Raises CorruptFile
    for tokens of `path` that are too long."""
    known = set(usable)
    if sum(len(token) * (_CUT_WORK + len(token)) for token in known) > _MAX_CUT_WORK:
        raise CorruptFile(
            f"{path}: the tokens are too long to look for the pairs that make them: the longest "
            f"has {max(map(len, known))} characters"
        )
    merges: list[tuple[float, float, float, str, str]] = []
    for whole in known:
        for cut in range(1, len(whole)):
            left, right = whole[:cut], whole[cut:]
            if left in known and right in known:
                merges.append((ranks[whole], ranks[left], ranks[right], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]


def normalizer_of_spaces(add_prefix: bool, squeeze: bool, charsmap: bytes) -> list[Document]:
    """SentencePiece's normalisation: its character map, runs of spaces, a space before the text,
    and U+2581 for spaces."""
    steps: list[Document] = []
    if charsmap:
        encoded = base64.b64encode(charsmap).decode("ascii")
        steps.append({"type": "Precompiled", "precompiled_charsmap": encoded})
    if squeeze:
        steps.append(_replace_pattern(r"\A +| +\z", ""))
        steps.append(_replace_pattern(" {2,}", " "))
    if add_prefix:
        steps.append({"type": "Prepend", "prepend": SPACE})
    return [*steps, _replace(" ", SPACE)]


def sentencepiece_decoder(strip_prefix: bool) -> list[Document]:
    """U+2581 to spaces, <0x0A> to bytes, and the space before the text away."""
    steps: list[Document] = [
        _replace(SPACE, " "),
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if strip_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return steps


def word_piece(
    vocab: Mapping[str, int],
    unknown: str,
    added: Iterable[AddedToken],
    ends: Ends,
    *,
    lowercase: bool,
    strip_accents: bool,
) -> Document:
    """BERT's: words cut at spaces and punctuation, then the longest pieces from the left."""
    model = {
        "type": "WordPiece",
        "unk_token": unknown,
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": dict(vocab),
    }
    normalizer = {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": strip_accents,
        "lowercase": lowercase,
    }
    decoder = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    return document(model, added, ends, [normalizer], [{"type": "BertPreTokenizer"}], [decoder])


def _added(token: AddedToken) -> Document:
    return {
        "id": token.token_id,
        "content": token.content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": token.is_special,
    }


def _sequence(name: str, steps: Sequence[Document]) -> Document | None:
    if not steps:
        return None
    return steps[0] if len(steps) == 1 else {"type": "Sequence", name: list(steps)}


def _template(ends: Ends) -> Document | None:
    if not ends.before and not ends.after:
        return None
    tokens = {content: token_id for content, token_id in (*ends.before, *ends.after)}
    first: Document = {"Sequence": {"id": "A", "type_id": 0}}
    before = [{"SpecialToken": {"id": content, "type_id": 0}} for content, _ in ends.before]
    after = [{"SpecialToken": {"id": content, "type_id": 0}} for content, _ in ends.after]
    return {
        "type": "TemplateProcessing",
        "single": [*before, first, *after],
        "pair": [*before, first, {"Sequence": {"id": "B", "type_id": 0}}, *after],
        "special_tokens": {
            content: {"id": content, "ids": [token_id], "tokens": [content]}
            for content, token_id in tokens.items()
        },
    }


def _replace(old: str, new: str) -> Document:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def _replace_pattern(pattern: str, new: str) -> Document:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": new}
