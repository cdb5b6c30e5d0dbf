"""Tensors against the config: what is absent, mis-shaped or not finite is named."""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import FAMILIES, checkpoint, copy_checkpoint, edit_config
from llmserve import LLM, _core, _core_testing
from llmserve.errors import CorruptFile, InvalidArgument, NotSupported
from safetensors.numpy import load_file, save_file
from safetensors_files import safetensors_bytes


def load(path: str | Path) -> Any:
    return _core_testing.Model(str(path))


def refusal(path: str | Path, error: type[Exception] = CorruptFile) -> str:
    with pytest.raises(error) as caught:
        load(path)
    return str(caught.value)


_DAMAGED = "model.layers.1.self_attn.k_proj.weight"


def _damaged(tmp_path: Path, change: Any, **overrides: Any) -> Path:
    directory = copy_checkpoint(checkpoint("llama", **overrides), tmp_path / "model")
    arrays = load_file(directory / "model.safetensors")
    change(arrays)
    save_file(arrays, directory / "model.safetensors")
    return directory


def test_absent_tensor_is_named_with_its_shape(tmp_path: Path) -> None:
    message = refusal(_damaged(tmp_path, lambda arrays: arrays.pop(_DAMAGED)))
    assert f'the tensor "{_DAMAGED}" [24, 48] is absent from the checkpoint' in message
    assert "which has 20 tensors" in message


def test_wrong_shape_is_named_with_both(tmp_path: Path) -> None:
    def change(arrays: dict[str, np.ndarray]) -> None:
        arrays[_DAMAGED] = np.zeros((24, 47), np.float32)

    message = refusal(_damaged(tmp_path, change))
    assert f'model.safetensors: tensor "{_DAMAGED}": expected floats' in message
    assert "[24, 48], as config.json has it, got float32 [24, 47]" in message


def test_wrong_dtype_is_named_with_both(tmp_path: Path) -> None:
    def change(arrays: dict[str, np.ndarray]) -> None:
        arrays[_DAMAGED] = arrays[_DAMAGED].astype(np.int8)

    assert "got int8 [24, 48]" in refusal(_damaged(tmp_path, change))


def test_tensor_of_five_dimensions_is_a_wrong_shape(tmp_path: Path) -> None:
    def change(arrays: dict[str, np.ndarray]) -> None:
        arrays[_DAMAGED] = arrays[_DAMAGED].reshape(24, 48, 1, 1, 1)

    assert "got float32 [24, 48, 1, 1, 1]" in refusal(_damaged(tmp_path, change))


@pytest.mark.parametrize(
    "name",
    [_DAMAGED, "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"],
)
@pytest.mark.parametrize(("value", "word"), [(np.nan, "NaN"), (np.inf, "infinite")])
def test_non_finite_weight_is_named(name: str, value: float, word: str, tmp_path: Path) -> None:
    def change(arrays: dict[str, np.ndarray]) -> None:
        arrays[name].reshape(-1)[5] = value

    message = refusal(_damaged(tmp_path, change))
    assert f'tensor "{name}": element 5 of float32 [' in message
    assert f"is {word}; weights must be finite" in message


def test_config_of_another_model_is_refused_by_tensor(tmp_path: Path) -> None:
    directory = copy_checkpoint(checkpoint("llama"), tmp_path / "model")
    edit_config(directory, hidden_size=64, head_dim=16)
    message = refusal(directory)
    assert 'tensor "model.embed_tokens.weight"' in message
    assert "[320, 64], as config.json has it, got float32 [320, 48]" in message


def test_tensors_that_no_layer_takes_are_listed_and_refused(tmp_path: Path) -> None:
    def change(arrays: dict[str, np.ndarray]) -> None:
        arrays["extra.weight"] = np.zeros(3, np.float32)
        arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(3, np.float32)
        arrays["model.mtp_linear_proj.weight"] = np.zeros(3, np.float32)

    path = _damaged(tmp_path, change)
    assert _core.inspect_checkpoint(str(path))["plan"]["unused_tensors"] == ["extra.weight"]
    message = refusal(path, NotSupported)
    assert 'tensor "extra.weight": no layer of this model uses it' in message
    with pytest.raises(NotSupported, match=r"extra\.weight"):
        LLM(path)


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_that_the_config_leaves_out_is_refused(family: str, tmp_path: Path) -> None:
    directory = copy_checkpoint(checkpoint(family), tmp_path / "model")
    arrays = load_file(directory / "model.safetensors")
    more = {re.sub(r"\.1\.", ".97.", name, count=1): array for name, array in arrays.items()}
    assert len(more.keys() - arrays.keys()) > 4
    save_file({**arrays, **more}, directory / "model.safetensors")
    assert re.search(r'tensor ".*\.97\..*" and \d+ others', refusal(directory, NotSupported))


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("gpt2", "h.0.attn.masked_bias"),
        ("gpt_bigcode", "transformer.h.0.attn.bias"),
        ("gptj", "transformer.h.0.attn.bias"),
        ("gpt_neo", "transformer.h.0.attn.attention.bias"),
        ("gpt_neox", "gpt_neox.layers.0.attention.masked_bias"),
        ("opt", "model.decoder.version"),
    ],
)
def test_buffers_of_older_exports_are_skipped_where_they_belong(
    family: str, name: str, tmp_path: Path
) -> None:
    for source, is_skipped in ((family, True), ("llama", False)):
        directory = copy_checkpoint(checkpoint(source), tmp_path / source)
        arrays = load_file(directory / "model.safetensors")
        save_file({**arrays, name: np.ones(1, np.float32)}, directory / "model.safetensors")
        if is_skipped:
            load(directory)
        else:
            assert name in refusal(directory, NotSupported)


def test_tied_checkpoint_may_carry_a_copy_of_the_head(tmp_path: Path) -> None:
    def change(arrays: dict[str, np.ndarray]) -> None:
        arrays["lm_head.weight"] = np.full((320, 48), np.nan, np.float32)

    model = load(_damaged(tmp_path, change, tie_word_embeddings=True))
    assert model.weights()["unused_tensors"] == []


def test_unaligned_tensors_load_to_the_same_bits(tmp_path: Path) -> None:
    # The format lets a header have any length, so that floats may begin at odd bytes.
    from model_runner import PagedRunner

    directory = copy_checkpoint(checkpoint("llama"), tmp_path / "model")
    contents = (directory / "model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", contents)
    header = contents[8 : 8 + length].rstrip()
    header += b" " * (1 - (len(header) % 4))
    assert len(header) % 4 in (1, 2, 3)
    (directory / "model.safetensors").write_bytes(safetensors_bytes(header, contents[8 + length :]))
    tokens = list(range(3, 40))
    want = PagedRunner(checkpoint("llama")).run(tokens)
    assert np.array_equal(want, PagedRunner(directory).run(tokens))


def test_inspect_reports_format_config_tensors_and_plan() -> None:
    path = checkpoint("qwen3", dtype="bfloat16")
    report = _core.inspect_checkpoint(str(path), device="ref")
    assert report["format"] == "safetensors"
    assert report["config"]["architecture"] == "Qwen3ForCausalLM"
    assert report["plan"]["dtype"] == "bfloat16"
    assert report["num_files"] == 1
    assert report["file_bytes"] == (path / "model.safetensors").stat().st_size
    assert len(report["tensors"]) == 25
    # Two layers of two KV heads of 16 keys and 16 values in two bytes each.
    assert report["plan"]["kv_bytes_per_token"] == 2 * 2 * 32 * 2


def test_inspect_refuses_unknown_settings_by_name() -> None:
    path = str(checkpoint("llama"))
    with pytest.raises(InvalidArgument, match=r"^dtype: expected auto, float32 or bfloat16"):
        _core.inspect_checkpoint(path, device="ref", dtype="float8")
    with pytest.raises(NotSupported, match=r"^kv_cache_dtype must be auto, .* or fp8"):
        _core.inspect_checkpoint(path, device="ref", kv_cache_dtype="float8")
    with pytest.raises(InvalidArgument, match="max_tokens and max_logit_rows: expected at least"):
        _core.inspect_checkpoint(path, device="ref", max_tokens=0)
    with pytest.raises(NotSupported, match="ref"):
        _core.inspect_checkpoint(path, device="tpu")


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("tie_word_embeddings", [False, True])
def test_weights_are_resident_once(tie_word_embeddings: bool) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}
    path = str(checkpoint("llama", tie_word_embeddings=tie_word_embeddings, **sizes))
    before = _resident_bytes()
    model = load(path)
    grown = _resident_bytes() - before
    weights = model.weights()["total_bytes"]
    # Half as much again would mean that half of the file stayed mapped in beside the packed copy.
    assert weights > 50e6
    assert grown < 1.25 * weights
    del model
    assert _resident_bytes() - before < 0.1 * weights
