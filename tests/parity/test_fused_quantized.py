"""Experts that a checkpoint has quantized in one tensor for all of a layer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantized_files as files
from checkpoints import VOCAB_SIZE, checkpoint
from llmserve import LLM, SamplingParams, _core
from llmserve.errors import CorruptFile
from model_runner import PagedRunner

TOKENS = np.random.default_rng(0).integers(3, VOCAB_SIZE, 24).tolist()
SIZES = {"hidden_size": 96, "intermediate_size": 64, "head_dim": 16}
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCKS = {**FP8, "weight_block_size": [32, 32]}

# Family, configuration, writer, whether the floats are [X, K, N].
CASES: dict[str, tuple[str, dict[str, Any], Any, bool]] = {
    "mxfp4": ("gpt_oss", MXFP4, files.fused_mxfp4, True),
    "fp8-matrix": ("granitemoe", FP8, files.fused_fp8(), False),
    "fp8-row": ("granitemoe", FP8, files.fused_fp8(per_row=True), False),
    "fp8-block": ("granitemoe", BLOCKS, files.fused_fp8((32, 32)), False),
    "fp8-columns-row": ("gpt_oss", FP8, files.fused_fp8(per_row=True, transposed=True), True),
    "fp8-columns-block": ("gpt_oss", BLOCKS, files.fused_fp8((32, 32), transposed=True), True),
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, tuple[Path, Path]] = {}

    def pair(name: str) -> tuple[Path, Path]:
        if name not in made:
            family, config, write, transposed = CASES[name]
            made[name] = files.write_fused_pair(
                checkpoint(family, **SIZES),
                tmp_path_factory.mktemp(name),
                config,
                write,
                transposed=transposed,
            )
        return made[name]

    return pair


def logits(path: Path, **options: Any) -> np.ndarray:
    return PagedRunner(path, **{"device": "cpu", "dtype": "float32", **options}).run(TOKENS)


def rms(x: np.ndarray) -> float:
    return float(np.sqrt((x**2).mean()))


@pytest.mark.parametrize("name", CASES)
def test_expanded_experts_are_the_numbers_that_the_file_stands_for(pairs: Any, name: str) -> None:
    quantized, twin = pairs(name)
    assert np.array_equal(logits(quantized, quantization="none"), logits(twin))


@pytest.mark.parametrize("name", CASES)
def test_experts_run_in_their_own_bits(pairs: Any, name: str) -> None:
    quantized, twin = pairs(name)
    report = _core.inspect_checkpoint(str(quantized), dtype="float32")["plan"]
    plain = _core.inspect_checkpoint(str(twin), dtype="float32")["plan"]
    assert {use["runs"].split()[0] for use in report["quantized"]} == {"as"}
    # 5 experts of 2 layers, each with a gate, what it multiplies and a projection down, or with the
    # first two in one.
    assert sum(use["num_weights"] for use in report["quantized"]) in (30, 20)
    share = 4.25 / 32 if name == "mxfp4" else 8.0 / 32
    experts = report["group_bytes"]["experts"] / plain["group_bytes"]["experts"]
    assert share <= experts < 1.25 * share
    expected = logits(twin)
    # Of rows whose router chooses others when activations are rounded, the median knows nothing.
    assert np.median(np.abs(logits(quantized) - expected)) <= 0.03 * rms(expected)


def test_mxfp4_experts_give_the_tokens_of_transformers(pairs: Any) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    quantized, _ = pairs("mxfp4")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        quantized,
        dtype=torch.float32,
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    )
    steps = 48
    with torch.no_grad():
        expected = model.generate(
            torch.tensor([TOKENS]), max_new_tokens=steps, min_new_tokens=steps, do_sample=False
        )[0, len(TOKENS) :].tolist()
    params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True, detokenize=False)
    options = {"dtype": "float32", "quantization": "none", "num_gpu_blocks_override": 16}
    with LLM(quantized, **options, max_model_len=96) as llm:
        outputs = llm.generate([{"prompt_token_ids": TOKENS}], params, use_tqdm=False)
    assert list(outputs[0].outputs[0].token_ids) == expected


def test_one_hot_rows_come_from_their_expert_their_half_and_their_nibble(tmp_path: Path) -> None:
    """One weight of all is not zero: a gate in an odd row of the fused tensor would be the other
    half's, a high nibble the column beside."""
    import torch
    from safetensors.torch import load_file, save_file

    source = checkpoint("gpt_oss", **SIZES)
    quantized, twin = files.write_fused_pair(
        source, tmp_path, MXFP4, files.fused_mxfp4, transposed=True
    )
    name = "model.layers.0.mlp.experts.gate_up_proj"
    for row, column in ((0, 0), (1, 33), (127, 95), (62, 16)):
        tensors = load_file(quantized / "model.safetensors")
        blocks = torch.zeros_like(tensors[name + "_blocks"])
        blocks[2, row, column // 32, column % 32 // 2] = 7 << 4 * (column % 2)  # 6.0
        tensors[name + "_blocks"] = blocks
        tensors[name + "_scales"] = torch.full_like(tensors[name + "_scales"], 127)
        save_file(tensors, quantized / "model.safetensors")
        plain = load_file(twin / "model.safetensors")
        plain[name] = torch.zeros_like(plain[name])
        plain[name][2, column, row] = 6.0
        save_file(plain, twin / "model.safetensors")
        assert np.array_equal(logits(quantized, quantization="none"), logits(twin))


def test_experts_that_are_left_alone_are_floats(pairs: Any, tmp_path: Path) -> None:
    """The tensors of the first layer are plain, as modules_to_not_convert says."""
    from safetensors.torch import load_file, save_file

    quantized, twin = pairs("mxfp4")
    mixed = Path(shutil.copytree(quantized, tmp_path / "mixed"))
    tensors = load_file(quantized / "model.safetensors")
    plain = load_file(twin / "model.safetensors")
    skipped = "model.layers.0.mlp.experts"
    for name in [name for name in tensors if name.startswith(skipped)]:
        if name.endswith(("_blocks", "_scales")):
            del tensors[name]
    tensors |= {name: tensor for name, tensor in plain.items() if name.startswith(skipped)}
    save_file(tensors, mixed / "model.safetensors")
    config = json.loads((mixed / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"].append(skipped)
    (mixed / "config.json").write_text(json.dumps(config))
    assert np.array_equal(logits(mixed, quantization="none"), logits(twin))
    whole = _core.inspect_checkpoint(str(mixed), dtype="bfloat16")["plan"]
    assert sum(use["num_weights"] for use in whole["quantized"]) == 15
    request = _core.ConfigRequest(model=str(mixed / "config.json"), dtype="bfloat16")
    alone = _core.plan_memory(request).weights
    assert alone["group_bytes"]["experts"] == whole["group_bytes"]["experts"]


DAMAGES: list[tuple[str, str, Any, str]] = [
    ("mxfp4", "_blocks", lambda t: t[:-1], r"expected uint8 \[5, 128, 3, 16\]"),
    ("mxfp4", "_blocks", lambda t: t.flatten(2), r"expected uint8 \[5, 128, 3, 16\]"),
    ("mxfp4", "_blocks", lambda t: t.float(), "expected uint8"),
    ("mxfp4", "_scales", None, "absent"),
    ("mxfp4", "_scales", lambda t: t[:, 1:], r"expected uint8 \[5, 128, 3\]"),
    ("mxfp4", "_scales", lambda t: t.fill_(255), "NaN"),
    ("fp8-columns-row", "_scale", lambda t: t[1:], "expected one scale"),
    ("fp8-columns-block", "_scale_inv", lambda t: t[:, 1:], "expected one scale"),
    ("fp8-columns-row", "_scale", lambda t: t.fill_(float("inf")), "infinite"),
]


@pytest.mark.parametrize(("name", "suffix", "change", "message"), DAMAGES)
def test_what_does_not_fit_is_told_with_its_tensor(
    pairs: Any, tmp_path: Path, name: str, suffix: str, change: Any, message: str
) -> None:
    from safetensors.torch import load_file, save_file

    directory = Path(shutil.copytree(pairs(name)[0], tmp_path / name))
    tensors = load_file(directory / "model.safetensors")
    tensor = tensors.pop(f"model.layers.1.mlp.experts.gate_up_proj{suffix}")
    if change is not None:
        changed = change(tensor).contiguous()
        tensors[f"model.layers.1.mlp.experts.gate_up_proj{suffix}"] = changed
    save_file(tensors, directory / "model.safetensors")
    for quantization in (None, "none"):
        with pytest.raises(CorruptFile, match=message) as error:
            LLM(directory, num_gpu_blocks_override=64, quantization=quantization)
        assert "gate_up_proj" in str(error.value)


@pytest.mark.parametrize("name", ["mxfp4", "fp8-columns-block"])
def test_ref_and_company_give_the_same(pairs: Any, name: str) -> None:
    quantized, _ = pairs(name)
    alone = logits(quantized)
    expected = logits(quantized, device="ref")
    assert np.median(np.abs(alone - expected)) <= 0.01 * rms(expected)
    runner = PagedRunner(quantized, device="cpu", dtype="float32")
    first, other = runner.add_sequence(), runner.add_sequence()
    _, together = runner.step([(first, TOKENS), (other, TOKENS[::-1])])
    assert np.array_equal(together[: len(TOKENS)], alone)
