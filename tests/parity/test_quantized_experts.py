"""Experts that are quantized each in tensors of its own, beside what else such models quantize."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantized_files as files
from checkpoints import VOCAB_SIZE, checkpoint
from llmserve import _core
from model_runner import PagedRunner
from quantized_files import Layout, write_pair

TOKENS = np.random.default_rng(0).integers(3, VOCAB_SIZE, 24).tolist()
SIZES: dict[str, dict[str, Any]] = {
    "mixtral": {"hidden_size": 64, "intermediate_size": 128},
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 96},
    "deepseek_v3": {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 96},
}
LAYOUTS: dict[str, Layout] = {
    "gptq": files.gptq(4, 32, symmetric=False),
    "gptq-act-order": files.gptq(4, 32, shuffled=True),
    "awq": files.awq(32),
    "ct-packed": files.packed(4, 32),
    "ct-w8a8": files.int_quantized(),
    "fp8-block": files.fp8((32, 32)),
    "nvfp4": files.nvfp4(modelopt=True),
    "bnb-nf4": files.bitsandbytes_4bit(),
}
CASES = [("mixtral", name) for name in LAYOUTS]
CASES += [("qwen3_moe", "fp8-block"), ("qwen3_moe", "gptq"), ("qwen3_moe", "nvfp4")]
CASES += [("deepseek_v3", "fp8-block"), ("deepseek_v3", "ct-packed")]


def is_quantized(module: str) -> bool:
    """Every linear layer but routers and heads."""
    last = module.rsplit(".", 1)[-1]
    return "proj" in last or last in ("w1", "w2", "w3")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[tuple[str, str], tuple[Path, Path]] = {}

    def pair(family: str, name: str) -> tuple[Path, Path]:
        if (family, name) not in made:
            made[family, name] = write_pair(
                checkpoint(family, **SIZES[family]),
                tmp_path_factory.mktemp(f"{family}-{name}"),
                LAYOUTS[name],
                quantizes=is_quantized,
            )
        return made[family, name]

    return pair


def logits(path: Path, **options: Any) -> np.ndarray:
    return PagedRunner(path, **{"device": "cpu", "dtype": "float32", **options}).run(TOKENS)


def rms(x: np.ndarray) -> float:
    return float(np.sqrt((x**2).mean()))


@pytest.mark.parametrize(("family", "name"), CASES)
def test_expanded_models_are_what_the_file_stands_for(pairs: Any, family: str, name: str) -> None:
    quantized, twin = pairs(family, name)
    assert np.array_equal(logits(quantized, quantization="none"), logits(twin))


@pytest.mark.parametrize(("family", "name"), CASES)
def test_experts_run_in_their_own_bits(pairs: Any, family: str, name: str) -> None:
    quantized, twin = pairs(family, name)
    report = _core.inspect_checkpoint(str(quantized), dtype="float32")["plan"]
    plain = _core.inspect_checkpoint(str(twin), dtype="float32")["plan"]
    share = report["group_bytes"]["experts"] / plain["group_bytes"]["experts"]
    assert share < (0.4 if "8" in name else 0.25)
    expected = logits(twin)
    got = logits(quantized)
    # Where another expert is chosen a row differs in all; the typical one does not.
    assert np.median(np.abs(got - expected)) <= 0.05 * rms(expected)
    on_ref = logits(quantized, device="ref")
    assert np.median(np.abs(got - on_ref)) <= 0.01 * rms(expected)


@pytest.mark.parametrize("name", ["gptq-act-order", "nvfp4", "fp8-block"])
def test_a_sequence_has_the_same_bits_beside_another(pairs: Any, name: str) -> None:
    path, _ = pairs("mixtral", name)
    runner = PagedRunner(path, device="cpu", dtype="float32")
    first, other = runner.add_sequence(), runner.add_sequence()
    _, together = runner.step([(first, TOKENS), (other, TOKENS[::-1])])
    assert np.array_equal(together[: len(TOKENS)], logits(path))
