"""SentencePiece vocabularies, from a tokenizer.model or a GGUF file, as tokenizer.json documents.

Kudo & Richardson 2018; the file is the protobuf message ModelProto of sentencepiece_model.proto, of
which the few fields that matter are read here.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from struct import unpack_from

from llmserve.errors import CorruptFile, NotSupported
from llmserve.tokenization.file_bounds import MAX_TOKENS, check_charsmap
from llmserve.tokenization.tokenizer_document import (
    SPACE,
    AddedToken,
    Document,
    Ends,
    bpe_model,
    document,
    merges_of_ranks,
    normalizer_of_spaces,
    sentencepiece_decoder,
)


class PieceType(IntEnum):
    """Of a piece; GGUF's token types have the same numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(slots=True)
class SentencePieceModel:
    """A trained vocabulary and how a text is normalised for it."""

    is_unigram: bool = True
    pieces: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    byte_fallback: bool = False
    add_prefix: bool = True  # a space before the text
    squeeze: bool = True  # no spaces at the ends, one between words
    charsmap: bytes = b""
    unk_id: int = 0
    bos_id: int = 1
    eos_id: int = 2


def sentencepiece_document(
    model: SentencePieceModel, ends: Ends, path: Path, beyond: Iterable[AddedToken] = ()
) -> Document:
    """The tokenizer.json of a vocabulary, with tokens `beyond` its own. Raises CorruptFile."""
    if not 0 <= model.unk_id < len(model.pieces):
        raise CorruptFile(
            f"{path}: the id of the unknown piece is {model.unk_id}, and there are "
            f"{len(model.pieces)} pieces"
        )
    # Symbols that the user defined stand in the text with spaces, not U+2581.
    model.pieces = [
        piece.replace(SPACE, " ") if kind == PieceType.USER_DEFINED else piece
        for piece, kind in zip(model.pieces, model.types, strict=True)
    ]
    vocab: dict[str, int] = {}
    for token_id, piece in enumerate(model.pieces):
        if vocab.setdefault(piece, token_id) != token_id:
            raise CorruptFile(f"{path}: the piece {piece!r:.80} comes twice")
    for piece, score in zip(model.pieces, model.scores, strict=True):
        if not math.isfinite(score):
            raise CorruptFile(f"{path}: the score of the piece {piece!r:.80} is {score}")
    if model.charsmap:
        check_charsmap(model.charsmap, f"{path}: precompiled_charsmap")
    return document(
        _unigram(model) if model.is_unigram else _bpe(model, vocab, path),
        [*_added_tokens(model), *beyond],
        ends,
        normalizer_of_spaces(model.add_prefix, model.squeeze, model.charsmap),
        (),
        sentencepiece_decoder(model.add_prefix),
    )


def _unigram(model: SentencePieceModel) -> Document:
    return {
        "type": "Unigram",
        "unk_id": model.unk_id,
        "vocab": [list(item) for item in zip(model.pieces, model.scores, strict=True)],
        "byte_fallback": model.byte_fallback,
    }


def _bpe(model: SentencePieceModel, vocab: dict[str, int], path: Path) -> Document:
    kinds = (PieceType.NORMAL, PieceType.USER_DEFINED)
    # What has a space is cut out of the text before spaces become U+2581.
    usable = [
        piece
        for piece, kind in zip(model.pieces, model.types, strict=True)
        if kind in kinds and " " not in piece
    ]
    ranks = {piece: -score for piece, score in zip(model.pieces, model.scores, strict=True)}
    return bpe_model(
        vocab,
        merges_of_ranks(ranks, usable, path),
        byte_fallback=model.byte_fallback,
        unknown=model.pieces[model.unk_id],
    )


def _added_tokens(model: SentencePieceModel) -> Iterator[AddedToken]:
    for token_id, (piece, kind) in enumerate(zip(model.pieces, model.types, strict=True)):
        if kind in (PieceType.CONTROL, PieceType.UNKNOWN):
            yield AddedToken(token_id, piece, True)
        elif kind == PieceType.USER_DEFINED and piece:
            yield AddedToken(token_id, piece, False)


def parse_sentencepiece(data: bytes, path: Path) -> SentencePieceModel:
    """A tokenizer.model. Raises CorruptFile, NotSupported."""
    model = SentencePieceModel()
    for number, value in _fields(data, path):
        if number == 1:
            _read_piece(model, _message(value, "pieces", path), path)
        elif number == 2:
            _read_trainer(model, _message(value, "trainer_spec", path), path)
        elif number == 3:
            _read_normalizer(model, _message(value, "normalizer_spec", path), path)
    if not model.pieces:
        raise CorruptFile(f"{path}: expected a sentencepiece model, got one without pieces")
    return model


def _read_piece(model: SentencePieceModel, data: bytes, path: Path) -> None:
    if len(model.pieces) == MAX_TOKENS:
        raise CorruptFile(f"{path}: more than {MAX_TOKENS} pieces")
    piece, score, kind = "", 0.0, int(PieceType.NORMAL)
    for number, value in _fields(data, path):
        if number == 1:
            try:
                piece = _message(value, "piece", path).decode("utf-8")
            except UnicodeDecodeError as error:
                raise CorruptFile(f"{path}: piece {len(model.pieces)} is not UTF-8") from error
        elif number == 2 and isinstance(value, float):
            score = value
        elif number == 3:
            kind = _integer(value, "type", path)
    model.pieces.append(piece)
    model.scores.append(score)
    model.types.append(kind)


def _read_trainer(model: SentencePieceModel, data: bytes, path: Path) -> None:
    for number, value in _fields(data, path):
        if number == 3:
            kind = _integer(value, "model_type", path)
            if kind not in (1, 2):
                raise NotSupported(
                    f"{path}: sentencepiece model type {kind} is not supported (1 unigram, 2 BPE)"
                )
            model.is_unigram = kind == 1
        elif number == 24 and value:
            raise NotSupported(f"{path}: treat_whitespace_as_suffix is not supported")
        elif number == 35:
            model.byte_fallback = bool(value)
        elif number == 40:
            model.unk_id = _integer(value, "unk_id", path)
        elif number == 41:
            model.bos_id = _integer(value, "bos_id", path)
        elif number == 42:
            model.eos_id = _integer(value, "eos_id", path)


def _read_normalizer(model: SentencePieceModel, data: bytes, path: Path) -> None:
    for number, value in _fields(data, path):
        if number == 2:
            model.charsmap = _message(value, "precompiled_charsmap", path)
        elif number == 3:
            model.add_prefix = bool(value)
        elif number == 4:
            model.squeeze = bool(value)
        elif number == 5 and not value:
            raise NotSupported(f"{path}: escape_whitespaces=false is not supported")


def _message(value: int | float | bytes, name: str, path: Path) -> bytes:
    if not isinstance(value, bytes):
        raise CorruptFile(f"{path}: {name}: expected bytes, got a number")
    return value


def _integer(value: int | float | bytes, name: str, path: Path) -> int:
    """Negative ones are written as 64 bits, two's complement."""
    if not isinstance(value, int):
        raise CorruptFile(f"{path}: {name}: expected an integer")
    return value - (1 << 64) if value >= 1 << 63 else value


def _fields(data: bytes, path: Path) -> Iterator[tuple[int, int | float | bytes]]:
    """The fields of a protobuf message: varints as int, 32-bit ones as float, others as bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at, path)
        wire = key & 7
        if wire == 0:
            value, at = _varint(data, at, path)
            yield key >> 3, value
            continue
        size = {1: 8, 5: 4}.get(wire)
        if wire == 2:
            size, at = _varint(data, at, path)
        if size is None or size > len(data) - at:
            raise CorruptFile(f"{path}: not a sentencepiece model: broken at byte {at} of a field")
        chunk = data[at : at + size]
        at += size
        yield key >> 3, unpack_from("<f", chunk)[0] if wire == 5 else chunk


def _varint(data: bytes, at: int, path: Path) -> tuple[int, int]:
    value = 0
    for idx, byte in enumerate(data[at : at + 10]):
        value |= (byte & 0x7F) << (7 * idx)
        if byte < 0x80:
            return value, at + idx + 1
    raise CorruptFile(f"{path}: not a sentencepiece model: broken at byte {at} of a field")


def piece_ends(pieces: Sequence[str], before: Sequence[int], after: Sequence[int]) -> Ends:
    """The tokens of ids around a text."""
    return Ends(
        tuple((pieces[token_id], token_id) for token_id in before),
        tuple((pieces[token_id], token_id) for token_id in after),
    )
