"""Writes GGUF files. Source: the format's specification, version 3."""

import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmserve.quantization.number_formats import Array

_ALIGNMENT = 32
_U32, _I32, _F32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9

Value = bool | int | float | str | Sequence[str] | Sequence[int] | Sequence[float]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor to be written: its number of GGUF's types, its shape as NumPy has it, its bytes in
    the file, and what makes these, when it is its turn, in parts."""

    name: str
    kind: int
    shape: tuple[int, ...]
    num_bytes: int
    make: Callable[[], Iterable[Array]]


def write_gguf(path: Path, metadata: Mapping[str, Value], tensors: Sequence[GgufTensor]) -> None:
    """Writes a file, first under another name, so that it is there whole or not at all."""
    header = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        header += [_string(key), _typed(value)]
    offset = 0
    for tensor in tensors:
        dims = tensor.shape[::-1]
        header.append(_string(tensor.name))
        header.append(struct.pack(f"<I{len(dims)}Q", len(dims), *dims))
        header.append(struct.pack("<IQ", tensor.kind, offset))
        offset += _padded(tensor.num_bytes)
    head = b"".join(header)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        file.write(head + b"\0" * (_padded(len(head)) - len(head)))
        for tensor in tensors:
            written = 0
            for part in tensor.make():
                written += file.write(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
            assert written == tensor.num_bytes, tensor.name
            file.write(b"\0" * (_padded(written) - written))
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _string(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(encoded)) + encoded


def _typed(value: Value) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<IB", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _U32, value)
    if isinstance(value, float):
        return struct.pack("<If", _F32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if value and isinstance(value[0], str):
        head = struct.pack("<IIQ", _ARRAY, _STRING, len(value))
        return head + b"".join(_string(str(item)) for item in value)
    is_float = bool(value) and isinstance(value[0], float)
    head = struct.pack("<IIQ", _ARRAY, _F32 if is_float else _I32, len(value))
    return head + np.array(value, np.float32 if is_float else np.int32).tobytes()
