"""Model files that are shortened while they are in use: that model says so, and all others live."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints import checkpoint, copy_checkpoint
from llmserve import LLM, SamplingParams, _core_testing

GREEDY = SamplingParams(temperature=0, max_tokens=4)


def generate(llm: LLM) -> list[int] | str:
    """The tokens, or the error."""
    (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7, 300]}], GREEDY, use_tqdm=False)
    (completion,) = output.outputs
    return completion.error or list(completion.token_ids)


def open_model(path: Path, **arguments: Any) -> LLM:
    return LLM(
        path,
        dtype="float32",
        num_threads=1,
        max_model_len=64,
        num_gpu_blocks_override=16,
        **arguments,
    )


def test_model_whose_file_is_shortened_fails_alone(tmp_path: Path) -> None:
    # Tables are read in place: the file's pages go away under them.
    path = copy_checkpoint(checkpoint("llama"), tmp_path / "model")
    with open_model(path) as cut, open_model(checkpoint("llama")) as other:
        wanted = generate(other)
        assert generate(cut) == wanted
        os.truncate(path / "model.safetensors", 0)
        for _ in range(2):
            error = generate(cut)
            assert isinstance(error, str)
            assert error.startswith("model.safetensors: was shortened")  # and no path
        assert generate(other) == wanted


def test_shortened_file_loads_anew_once_it_is_put_back(tmp_path: Path) -> None:
    path = copy_checkpoint(checkpoint("llama"), tmp_path / "model")
    file = path / "model.safetensors"
    contents = file.read_bytes()
    with open_model(path) as llm:
        wanted = generate(llm)
        os.truncate(file, 0)
        assert "was shortened" in str(generate(llm))
        (tmp_path / "new").write_bytes(contents)
        os.replace(tmp_path / "new", file)
        llm.sleep(level=2)
        llm.wake_up()
        assert generate(llm) == wanted


@pytest.mark.parametrize("of_cache", [True, False])
def test_model_of_packed_files_fails_alone_and_loads_anew(
    of_cache: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = copy_checkpoint(checkpoint("llama"), tmp_path / "model")
    with open_model(path, packed_cache_bytes=2**30) as llm:
        wanted = generate(llm)
    (packed,) = (tmp_path / "cache").rglob("*.safetensors")
    file = packed if of_cache else path / "model.safetensors"
    contents = file.read_bytes()
    with open_model(path, packed_cache_bytes=2**30) as llm, open_model(checkpoint("llama")) as one:
        assert llm.get_memory_use().mapped_bytes > packed.stat().st_size / 2  # it is read in place
        assert generate(llm) == wanted
        os.truncate(file, 0)
        for _ in range(2):
            error = generate(llm)
            assert isinstance(error, str)
            assert error.startswith(f"{file.name}: was shortened")
        assert generate(one) == wanted
        if not of_cache:
            (tmp_path / "new").write_bytes(contents)
            os.replace(tmp_path / "new", file)
        llm.sleep(level=2)
        llm.wake_up()
        assert generate(llm) == wanted  # packed weights are made anew


def test_read_past_the_end_while_loading_is_a_corrupt_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"a" * 20_000)
    mapped = _core_testing.MappedFile(str(file))
    assert mapped.read(0, 20_000) == b"a" * 20_000
    mapped.check()
    os.truncate(file, 5000)
    assert mapped.read(0, 5000) == b"a" * 5000
    mapped.check()
    assert mapped.read(9000, 1000) == bytes(1000)
    with pytest.raises(OSError, match="file: was shortened"):
        mapped.check()
    assert mapped.read(0, 4096) == b"a" * 4096


OTHER_FAULT = """
import faulthandler, mmap, os, sys
{first}
model, other_file = sys.argv[1:]
from llmserve import _core_testing
open(model, "wb").write(b"a" * 9000)
mapped = _core_testing.MappedFile(model)
{second}
os.truncate(model, 0)
assert mapped.read(0, 9000) == bytes(9000)
open(other_file, "wb").write(b"a" * 9000)
other = mmap.mmap(os.open(other_file, os.O_RDWR), 9000)
os.truncate(other_file, 0)
print("reads", flush=True)
other[8500]
"""


@pytest.mark.parametrize("order", ["none", "before", "mapped again after"])
def test_faults_elsewhere_still_end_the_process(order: str, tmp_path: Path) -> None:
    enable = "faulthandler.enable()"
    again = f"{enable}; mapped = _core_testing.MappedFile(model)"
    code = OTHER_FAULT.format(
        first=enable if order == "before" else "",
        second=again if order == "mapped again after" else "",
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "model"), str(tmp_path / "other")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "reads\n"
    assert done.returncode == -7
    assert ("Fatal Python error: Bus error" in done.stderr) == (order != "none")
