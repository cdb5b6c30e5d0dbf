"""From tokenizer.json's decoder to a table id -> bytes, which is all that the engine needs to turn
tokens into text.

A token's bytes do not depend on its neighbours, so that text can be streamed and never taken back;
what a decoder does only at the very start of a text (dropping a leading space) does not apply to
the continuation of a prompt. Where bytes of a fallback are no UTF-8 the library puts U+FFFD for
each byte of their run, and a stream for what is broken alone. Semantics: tokenizers 0.23.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    # A vocabulary has up to 256 thousand tokens, which pass before the weights are read.
    decode = _byte_level if steps == [_byte_level] else lambda token: _decode(token, steps)
    for token, token_id in tokens.items():
        token_bytes[token_id] = decode(token)
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


def _steps(decoder: object, path: Path) -> Iterator[Step]:
    """The chain of one decoder, each step of one token alone.

    `Fuse` joins tokens: what comes after it would see the whole text. There only what gives the
    same on its pieces is taken; a Strip of the text's start has nothing to do in a continuation.
    Bytes are not text yet: after ByteLevel and ByteFallback no step may look at it.
    """
    if decoder is None:  # the library joins tokens with spaces
        yield lambda text: " " + text
    is_fused = False
    bytes_of = ""
    for element in _elements(decoder, path):
        kind = element.get("type")
        after = "Fuse" if is_fused else bytes_of
        if kind == "Fuse":
            is_fused = True
        elif kind == "Strip" and is_fused:
            _check_strip_of_text(element, path)
        elif kind == "Replace" and is_fused and not bytes_of:
            yield _replace(_character(element, path), _field(element, "content", path))
        elif kind not in _STEPS:
            raise _not_supported(path, f"decoder {kind}")
        elif after:
            raise _not_supported(path, f"decoder {kind} after {after}")
        else:
            bytes_of = str(kind) if kind in ("ByteLevel", "ByteFallback") else ""
            yield _STEPS[kind](element, path)


def _elements(decoder: object, path: Path) -> list[JsonObject]:
    if decoder is None:
        return []
    if not isinstance(decoder, dict):
        raise CorruptFile(f"{path}: decoder must be an object, got {describe(decoder)}")
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [e for inner in decoder.get("decoders") or () for e in _elements(inner, path)]


def _not_supported(path: Path, what: str) -> NotSupported:
    return NotSupported(
        f"{path}: {what} is not supported (ByteLevel, Metaspace, WordPiece, and sequences of "
        f"Replace, ByteFallback, Fuse and Strip are); pass token ids and "
        f"SamplingParams(detokenize=False) to a copy of the model without tokenizer.json"
    )


def _field(element: JsonObject, name: str, path: Path) -> str:
    value = element.get(name)
    if not isinstance(value, str):
        raise CorruptFile(f"{path}: decoder's {name} must be a string, got {describe(value)}")
    return value


def _pattern(element: JsonObject, path: Path) -> str:
    pattern = element.get("pattern")
    text = pattern.get("String") if isinstance(pattern, dict) else None
    if not isinstance(text, str) or not text:
        raise _not_supported(path, f"decoder Replace with pattern {describe(pattern)}")
    return text


def _character(element: JsonObject, path: Path) -> str:
    """A pattern that no two tokens can make together."""
    text = _pattern(element, path)
    if len(text) > 1:
        raise _not_supported(path, f"decoder Replace of {text!r} across tokens")
    return text


def _replace(old: str, new: str) -> Step:
    return lambda text: text.replace(old, new)


def _check_strip_of_text(element: JsonObject, path: Path) -> None:
    if element.get("stop"):
        raise _not_supported(path, "decoder Strip of the text's end")


def _strip(element: JsonObject, path: Path) -> Step:
    content = _field(element, "content", path)
    start, stop = element.get("start"), element.get("stop")
    if not isinstance(start, int) or not isinstance(stop, int):
        raise CorruptFile(f"{path}: decoder Strip needs integers start and stop")

    def strip(text: str) -> str:
        begin, end = 0, len(text)
        while begin < min(start, end) and text[begin] == content:
            begin += 1
        while end > max(begin, len(text) - stop) and text[end - 1] == content:
            end -= 1
        return text[begin:end]

    return strip


# What WordPiece's cleanup replaces in a token with its space, in this order.
_CLEANUP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


def _word_piece(element: JsonObject, path: Path) -> Step:
    """A token goes on with the word before it, or begins one and has a space before it."""
    prefix = _field(element, "prefix", path)
    cleanup = _CLEANUP if element.get("cleanup") else ()

    def decode(text: str) -> str:
        text = text.removeprefix(prefix) if text.startswith(prefix) else " " + text
        for old, new in cleanup:
            text = text.replace(old, new)
        return text

    return decode


def _byte_level_table() -> dict[str, int]:
    """GPT-2's map of bytes to printable characters: Radford et al. 2019, encoder.py,
    bytes_to_unicode."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + idx): byte for idx, byte in enumerate(others)})
    return table


_BYTE_OF_CHARACTER = _byte_level_table()
_CHARACTER_OF_BYTE = {byte: character for character, byte in _BYTE_OF_CHARACTER.items()}
# For str.translate: to the character of the byte's number, and what is outside the map to one that
# no byte has.
_LATIN_1 = {code: "\u0100" for code in range(0x100)}
_LATIN_1 |= {ord(character): chr(byte) for character, byte in _BYTE_OF_CHARACTER.items()}


def byte_level_text(token: bytes) -> str:
    """How a byte-level vocabulary writes the bytes of a token.

    >>> byte_level_text(b" a")
    '\u0120a'
    """
    return "".join(_CHARACTER_OF_BYTE[byte] for byte in token)


def _byte_level(text: str) -> bytes:
    """Tokens with a character outside the map are literal: added tokens."""
    try:
        return text.translate(_LATIN_1).encode("latin-1")
    except UnicodeEncodeError:
        return text.encode("utf-8", errors="replace")


_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


def _byte_fallback(text: str) -> str | bytes:
    """`<0x0A>` is the byte 10; anything else is itself."""
    return bytes.fromhex(text[3:5]) if _BYTE_TOKEN.fullmatch(text) else text


_STEPS: dict[object, Callable[[JsonObject, Path], Step]] = {
    "ByteLevel": lambda element, path: _byte_level,
    "ByteFallback": lambda element, path: _byte_fallback,
    "Metaspace": lambda element, path: _replace(_field(element, "replacement", path), " "),
    "Replace": lambda element, path: _replace(
        _pattern(element, path), _field(element, "content", path)
    ),
    "Strip": _strip,
    "WordPiece": _word_piece,
}
