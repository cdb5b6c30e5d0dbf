"""GGUF files whose blocks have a scale beside them, a number of each matrix, as converters write it
for NVFP4."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import VOCAB_SIZE, checkpoint
from gguf_files import Quantize, in_format, quantized, write_gguf
from llmserve import LLM, CorruptFile, NotSupported
from model_runner import PagedRunner
from parity.test_gguf_models import dequantized_copy
from safetensors.numpy import load_file, save_file

WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
TOKENS = np.random.default_rng(0).integers(3, VOCAB_SIZE, 24).tolist()
FACTORS = {"attn_q": 1.7, "attn_k": 0.6, "attn_v": 1.3, "ffn_up": 0.3, "ffn_down": 2.9}
NAMES = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj"}
NAMES |= {"ffn_up": "up_proj", "ffn_down": "down_proj"}


def logits(path: Path, **options: Any) -> np.ndarray:
    return PagedRunner(path, **{"device": "cpu", "dtype": "float32", **options}).run(TOKENS)


def rms(x: np.ndarray) -> float:
    return float(np.sqrt((x**2).mean()))


def scaled_copy(source: Path, to: Path, quantize: Quantize, factor_of: Mapping[str, float]) -> Path:
    """What the blocks stand for, times the factor of the first part that a name has."""
    copy = dequantized_copy(source, to, quantize)
    tensors = load_file(copy / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".weight")]:
        factor = next((f for part, f in factor_of.items() if part in name), 1.0)
        tensors[name] = tensors[name] * np.float32(factor)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def test_scales_beside_nvfp4_multiply(tmp_path: Path) -> None:
    source = checkpoint("qwen2", **WIDE)
    quantize = in_format("NVFP4")
    scales = {f"blk.0.{name}.scale": np.float32([f]) for name, f in FACTORS.items()}
    scales["blk.0.ffn_up.input_scale"] = np.float32([0.5])
    path = write_gguf(tmp_path / "model.gguf", source, quantize, tensors=scales)
    factors = {NAMES[name]: factor for name, factor in FACTORS.items()}
    twin = scaled_copy(source, tmp_path / "copy", quantize, factors)
    expected = logits(twin)
    assert np.array_equal(logits(path, quantization="none"), expected)
    # In their own bits, on ref, too.
    plan = LLM.plan(path, num_gpu_blocks_override=32)
    assert plan.integers == ("NVFP4",)
    assert any("scales of activations" in note for note in plan.notes)
    got = logits(path)
    assert rms(got - expected) < 0.05 * rms(expected)
    assert np.median(np.abs(got - logits(path, device="ref"))) < 0.01 * rms(expected)


def test_rounded_to_bfloat16_once(tmp_path: Path) -> None:
    source = checkpoint("qwen2", **WIDE)
    scales = {f"blk.0.{name}.scale": np.float32([f]) for name, f in FACTORS.items()}
    path = write_gguf(tmp_path / "model.gguf", source, in_format("NVFP4"), tensors=scales)
    factors = {NAMES[name]: factor for name, factor in FACTORS.items()}
    twin = scaled_copy(source, tmp_path / "copy", in_format("NVFP4"), factors)
    got = logits(path, dtype="bfloat16", quantization="none")
    assert np.array_equal(got, logits(twin, dtype="bfloat16"))


def test_each_expert_has_its_own_scale(tmp_path: Path) -> None:
    """Of Q8_0, which has no place for one: the weights are expanded."""
    source = checkpoint("mixtral", **WIDE)
    num_experts = json.loads((source / "config.json").read_text())["num_local_experts"]
    down = np.float32(0.5 + np.arange(num_experts) / 3)
    path = write_gguf(
        tmp_path / "model.gguf",
        source,
        quantized("Q8_0"),
        tensors={"blk.0.ffn_down_exps.scale": down},
    )
    factors = {f"experts.{i}.w2.": float(factor) for i, factor in enumerate(down)}
    twin = scaled_copy(source, tmp_path / "copy", quantized("Q8_0"), factors)
    assert np.array_equal(logits(path, quantization="none"), logits(twin))
    error = logits(path) - logits(twin)
    assert np.median(np.abs(error)) < 0.02 * rms(logits(twin))


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (np.float32([1, 2]), r"q_proj.scale\": expected 1 of float32, got float32 \[2\]"),
        (np.float16([1]), r"q_proj.scale\": expected 1 of float32, got float16 \[1\]"),
        (np.float32([np.nan]), "element 0 is NaN"),
        (np.float32([np.inf]), "element 0 is infinite"),
    ],
)
def test_a_scale_that_is_none_is_told(scale: np.ndarray, message: str, tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "model.gguf",
        checkpoint("llama", **WIDE),
        in_format("NVFP4"),
        tensors={"blk.0.attn_q.scale": scale},
    )
    with pytest.raises(CorruptFile, match=message):
        LLM(path, num_gpu_blocks_override=32)


def test_a_scale_of_what_is_no_block_is_not_passed_over(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "model.gguf",
        checkpoint("llama", **WIDE),
        tensors={"blk.0.attn_q.scale": np.float32([2])},
    )
    with pytest.raises(NotSupported, match=r"q_proj\.scale"):
        LLM(path, num_gpu_blocks_override=32)
