"""From tokenizer.json's decoder to a table id -> bytes, which is all that the engine needs to turn
tokens into text.

A token's bytes do not depend on its neighbours, so that text can be streamed and never taken back;
what a decoder does only at the very start of a text (dropping a leading space) does not apply to
the continuation of a prompt. Semantics: decoders of the tokenizers library, 0.23.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from llmserve.arguments import describe
from llmserve.errors import CorruptFile, NotSupported
from llmserve.model_files import JsonObject

# A decoder's element turns a token's text into another, or into bytes, which ends the chain.
Step = Callable[[str], str | bytes]


@dataclass(frozen=True, slots=True)
class VocabularyTable:
    """What every token id stands for."""

    token_bytes: list[bytes]  # by id; empty where there is no token
    special_token_ids: list[int]  # increasing


def build_vocabulary_table(
    tokenizer: JsonObject, tokens: Mapping[str, int], path: Path
) -> VocabularyTable:
    """The table of a parsed tokenizer.json whose vocabulary, added tokens included, is `tokens`.

    Raises NotSupported that names a decoder whose output depends on neighbours, and CorruptFile
    for one that is not as the format says.
    """
    steps = list(_steps(tokenizer.get("decoder"), path))
    special = _special_tokens(tokenizer, path)
    token_bytes = [b""] * (max(tokens.values(), default=-1) + 1)
    for token, token_id in tokens.items():
        token_bytes[token_id] = _decode(token, steps)
    return VocabularyTable(token_bytes, sorted(tokens[t] for t in special if t in tokens))


def _decode(token: str, steps: Iterable[Step]) -> bytes:
    text = token
    for step in steps:
        result = step(text)
        if isinstance(result, bytes):
            return result
        text = result
    return text.encode("utf-8", errors="replace")


def _special_tokens(tokenizer: JsonObject, path: Path) -> list[str]:
    added = tokenizer.get("added_tokens") or []
    if not isinstance(added, list):
        raise CorruptFile(f"{path}: added_tokens must be a list, got {describe(added)}")
    return [token["content"] for token in added if token.get("special")]


def _steps(decoder: object, path: Path) -> Iterable[Step]:
    """The chain of one decoder. `Fuse` joins tokens; what comes after it and looks at the start of
    the text alone has nothing to do in a continuation."""
    elements = _elements(decoder, path)
    is_fused = False
    for element in elements:
        kind = element.get("type")
        if kind == "ByteLevel":
            yield _byte_level
        elif kind == "ByteFallback":
            yield _byte_fallback
        elif kind == "Fuse":
            is_fused = True
        elif kind == "Metaspace":
            yield _replace(_field(element, "replacement", path), " ")
        elif kind == "Replace":
            yield _replace(_pattern(element, is_fused, path), _field(element, "content", path))
        elif kind == "Strip":
            if step := _strip(element, is_fused, path):
                yield step
        else:
            raise _not_supported(path, f"decoder {kind}")


def _elements(decoder: object, path: Path) -> list[JsonObject]:
    if decoder is None:
        raise _not_supported(path, "no decoder")
    if not isinstance(decoder, dict):
        raise CorruptFile(f"{path}: decoder must be an object, got {describe(decoder)}")
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [e for inner in decoder.get("decoders") or () for e in _elements(inner, path)]


def _not_supported(path: Path, what: str) -> NotSupported:
    return NotSupported(
        f"{path}: {what} is not supported (ByteLevel, Metaspace, and sequences of Replace, "
        f"ByteFallback, Fuse and Strip are); pass token ids and SamplingParams(detokenize=False) "
        f"to a copy of the model without tokenizer.json"
    )


def _field(element: JsonObject, name: str, path: Path) -> str:
    value = element.get(name)
    if not isinstance(value, str):
        raise CorruptFile(f"{path}: decoder's {name} must be a string, got {describe(value)}")
    return value


def _pattern(element: JsonObject, is_fused: bool, path: Path) -> str:
    pattern = element.get("pattern")
    text = pattern.get("String") if isinstance(pattern, dict) else None
    if not isinstance(text, str):
        raise _not_supported(path, f"decoder Replace with pattern {describe(pattern)}")
    if is_fused and len(text) > 1:
        raise _not_supported(path, f"decoder Replace of {text!r} across tokens")
    return text


def _replace(old: str, new: str) -> Step:
    return lambda text: text.replace(old, new)


def _strip(element: JsonObject, is_fused: bool, path: Path) -> Step | None:
    content = _field(element, "content", path)
    start, stop = element.get("start"), element.get("stop")
    if not isinstance(start, int) or not isinstance(stop, int):
        raise CorruptFile(f"{path}: decoder Strip needs integers start and stop")
    if is_fused:
        if stop:
            raise _not_supported(path, "decoder Strip of the text's end")
        return None

    def strip(text: str) -> str:
        begin, end = 0, len(text)
        while begin < min(start, end) and text[begin] == content:
            begin += 1
        while end > max(begin, len(text) - stop) and text[end - 1] == content:
            end -= 1
        return text[begin:end]

    return strip


def _byte_level_table() -> dict[str, int]:
    """GPT-2's map of bytes to printable characters: Radford et al. 2019, encoder.py,
    bytes_to_unicode."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + idx): byte for idx, byte in enumerate(others)})
    return table


_BYTE_OF_CHARACTER = _byte_level_table()


def _byte_level(text: str) -> bytes:
    """Tokens with a character outside the map are literal: added tokens."""
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in text])
    except KeyError:
        return text.encode("utf-8", errors="replace")


_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


def _byte_fallback(text: str) -> str | bytes:
    """`<0x0A>` is the byte 10; anything else is itself."""
    return bytes.fromhex(text[3:5]) if _BYTE_TOKEN.fullmatch(text) else text
