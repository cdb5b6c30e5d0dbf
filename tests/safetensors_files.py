"""Hand-made safetensors files, good and bad."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any


def header_entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def safetensors_bytes(header: Any, data: bytes, *, header_length: int | None = None) -> bytes:
    """A file with `header` (raw bytes, or what json can write) and `data`."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if header_length is None else header_length
    return struct.pack("<Q", length) + text + data


def write_checkpoint(directory: Path, contents: bytes, config: Any = None) -> str:
    """A directory with that model.safetensors; its path."""
    directory.mkdir(exist_ok=True)
    write_anew(directory / "config.json", json.dumps(config if config is not None else {}).encode())
    write_anew(directory / "model.safetensors", contents)
    return str(directory)


def write_anew(path: Path, contents: bytes) -> None:
    """As a new file: ext4 flushes one that is written over to the disk, each time."""
    path.unlink(missing_ok=True)
    path.write_bytes(contents)
