"""Tensors of a safetensors checkpoint, read one by one, and files of them, written whole or not at
all. The core has checked what it lists: names, shapes and places within the files."""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from llmserve import _core
from llmserve.common.units import human_bytes
from llmserve.errors import CorruptFile, NotSupported, ResourceExhausted
from llmserve.quantization.number_formats import Array, Floats, bf16_to_f32, f32_to_bf16

# The core's names of element types: safetensors', and NumPy's for the bytes.
_TYPES = {
    "float32": ("F32", np.float32),
    "bfloat16": ("BF16", np.uint16),
    "float16": ("F16", np.float16),
    "int64": ("I64", np.int64),
    "int32": ("I32", np.int32),
    "int8": ("I8", np.int8),
    "uint8": ("U8", np.uint8),
    "float8_e4m3fn": ("F8_E4M3", np.uint8),
}
_FLOATS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as it is stored: safetensors' name of its type, its shape, and its elements in an
    array of that many bytes each."""

    dtype: str
    shape: tuple[int, ...]
    data: Array

    @property
    def num_bytes(self) -> int:
        """Of the elements."""
        return int(self.data.nbytes)


def raw(values: Array, dtype: str | None = None) -> RawTensor:
    """A tensor to be stored: floats as `dtype`, the core's name of it; others as they are, but
    bytes that are E4M3 numbers with dtype="float8_e4m3fn"."""
    shape = tuple(values.shape)
    if dtype == "bfloat16":
        return RawTensor("BF16", shape, f32_to_bf16(values))
    if dtype is None:
        dtype = values.dtype.name
    name, element = _TYPES[dtype]
    return RawTensor(name, shape, np.ascontiguousarray(values, element))


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    num_bytes: int


class TensorFolder:
    """The tensors of a model's folder, by name. Nothing is kept in memory."""

    def __init__(self, folder: Path) -> None:
        inspection = _core.inspect_checkpoint(str(folder))
        if inspection["format"] != "safetensors":
            raise NotSupported(
                f"{folder}: quantize reads folders of safetensors, and this checkpoint is "
                f"{inspection['format']}; convert the model that it was made from"
            )
        self.folder = folder
        self.stored_dtype = str(inspection["plan"]["dtype"])
        self._entries = {
            tensor["name"]: _Entry(
                tensor["dtype"],
                tuple(tensor["shape"]),
                folder / tensor["file"],
                tensor["offset"],
                tensor["num_bytes"],
            )
            for tensor in inspection["tensors"]
        }

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def split(self, name: str, part: str) -> None:
        """The parts of a tensor along its first dimension take its place, under the name `part`
        with their numbers for "{}"."""
        entry = self._entries.pop(name)
        count = entry.shape[0]
        size = entry.num_bytes // count
        for i in range(count):
            self._entries[part.replace("{}", str(i))] = _Entry(
                entry.dtype, entry.shape[1:], entry.file, entry.offset + i * size, size
            )

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor."""
        return self._entries[name].shape

    def dtype(self, name: str) -> str:
        """The core's name of its type."""
        return self._entries[name].dtype

    def num_bytes(self, name: str) -> int:
        """In its file."""
        return self._entries[name].num_bytes

    def raw(self, name: str) -> RawTensor:
        """As it is stored; the array is a view of the file. Raises NotSupported for a type that is
        neither a number's nor of eight bits, CorruptFile for a file that was cut short."""
        entry = self._entries[name]
        if entry.dtype not in _TYPES:
            raise NotSupported(f"{entry.file}: tensor {name!r} is {entry.dtype}, which is no float")
        dtype, element = _TYPES[entry.dtype]
        try:
            data = np.memmap(entry.file, np.uint8, "r", entry.offset, (entry.num_bytes,))
        except (OSError, ValueError) as error:
            raise CorruptFile(f"{entry.file}: tensor {name!r}: {error}") from error
        if entry.offset % np.dtype(element).itemsize:
            data = np.array(data)  # type: ignore[assignment]  # aligned
        return RawTensor(dtype, entry.shape, data.view(element).reshape(entry.shape))

    def floats(self, name: str) -> Floats:
        """As new f32. Raises NotSupported for what is no float, CorruptFile for infinity or NaN."""
        entry = self._entries[name]
        if entry.dtype not in _FLOATS:
            raise NotSupported(
                f"{entry.file}: tensor {name!r} is {entry.dtype}: the model is quantized already; "
                f"quantize the one that it was made from"
            )
        data = self.raw(name).data
        values = bf16_to_f32(data) if entry.dtype == "bfloat16" else data.astype(np.float32)
        if not np.isfinite(values).all():
            raise CorruptFile(f"{entry.file}: tensor {name!r} has elements that are not finite")
        return np.array(values, np.float32)

    def floats_below(self, prefix: str) -> dict[str, Floats]:
        """The tensors of floats whose names begin with `prefix`, each as floats() has it."""
        names = [name for name in self._entries if name.startswith(prefix)]
        return {name: self.floats(name) for name in names if self.dtype(name) in _FLOATS}


@contextlib.contextmanager
def telling_full_disks(path: Path) -> Iterator[None]:
    """What is written within it goes to `path`. A full disk becomes ResourceExhausted that says
    what to do; other errors stay as they are."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        place = path if path.exists() else path.parent
        raise ResourceExhausted(
            f"{path}: the disk is full, {human_bytes(shutil.disk_usage(place).free)} are free. "
            f"What is written stays: make room, and give the same command again to go on"
        ) from error


def write_tensors(path: Path, tensors: Mapping[str, RawTensor]) -> int:
    """Writes a safetensors file, first under another name, so that it is there whole or not at all.
    Returns its bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.num_bytes
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            _write_all(file, tensor.data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    return 8 + len(text) + offset


def _write_all(file: IO[bytes], data: Array) -> None:
    file.write(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
