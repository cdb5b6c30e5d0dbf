"""Untrusted checkpoint directories: no way out of them, and no code of theirs is run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from checkpoints import checkpoint, copy_checkpoint, edit_config
from llmserve import LLM, _core_testing
from llmserve.errors import CorruptFile, InvalidArgument, NotSupported


def list_tensors(path: str | Path) -> list[dict[str, Any]]:
    return _core_testing.list_tensors(str(path))


def load(path: str | Path) -> Any:
    return _core_testing.Model(str(path))


def refusal(path: str | Path, error: type[Exception] = CorruptFile) -> str:
    with pytest.raises(error) as caught:
        list_tensors(path)
    return str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_link_that_leaves_the_directory_is_refused(name: str, tmp_path: Path) -> None:
    directory = copy_checkpoint(checkpoint("llama"), tmp_path / "model")
    (directory / name).rename(tmp_path / name)
    (directory / name).symlink_to(tmp_path / name)
    assert f"{directory / name}: is a link that leaves" in refusal(directory)


def test_link_within_the_directory_is_followed(tmp_path: Path) -> None:
    directory = copy_checkpoint(checkpoint("llama"), tmp_path / "model")
    (directory / "model.safetensors").rename(directory / "weights")
    (directory / "model.safetensors").symlink_to("weights")
    assert list_tensors(directory) == list_tensors(checkpoint("llama"))


def test_snapshot_of_the_hub_cache_is_read(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--o--m" / "snapshots" / "0123abc"
    blobs = tmp_path / "models--o--m" / "blobs"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for i, source in enumerate(sorted(checkpoint("llama").iterdir())):
        (blobs / f"{i:064x}").write_bytes(source.read_bytes())
        (snapshot / source.name).symlink_to(f"../../blobs/{i:064x}")
    assert list_tensors(snapshot)[0]["name"] == "lm_head.weight"
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(tmp_path / "models--o--m" / "refs")
    (tmp_path / "models--o--m" / "refs").write_text("{}")
    assert "is a link that leaves" in refusal(snapshot)


def test_directory_reached_by_a_link_is_read(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(checkpoint("llama"))
    assert list_tensors(tmp_path / "link")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_pipe_is_refused_without_waiting(name: str, tmp_path: Path) -> None:
    directory = copy_checkpoint(checkpoint("llama"), tmp_path / "model")
    (directory / name).unlink()
    os.mkfifo(directory / name)
    assert f"{directory / name}: is not a regular file" in refusal(directory)


def test_directory_as_a_file_is_refused(tmp_path: Path) -> None:
    directory = copy_checkpoint(checkpoint("llama"), tmp_path / "model")
    (directory / "config.json").unlink()
    (directory / "config.json").mkdir()
    assert "config.json: is not a regular file" in refusal(directory)


def test_path_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "which does not exist" in refusal(tmp_path / "absent", InvalidArgument)
    assert "which is not a directory" in refusal(tmp_path / "file", InvalidArgument)


def test_absent_config_is_named(tmp_path: Path) -> None:
    directory = copy_checkpoint(checkpoint("llama"), tmp_path / "model")
    (directory / "config.json").unlink()
    assert f"{directory / 'config.json'}: No such file or directory" in refusal(directory)


def test_directory_without_weights_says_what_was_found(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    message = refusal(tmp_path, NotSupported)
    assert "expected model.safetensors or model.safetensors.index.json" in message
    assert "found config.json" in message


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        *(
            ({"quant_method": method}, f"quantized by {method} are not .*'int8' or .* GGUF files")
            for method in ("torchao", "hqq", "spqr", "quip", "aqlm", "vptq", "higgs", "exl3")
        ),
        ({"quant_method": "x"}, 'quant_method: "x" is not supported .gptq, awq, .*'),
        ({}, "quant_method: says nothing"),
    ],
)
def test_a_quantized_checkpoint_is_refused_by_its_method_with_what_to_use(
    quantization: dict[str, object], message: str, tmp_path: Path
) -> None:
    directory = copy_checkpoint(checkpoint("llama"), tmp_path / "model")
    edit_config(directory, quantization_config=quantization)
    for make in (LLM, LLM.plan):
        with pytest.raises(NotSupported, match=message):
            make(directory)


class _Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, sentinel: Path) -> None:
        self._sentinel = sentinel

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self._sentinel), "w"))


def test_pickled_weights_are_refused_with_the_reason_and_never_run(tmp_path: Path) -> None:
    import pickle

    sentinel = tmp_path / "executed"
    directory = copy_checkpoint(checkpoint("llama"), tmp_path / "model")
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(_Payload(sentinel)))
    message = refusal(directory, NotSupported)
    assert "pytorch_model.bin, a pickle: reading one runs whatever code" in message
    assert "save_pretrained('converted')" in message
    assert not sentinel.exists()


def test_code_in_the_directory_is_not_run(tmp_path: Path) -> None:
    sentinel = tmp_path / "executed"
    directory = copy_checkpoint(checkpoint("llama"), tmp_path / "model")
    (directory / "modeling_evil.py").write_text(f"open({str(sentinel)!r}, 'w')")
    edit_config(directory, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    load(directory)
    assert not sentinel.exists()
