"""SentencePiece files field by field, good and bad: the protobuf messages of
sentencepiece_model.proto."""

from __future__ import annotations

import struct
from collections.abc import Iterable


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def message(number: int, contents: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(contents)) + contents


def piece(text: str, score: float, kind: int) -> bytes:
    fields = message(1, text.encode()) + b"\x15" + struct.pack("<f", score)
    return message(1, fields + b"\x18" + varint(kind))


def model(
    pieces: Iterable[tuple[str, float, int]], *, is_bpe: bool = False, charsmap: bytes = b""
) -> bytes:
    """Pieces with their scores and types. The first is the unknown one; there is no BOS."""
    trainer = b"\x18" + varint(2 if is_bpe else 1)
    for number in (41, 42):  # bos_id and eos_id: -1
        trainer += varint(number << 3) + varint((1 << 64) - 1)
    parts = [piece(*fields) for fields in pieces]
    normalizer = message(2, charsmap) if charsmap else b""
    return b"".join(parts) + message(2, trainer) + message(3, normalizer)
