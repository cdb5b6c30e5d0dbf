"""A tokenizer for random weights: byte-level BPE of made-up words, as many as the model has ids.

The first 256 tokens are the bytes, the last is the end of a text, and those between are runs of
letters, each joined from two shorter ones. What random weights generate has nothing to do with
language, but servers turn it into text all the same, and some refuse to start without.
"""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Iterator
from pathlib import Path

END = "<|end|>"
# One word that may begin with a space, as byte-level BPE writes it.
_SPACE = "\u0120"


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """tokenizer.json and tokenizer_config.json, as transformers reads them."""
    pairs = list(itertools.islice(_pairs(), vocab_size - 257))
    tokens = [*_byte_tokens(), *(left + right for left, right in pairs), END]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    end = {"id": vocab_size - 1, "content": END, "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**end, **flags}],
        "normalizer": None,
        "pre_tokenizer": {**level, "use_regex": True},
        "post_processor": None,
        "decoder": {**level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: idx for idx, token in enumerate(tokens)},
            "merges": [f"{left} {right}" for left, right in pairs],
        },
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def read_tokenizer(folder: Path) -> tuple[list[str], list[str]]:
    """The tokens by id and the merges in order, of `write_tokenizer`."""
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    return list(model["vocab"]), model["merges"]


def _byte_tokens() -> list[str]:
    """GPT-2's character for each byte: itself where that can be seen, else one past 255."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return [chr(byte) for byte in seen] + [chr(256 + idx) for idx in range(len(hidden))]


def _pairs() -> Iterator[tuple[str, str]]:
    """What is joined to what: two letters (the first may be the space), then those with a third,
    then those with a fourth; no result comes twice."""
    words = [_SPACE, *string.ascii_lowercase]
    while True:
        joined = list(itertools.product(words, string.ascii_lowercase))
        yield from joined
        words = [left + right for left, right in joined]
