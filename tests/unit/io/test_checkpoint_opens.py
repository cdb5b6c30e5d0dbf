"""A start opens a checkpoint's weights once, and whoever reads them uses that mapping."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import checkpoints
import gguf_files
import pytest
from llmserve import LLM

IN_OPEN = 0x20
EVENT = struct.Struct("iIII")

pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="counts with inotify")


class Opens:
    """How often each file of a folder has been opened, by whomever, since this was made."""

    def __init__(self, folder: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0 or libc.inotify_add_watch(self._fd, os.fsencode(folder), IN_OPEN) < 0:
            pytest.skip(f"no inotify: {os.strerror(ctypes.get_errno())}")
        self._counts: Counter[str] = Counter()

    def close(self) -> None:
        os.close(self._fd)

    def of(self, name: str) -> int:
        self._counts.update(self._new())
        return self._counts[name]

    def _new(self) -> Iterator[str]:
        while True:
            try:
                data = os.read(self._fd, 2**16)
            except BlockingIOError:
                return
            while data:
                *_, length = EVENT.unpack_from(data)
                name, data = data[EVENT.size : EVENT.size + length], data[EVENT.size + length :]
                yield os.fsdecode(name.rstrip(b"\0"))


@pytest.fixture
def watch() -> Iterator[Callable[[Path], Opens]]:
    made: list[Opens] = []

    def make(folder: Path) -> Opens:
        made.append(Opens(folder))
        return made[-1]

    yield make
    for opens in made:
        opens.close()


def start(path: Path) -> LLM:
    return LLM(path, num_threads=1, max_num_seqs=2, num_gpu_blocks_override=64)


def test_a_start_opens_safetensors_once(tmp_path: Path, watch: Callable[[Path], Opens]) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoints.checkpoint("llama"), folder)
    opens = watch(folder)
    with start(folder):
        assert opens.of("model.safetensors") == 1


def test_a_start_opens_a_gguf_file_once_for_weights_tokenizer_and_sampling(
    tmp_path: Path, watch: Callable[[Path], Opens]
) -> None:
    source = checkpoints.tokenizer().backend_tokenizer
    gguf_files.write_gguf(
        tmp_path / "model.gguf",
        checkpoints.checkpoint("llama"),
        extra=lambda writer: gguf_files.add_bpe(writer, source, "default"),
    )
    opens = watch(tmp_path)
    with start(tmp_path / "model.gguf") as llm:
        assert llm.has_tokenizer
        assert opens.of("model.gguf") == 1


def test_waking_up_opens_the_weights_that_are_there_by_then(
    tmp_path: Path, watch: Callable[[Path], Opens]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoints.checkpoint("llama"), folder)
    with start(folder) as llm:
        opens = watch(folder)
        llm.sleep(level=2)
        assert opens.of("model.safetensors") == 0
        llm.wake_up()
        assert opens.of("model.safetensors") == 1
