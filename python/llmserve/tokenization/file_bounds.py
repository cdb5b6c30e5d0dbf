"""What a tokenizer's file may ask of the library, checked before or right after it is loaded.

The library takes what it reads for its own files: it indexes a character map unread, allocates what
the map's first word says, and runs any number of steps that each double a text.
"""

import base64
import binascii
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmserve.checkpoint.model_files import parse_json_object
from llmserve.errors import CorruptFile

if TYPE_CHECKING:
    import tokenizers

# Published: 262,144 tokens and twice as many merges, of two tokens each.
MAX_VALUES = 2**22
MAX_TOKENS = 2**21
# SentencePiece's own NFKC map has 240 KB, and makes at most 33 bytes of a character.
_MAX_CHARSMAP_BYTES = 2**22
_MAX_REPLACEMENT_BYTES = 2**10
# How many times longer a normalizer may make a text, in characters; published: 2.
_MAX_GROWTH = 2**10
# As JSON; published: 5 KB.
_MAX_POST_PROCESSOR = 2**16

_CHARSMAP = re.compile(rb'"precompiled_charsmap"\s*:\s*"([A-Za-z0-9+/=]*)"')
_PREFIX = re.compile(rb'"continuing_subword_prefix"\s*:\s*"[^"]')
_ESCAPED_LETTER = re.compile(rb"\\u00[4-7]")


def check_json(data: bytes, path: Path) -> None:
    """A tokenizer.json, before the library has it. Raises CorruptFile."""
    if data.count(b",") > MAX_VALUES:
        raise CorruptFile(f"{path}: more than {MAX_VALUES} values; a tokenizer has fewer")
    maps = [found[1].decode("ascii") for found in _CHARSMAP.finditer(data)]
    # Spelled in another way: parsing takes long, but what the library sees is seen.
    is_hidden = _ESCAPED_LETTER.search(data) is not None
    has_other_maps = len(maps) != data.count(b"charsmap")
    has_prefix = b'"merges"' in data and _PREFIX.search(data) is not None
    if is_hidden or has_other_maps or has_prefix:
        document = parse_json_object(data, path, MAX_VALUES)
        maps = list(_charsmaps(document))
        _check_merges(document.get("model"), path)
    for encoded in maps:
        try:
            decoded = base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError) as error:
            raise CorruptFile(f"{path}: precompiled_charsmap: not base64: {error}") from error
        check_charsmap(decoded, f"{path}: precompiled_charsmap")


def _check_merges(model: Any, path: Path) -> None:
    """The library cuts the prefix off the second token of a pair by its bytes, and ends the process
    where that cuts a character."""
    prefix = model.get("continuing_subword_prefix") if isinstance(model, dict) else None
    merges = model.get("merges") if isinstance(model, dict) else None
    if not isinstance(prefix, str) or not prefix or not isinstance(merges, list):
        return
    for merge in merges:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        second = pair[-1] if isinstance(pair, list) and pair else None
        rest = _utf8(second)[len(_utf8(prefix)) :] if isinstance(second, str) else b""
        if rest and rest[0] & 0xC0 == 0x80:
            raise CorruptFile(
                f"{path}: continuing_subword_prefix {prefix[:64]!r} cuts a character of the merge "
                f"{str(merge)[:64]!r}"
            )


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "replace")  # JSON may have half a character, which nobody reads


def _charsmaps(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        found = value.get("precompiled_charsmap")
        if isinstance(found, str):
            yield found
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _charsmaps(item)


def check_charsmap(data: bytes, label: str) -> None:
    """SentencePiece's character map: the bytes of a trie, the trie, the texts that it names.

    The trie is a double array (Aoe 1989), as darts-clone writes it: a unit's offset, xor its place
    and a byte of the text, is the place of the next. Raises CorruptFile, which begins with `label`,
    unless every walk stays in the array and ends at a text.
    """
    if len(data) > _MAX_CHARSMAP_BYTES:
        raise CorruptFile(f"{label}: {len(data)} bytes, at most {_MAX_CHARSMAP_BYTES} are read")
    num_bytes = int.from_bytes(data[:4], "little")
    if len(data) < 8 or num_bytes % 4 != 0 or not 4 <= num_bytes <= len(data) - 4:
        raise CorruptFile(
            f"{label}: claims a trie of {num_bytes} bytes, and there are {len(data)} in all"
        )
    texts = data[4 + num_bytes :]
    try:
        texts.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorruptFile(f"{label}: its texts are not UTF-8 at byte {error.start}") from error
    longest = max(map(len, texts.split(b"\0")))
    if longest > _MAX_REPLACEMENT_BYTES:
        raise CorruptFile(
            f"{label}: makes {longest} bytes of a character, at most {_MAX_REPLACEMENT_BYTES} are "
            f"supported"
        )
    import numpy as np  # here, so that importing llmserve stays quick

    units = np.frombuffer(data, "<u4", num_bytes // 4, 4).astype(np.int64)
    is_value = units >> 31 != 0
    is_value[0] = False  # the root is walked whatever it says
    following = np.arange(len(units)) ^ ((units >> 10) << ((units & 0x200) >> 6))
    walked = following[~is_value]
    if (walked | 0xFF).max() >= len(units):
        raise CorruptFile(f"{label}: its trie leads out of its {len(units)} units")
    values = units[following[~is_value & (units >> 8 & 1 != 0)]] & 0x7FFFFFFF
    starts = np.frombuffer(texts, np.uint8)
    if len(values) and (values.max() >= len(starts) or ((starts[values] & 0xC0) == 0x80).any()):
        raise CorruptFile(f"{label}: its trie names a text that is not there")


def check_loaded(tokenizer: "tokenizers.Tokenizer", path: Path) -> None:
    """How much the loaded tokenizer can make of a text. Raises CorruptFile."""
    if tokenizer.normalizer is not None:
        growth = _growth(json.loads(tokenizer.normalizer.__getstate__()))
        if growth > _MAX_GROWTH:
            raise CorruptFile(
                f"{path}: normalizer: can make a text more than {_MAX_GROWTH} times as long"
            )
    post_processor = tokenizer.post_processor
    if post_processor is not None and len(post_processor.__getstate__()) > _MAX_POST_PROCESSOR:
        raise CorruptFile(f"{path}: post_processor: more than {_MAX_POST_PROCESSOR} bytes long")

    if post_processor is not None:
        _check_template(json.loads(post_processor.__getstate__()), tokenizer, path)
    _check_unknown(tokenizer, path)


def _check_template(element: Any, tokenizer: "tokenizers.Tokenizer", path: Path) -> None:
    """What is put around a text has the text in it, and tokens of the vocabulary."""
    for inner in element.get("processors") or ():
        _check_template(inner, tokenizer, path)
    if element.get("type") != "TemplateProcessing":
        return
    if not any("Sequence" in piece for piece in element["single"]):
        raise CorruptFile(f"{path}: post_processor: its template leaves the text out")
    for token in element["special_tokens"].values():
        for token_id in token["ids"]:
            if tokenizer.id_to_token(token_id) is None:
                raise CorruptFile(f"{path}: post_processor: {token_id} is no token's id")


def _check_unknown(tokenizer: "tokenizers.Tokenizer", path: Path) -> None:
    from tokenizers import models  # here, so that importing llmserve stays quick

    model = tokenizer.model
    if isinstance(model, models.WordPiece | models.WordLevel):
        unknown = model.unk_token
        if model.token_to_id(unknown) is None:
            raise CorruptFile(
                f"{path}: the token {unknown!r:.80}, which stands for words that are not in the "
                f"vocabulary, is not in it either"
            )


def _growth(element: Any) -> float:
    growth = 1.0
    for inner in element.get("normalizers") or ():
        growth *= _growth(inner)
    if element.get("type") == "Replace":
        # A regular expression may match nothing, between any two characters.
        old = element["pattern"].get("String")
        new = len(element["content"])
        growth = max(1.0, new / len(old)) if old else max(1.0, float(new))
    return growth
