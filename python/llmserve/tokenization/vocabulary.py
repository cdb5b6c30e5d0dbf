"""From a tokenizer's decoder to a table id -> bytes, which is all that the engine needs to turn
tokens into text.

A token's bytes do not depend on its neighbours, so that text can be streamed and never taken back;
what a decoder does only at the very start of a text (dropping a leading space) does not apply to
the continuation of a prompt. Where bytes of a fallback are no UTF-8 the library puts U+FFFD for
each byte of their run, and a stream for what is broken alone. Semantics: tokenizers 0.23.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from llmserve._core import (
    ByteFallbackStep,
    ByteLevelStep,
    ReplaceStep,
    StripStep,
    Vocabulary,
    WordStep,
)
from llmserve.checkpoint.model_files import JsonObject
from llmserve.common.arguments import describe
from llmserve.errors import CorruptFile, NotSupported

if TYPE_CHECKING:
    import tokenizers

# What an element of a decoder does to one token alone. Bytes end the chain.
Step = ReplaceStep | StripStep | WordStep | ByteFallbackStep | ByteLevelStep


def read_vocabulary(tokenizer: "tokenizers.Tokenizer", path: Path) -> Vocabulary:
    """What every id of the library's tokenizer, made of `path`, stands for.

    Raises NotSupported that names a decoder whose output depends on neighbours, and CorruptFile
    for one that is not as the format says.
    """
    # What the library would pickle is the decoder's part of a tokenizer.json; parsing all of that
    # again would take a third as long as the library does.
    decoder = tokenizer.decoder
    parsed = None if decoder is None else json.loads(decoder.__getstate__())
    steps = decoder_steps(parsed, path)
    added = tokenizer.get_added_tokens_decoder()
    special = sorted(token_id for token_id, token in added.items() if token.special)
    try:
        return Vocabulary.decode(tokenizer.get_vocab(with_added_tokens=True), steps, special)
    except CorruptFile as error:
        raise CorruptFile(f"{path}: {error}") from error


def decoder_steps(decoder: object, path: Path) -> list[Step]:
    """The chain of a tokenizer.json's decoder, each step of one token alone."""
    return list(_steps(decoder, path))


def _steps(decoder: object, path: Path) -> Iterator[Step]:
    """`Fuse` joins tokens: what comes after it would see the whole text. There only what gives the
    same on its pieces is taken; a Strip of the text's start has nothing to do in a continuation.
    Bytes are not text yet: after ByteLevel and ByteFallback no step may look at it.
    """
    if decoder is None:  # the library joins tokens with spaces
        yield WordStep(None)
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
            yield ReplaceStep(_character(element, path), _field(element, "content", path))
        elif kind not in _STEPS:
            raise _not_supported(path, f"decoder {kind}")
        elif after:
            raise _not_supported(path, f"decoder {kind} after {after}")
        else:
            bytes_of = str(kind) if kind in ("ByteLevel", "ByteFallback") else ""
            yield from _STEPS[kind](element, path)


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


def _check_strip_of_text(element: JsonObject, path: Path) -> None:
    if element.get("stop"):
        raise _not_supported(path, "decoder Strip of the text's end")


def _strip(element: JsonObject, path: Path) -> StripStep:
    start, stop = element.get("start"), element.get("stop")
    if not isinstance(start, int) or not isinstance(stop, int):
        raise CorruptFile(f"{path}: decoder Strip needs integers start and stop")
    return StripStep(_field(element, "content", path), start, stop)


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


def _word_piece(element: JsonObject, path: Path) -> list[Step]:
    """A token goes on with the word before it, or begins one and has a space before it."""
    cleanup = _CLEANUP if element.get("cleanup") else ()
    word = WordStep(_field(element, "prefix", path))
    return [word, *(ReplaceStep(old, new) for old, new in cleanup)]


def _characters_of_bytes() -> dict[int, str]:
    """GPT-2's printable characters for bytes: Radford et al. 2019, encoder.py,
    bytes_to_unicode."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable}
    table.update({byte: chr(0x100 + idx) for idx, byte in enumerate(others)})
    return table


_CHARACTER_OF_BYTE = _characters_of_bytes()


def byte_level_text(token: bytes) -> str:
    """How a byte-level vocabulary writes the bytes of a token.

    >>> byte_level_text(b" a")
    '\u0120a'
    """
    return "".join(_CHARACTER_OF_BYTE[byte] for byte in token)


_STEPS: dict[object, Callable[[JsonObject, Path], list[Step]]] = {
    "ByteLevel": lambda element, path: [ByteLevelStep()],
    "ByteFallback": lambda element, path: [ByteFallbackStep()],
    "Metaspace": lambda element, path: [ReplaceStep(_field(element, "replacement", path), " ")],
    "Replace": lambda element, path: [
        ReplaceStep(_pattern(element, path), _field(element, "content", path))
    ],
    "Strip": lambda element, path: [_strip(element, path)],
    "WordPiece": _word_piece,
}
