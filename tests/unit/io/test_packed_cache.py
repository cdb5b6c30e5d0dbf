"""Packed weights kept for the next start: the same tokens, never stale, never in the way."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from checkpoints import checkpoint, copy_checkpoint, edit_config
from gguf_files import quantized, write_gguf
from llmserve import LLM, InvalidArgument, NotSupported, SamplingParams, _core, _core_testing, cli
from offline import generate
from ranks import engine_config
from safetensors.numpy import load_file, save_file

_PROMPTS = [{"prompt_token_ids": list(range(5, 5 + length))} for length in (1, 17, 40)]
_PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=2)
_GIB = 2**30

Answer = list[tuple[list[int], list[float]]]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache's folder, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "llmserve" / "packed"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return copy_checkpoint(checkpoint("llama"), tmp_path / "model")


def answer(llm: LLM) -> Answer:
    """Tokens and log-probabilities, which a wrong bit in a weight would change."""
    outputs = [output.outputs[0] for output in generate(llm, _PROMPTS, _PARAMS)]
    assert all(output.logprobs is not None for output in outputs)
    return [
        (
            output.token_ids,
            [entry.logprob for step in output.logprobs or () for entry in step.values()],
        )
        for output in outputs
    ]


def start(path: Path, quota: int | None = _GIB, **arguments: Any) -> tuple[Answer, int]:
    """What a fresh engine answers, and how many bytes of its weights are mapped."""
    with LLM(path, packed_cache_bytes=quota, num_threads=2, **arguments) as llm:
        return answer(llm), llm.get_memory_use().mapped_bytes


def warnings_of(caplog: pytest.LogCaptureFixture) -> str:
    text = "\n".join(record.getMessage() for record in caplog.records)
    caplog.clear()
    return text


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"dtype": "bfloat16"},
        {"quantization": "int8"},
        {"quantization": "int4-g32-asym", "dtype": "bfloat16"},
    ],
    ids=str,
)
def test_the_next_start_maps_the_weights_and_gives_the_same_bits(
    arguments: dict[str, Any], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = checkpoint("llama", hidden_size=64, intermediate_size=96)
    packed, before = start(path, None, **arguments)
    assert not folder.exists()
    assert start(path, **arguments) == (packed, before)
    (file,) = folder.iterdir()
    again, mapped = start(path, **arguments)
    assert again == packed
    assert mapped > before
    assert list(folder.iterdir()) == [file]
    assert warnings_of(caplog) == ""


def test_a_file_serves_every_instruction_set(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = checkpoint("llama", hidden_size=64, intermediate_size=96)
    start(path, quantization="int8")
    (content,) = [file.read_bytes() for file in folder.iterdir()]
    monkeypatch.setenv("LLMSERVE_CPU_ISA", "generic")
    packed, before = start(path, None, quantization="int8")
    again, mapped = start(path, quantization="int8")
    assert again == packed
    assert mapped > before
    assert [file.read_bytes() for file in folder.iterdir()] == [content]
    assert warnings_of(caplog) == ""


def test_the_plan_knows_what_will_be_mapped(model: Path) -> None:
    for _ in range(2):
        plan = LLM.plan(model, packed_cache_bytes=_GIB, num_threads=1)
        with LLM(model, packed_cache_bytes=_GIB, num_threads=1) as llm:
            use = llm.get_memory_use()
        assert (plan.weight_bytes, plan.mapped_bytes) == (use.weight_bytes, use.mapped_bytes)
    assert plan.mapped_bytes > LLM.plan(model, num_threads=1).mapped_bytes


def test_blocks_of_a_gguf_file_are_kept_too(tmp_path: Path) -> None:
    source = checkpoint("llama", hidden_size=64, intermediate_size=96)
    path = write_gguf(tmp_path / "model.gguf", source, quantized("Q4_0"))
    packed, before = start(path)
    again, mapped = start(path)
    assert again == packed
    assert mapped > before


def test_a_sleeping_engine_wakes_up_from_the_file(model: Path) -> None:
    packed, _ = start(model)
    with LLM(model, packed_cache_bytes=_GIB) as llm:
        llm.sleep(2)
        llm.wake_up()
        assert answer(llm) == packed


def test_each_form_of_the_weights_has_a_file_of_its_own(model: Path, folder: Path) -> None:
    forms: list[dict[str, Any]] = [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}]
    answers = [start(model, **form)[0] for form in forms]
    assert len(list(folder.iterdir())) == len(forms)
    assert [start(model, **form)[0] for form in forms] == answers


def test_two_checkpoints_in_one_folder_have_a_file_each(
    model: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = model / "other.safetensors"
    arrays = load_file(model / "model.safetensors")
    arrays["lm_head.weight"] *= -1
    save_file(arrays, other)
    paths = (model / "model.safetensors", other)
    answers = [start(path)[0] for path in paths]
    assert answers[0] != answers[1]
    assert [start(path)[0] for path in paths] == answers
    assert len(list(folder.iterdir())) == 2
    assert warnings_of(caplog) == ""


def _change(model: Path) -> None:
    weights = model / "model.safetensors"
    arrays = load_file(weights)
    arrays["model.layers.1.self_attn.o_proj.weight"][3, 3] += 2.0
    save_file(arrays, weights)


def test_a_changed_checkpoint_is_packed_anew(
    model: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, _ = start(model)
    weights = model / "model.safetensors"
    times = weights.stat()
    _change(model)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))  # as a careful copy would
    expected, _ = start(model, None)
    assert expected != old
    assert start(model)[0] == expected
    assert "the checkpoint, or llmserve, has changed since" in warnings_of(caplog)
    assert start(model)[0] == expected
    assert len(list(folder.iterdir())) == 1
    assert warnings_of(caplog) == ""


def test_a_change_of_the_config_alone_is_seen(model: Path) -> None:
    start(model)
    edit_config(model, tie_word_embeddings=True)
    expected, _ = start(model, None)
    assert start(model)[0] == expected


def _flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


_DAMAGES = {
    "a bit of the last byte": lambda file: _flip(file, -1),
    "a bit in the middle": lambda file: _flip(file, file.stat().st_size // 2),
    "the first byte": lambda file: _flip(file, 0),
    "half of it": lambda file: os.truncate(file, file.stat().st_size // 2),
    "all of it": lambda file: os.truncate(file, 0),
    "another content": lambda file: file.write_bytes(b"\xff" * 5000),
    "two weights that change places": lambda file: file.write_bytes(_swapped(file.read_bytes())),
}


def _swapped(content: bytes) -> bytes:
    """With the names of two weights of one size exchanged in the header."""
    first, second = (f'"model.layers.{i}.mlp.down_proj.weight[0:48]"'.encode() for i in (0, 1))
    assert first in content
    assert second in content
    return content.replace(first, b"\0name").replace(second, first).replace(b"\0name", second)


@pytest.mark.parametrize("damage", _DAMAGES.values(), ids=_DAMAGES.keys())
def test_a_damaged_file_is_said_and_written_anew(
    damage: Any, model: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = start(model)
    (file,) = folder.iterdir()
    good = file.read_bytes()
    damage(file)
    assert start(model)[0] == expected
    assert "packed weights are made anew: " in warnings_of(caplog)
    assert file.read_bytes() == good
    assert start(model)[0] == expected
    assert warnings_of(caplog) == ""


def test_more_than_the_quota_is_not_kept(
    model: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = start(model, 1000)
    assert "packed_cache_bytes is 1000" in warnings_of(caplog)
    assert not folder.exists()
    assert start(model)[0] == expected


def test_what_was_not_used_for_longest_makes_room(tmp_path: Path, folder: Path) -> None:
    models = [copy_checkpoint(checkpoint("llama"), tmp_path / name) for name in ("a", "b", "c")]
    start(models[0])
    (file,) = folder.iterdir()
    quota = 2 * file.stat().st_size
    start(models[1], quota)
    start(models[0], quota)  # used again, so that b is the older one
    start(models[2], quota)
    assert {path.name.split("-")[0] for path in folder.iterdir()} == {"a", "c"}


def test_a_full_disk_does_no_harm(model: Path, folder: Path) -> None:
    """A limit on the size of files stands for it."""
    program = (
        "import resource, sys\n"
        "from llmserve import LLM\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))\n"
        "with LLM(sys.argv[1], packed_cache_bytes=2**30) as llm:\n"
        "    print(len(llm.generate([[5, 6]], use_tqdm=False)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(model)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "1\n"
    assert "packed weights are not kept: " in done.stderr
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_made_does_no_harm(
    model: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = start(model, None)
    folder.parent.parent.mkdir()
    folder.parent.write_text("a file")
    assert start(model)[0] == expected
    assert "packed weights are not kept: " in warnings_of(caplog)


def test_starts_at_once_do_each_other_no_harm(model: Path, folder: Path) -> None:
    expected, _ = start(model, None)
    answers: list[Answer] = []
    threads = [threading.Thread(target=lambda: answers.append(start(model)[0])) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == 6 * [expected]
    assert len(list(folder.iterdir())) == 1


def test_what_a_killed_writer_left_goes_and_what_one_writes_stays(
    model: Path, folder: Path
) -> None:
    folder.mkdir(parents=True)
    left, written = folder / "x.1.0.unfinished", folder / "x.2.0.unfinished"
    left.write_bytes(b"left")
    with written.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        start(model)
        assert not left.exists()
        assert written.exists()


def test_an_engine_keeps_a_file_that_is_cleared(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, _ = start(model)
    with LLM(model, packed_cache_bytes=_GIB) as llm:
        assert cli.main(["cache", "clear"]) == 0
        assert capsys.readouterr().out.startswith("removed ")
        assert list(folder.iterdir()) == []
        assert answer(llm) == expected


def test_what_cannot_be_cleared_is_an_error(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start(model)
    # What a folder without the right to write does; to root there is none.
    monkeypatch.setattr(_core, "clear_packed_cache", lambda _: 0)
    assert cli.main(["cache", "clear"]) == 2
    (file,) = folder.iterdir()
    message = f"1 of 1 files cannot be removed, the first of them {file}; do you have the right"
    assert message in capsys.readouterr().err


def test_the_command_lists_what_is_kept(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["cache", "list"]) == 0
    assert "in 0 files of " in capsys.readouterr().out
    assert cli.main(["generate", "--model", str(model), "--packed-cache-bytes", "1GiB", "a"]) == 0
    capsys.readouterr()
    assert cli.main(["cache", "list"]) == 0
    assert f"{model}  float32 in cpu panels" in capsys.readouterr().out
    assert cli.main(["cache", "list", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    (file,) = folder.iterdir()
    assert entry["path"] == str(file)
    assert entry["num_bytes"] == file.stat().st_size
    file.write_bytes(b"no")
    assert cli.main(["cache", "list"]) == 0
    assert "(unreadable)" in capsys.readouterr().out


@pytest.mark.parametrize("action", ["list", "clear"])
def test_a_folder_that_cannot_be_read_is_an_error(
    action: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_bytes(b"")  # as one without the right to read, which root always has
    assert cli.main(["cache", action]) == 2
    assert f"{folder} cannot be read: Not a directory" in capsys.readouterr().err


def test_a_path_that_is_no_utf8_is_kept_too(tmp_path: Path, folder: Path) -> None:
    odd = Path(os.fsdecode(bytes(tmp_path) + b'/m"\xff\\'))
    copy_checkpoint(checkpoint("llama"), odd)
    link = tmp_path / "link"
    link.symlink_to(odd)
    expected, before = start(link)
    again, mapped = start(link)
    assert again == expected
    assert mapped > before
    (entry,) = _core.list_packed_cache(str(folder))
    assert entry.model == f'{tmp_path}/m"?\\'


def test_only_the_cpu_keeps_packed_weights(model: Path) -> None:
    with pytest.raises(NotSupported, match="packed_cache_bytes is not supported on device 'ref'"):
        LLM(model, device="ref", packed_cache_bytes=_GIB)
    with pytest.raises(InvalidArgument, match="packed_cache_bytes"):
        LLM(model, packed_cache_bytes=-1)


# Of the bytes of all weights of seed 0, by what packs them.
_LAYOUT = "cpu panels 4"
_DIGESTS: dict[str, tuple[dict[str, Any], str]] = {
    "float32": ({"dtype": "float32"}, "c9885c3c16cf1fac"),
    "bfloat16": ({"dtype": "bfloat16"}, "53f759d2d2fc1ce2"),
    "int8": ({"quantization": "int8"}, "76318d5aa495ce6a"),
    "int4-g32-asym": ({"quantization": "int4-g32-asym"}, "2be559da9c850227"),
}


@pytest.mark.parametrize("form", _DIGESTS)
def test_a_layout_of_one_name_has_one_form(form: str, folder: Path, tmp_path: Path) -> None:
    """Files outlive the program that wrote them. If this fails, the bytes of packed weights have
    changed: count CpuBackend::packed_layout's number up, and write the new name and digests here.
    """
    arguments, expected = _DIGESTS[form]
    path = copy_checkpoint(checkpoint("llama", hidden_size=64, intermediate_size=96), tmp_path)
    arrays = load_file(path / "model.safetensors")
    for idx, name in enumerate(sorted(arrays)):
        flat = arrays[name].reshape(-1)
        flat[:] = [((i * 7919 + idx) % 1009 - 504) / 512 for i in range(flat.size)]
    save_file(arrays, path / "model.safetensors")
    start(path, **arguments)
    (file,) = folder.iterdir()
    content = file.read_bytes()
    (header_bytes,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + header_bytes])
    assert header["__metadata__"]["variant"].endswith(f"in {_LAYOUT}")
    assert (8 + header_bytes) % 4096 == 0
    assert hashlib.sha256(content[8 + header_bytes :]).hexdigest()[:16] == expected


def test_an_engine_of_tests_tells_what_was_not_kept(model: Path) -> None:
    config = engine_config(model, packed_cache_bytes=1000)
    engine = _core_testing.faulty_engine(config)
    assert "packed weights are not kept: they take" in engine.warning
    engine.close()
