"""The hidden states of all calibration tokens, on the disk: what one layer leaves is what the next
reads, and what a killed run goes on from."""

import os
from pathlib import Path

import numpy as np

from llmserve.errors import CorruptFile
from llmserve.quantization.number_formats import Floats


class HiddenStates:
    """[T, E] f32 in a file, read and written in runs of rows. Nothing of it stays in memory."""

    def __init__(self, path: Path, num_tokens: int, hidden_size: int) -> None:
        self._path = path
        self._width = hidden_size
        self._num_bytes = num_tokens * hidden_size * 4
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        if os.fstat(self._file).st_size != self._num_bytes:
            os.ftruncate(self._file, self._num_bytes)

    def read(self, begin: int, end: int) -> Floats:
        """Rows [begin, end), as a new array."""
        rows = np.empty((end - begin, self._width), np.float32)
        target = rows.data.cast("B")
        done = 0
        while done < len(target):
            count = os.preadv(self._file, [target[done:]], begin * self._width * 4 + done)
            if count <= 0:
                raise CorruptFile(f"{self._path}: expected {self._num_bytes} bytes, and it ends")
            done += count
        return rows

    def write(self, begin: int, rows: Floats) -> None:
        """Rows from `begin` on."""
        source = np.ascontiguousarray(rows, np.float32).data.cast("B")
        done = 0
        while done < len(source):
            done += os.pwrite(self._file, source[done:], begin * self._width * 4 + done)

    def sync(self) -> None:
        """What was written outlives the process and the machine."""
        os.fsync(self._file)

    def close(self) -> None:
        """Lets go of the file."""
        os.close(self._file)
