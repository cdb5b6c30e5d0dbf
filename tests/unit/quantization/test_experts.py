"""Models of experts: each is rounded by the tokens that came to it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import checkpoint
from llmserve import LLM, _core, demo_model_path
from llmserve.quantization import memory_bound, quantize
from llmserve.quantization.calibration_text import CalibrationText
from llmserve.quantization.calibrator import Calibrator
from llmserve.quantization.layer_plan import LayerPlan, LinearSource, plan_layer
from llmserve.quantization.tensor_files import TensorFolder
from llmserve.quantization.workers import Workers
from test_pipeline import written

TEXT = "Once upon a time there was a fox. The owl said: go to the river, and look at it! " * 60
PROMPT = "The owl said: look at the fox. Once upon a time there was a river, and go to it!"


def model_of(family: str, tmp_path: Path, **options: Any) -> Path:
    """With the demo's tokenizer."""
    model = tmp_path / family
    options = {"vocab_size": 2048, "max_position_embeddings": 512, **options}
    shutil.copytree(checkpoint(family, **options), model)
    shutil.copy(demo_model_path() / "tokenizer.json", model)
    return model


def run(model: Path, out: Path, text: str = TEXT, **options: Any) -> Any:
    path = out.with_suffix(".txt")
    path.write_text(text)
    defaults = {"scheme": "int4", "group_size": 16, "num_samples": 20, "max_length": 128}
    return quantize(
        model, out, calibration=path, report=False, use_tqdm=False, **{**defaults, **options}
    )


def plans_of(model: Path) -> list[LayerPlan]:
    runner = _core.LayerRunner(str(model))
    tensors = TensorFolder(model)
    shapes = {name: tensors.shape(name) for name in tensors}
    count = runner.config["num_layers"]
    return [plan_layer(i, runner.layer_names(i), shapes) for i in range(count)]


def stats_of(model: Path, layer: int, work: Path) -> tuple[LayerPlan, dict[str, Any], int]:
    work.mkdir()
    rng = np.random.default_rng(0)
    sequences = tuple(tuple(map(int, rng.integers(3, 2000, 90))) for _ in range(8))
    plans = plans_of(model)
    with Workers(1) as workers:
        calibrator = Calibrator(
            model, work, CalibrationText(sequences, "t"), workers=workers, next_layer=0,
            on_batch=lambda: None,
        )  # fmt: skip
        for plan in plans[:layer]:
            calibrator.advance(plan, None)
        stats, _, _ = calibrator.collect(plans[layer], has_moments=True, has_histogram=False)
        calibrator.close()
    return plans[layer], stats, 720


def test_every_token_is_seen_by_its_experts_and_no_other(tmp_path: Path) -> None:
    """The expert that all tokens have reads what the others do: k times it is their sum."""
    model = model_of("qwen2_moe", tmp_path, num_experts=5, num_experts_per_tok=2)
    plan, stats, num_tokens = stats_of(model, 1, tmp_path / "work")
    ups = [stats[f"experts.{i}.up"] for i in range(5)]
    assert sum(each.num_rows for each in ups) == 2 * num_tokens
    assert len({each.num_rows for each in ups}) > 1
    assert stats["shared_up"].num_rows == num_tokens
    total = np.sum([each.sum_magnitude for each in ups], axis=0)
    np.testing.assert_allclose(total, 2 * stats["shared_up"].sum_magnitude, rtol=1e-4)
    downs = [stats[f"experts.{i}.down"] for i in range(5)]
    assert [each.num_rows for each in downs] == [each.num_rows for each in ups]
    roles = {group.role: group for group in plan.groups}
    assert roles["shared_down"].source == LinearSource("model.layers.1.mlp.shared_expert.up_proj")
    assert roles["experts.3.down"].source == LinearSource("model.layers.1.mlp.experts.3.up_proj")
    assert roles["experts.3.up"].source is None  # the router reads it, too
    assert plan.kept == ("model.layers.1.mlp.gate", "model.layers.1.mlp.shared_expert_gate")


def logits(path: Path, token_ids: list[int]) -> np.ndarray:
    with LLM(str(path), dtype="float32", num_gpu_blocks_override=64) as llm:
        prompts = [{"prompt_token_ids": token_ids}]
        (output,) = llm.encode(prompts, pooling_task="token_logits", use_tqdm=False)
        return np.array(output.outputs.data)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe"])
def test_calibrated_experts_lose_less_and_load(family: str, tmp_path: Path) -> None:
    model = model_of(family, tmp_path)
    with LLM(str(model), num_gpu_blocks_override=64) as llm:
        token_ids = llm.get_tokenizer().encode(PROMPT)
    expected = logits(model, token_ids)
    lost = {}
    for method in ("rtn", "gptq", "awq"):
        result = run(model, tmp_path / method, method=method)
        got = logits(result.out, token_ids)
        lost[method] = np.square(got - expected).sum() / np.square(expected).sum()
        experts = [name for name in result.errors if ".experts." in name]
        plans = plans_of(model)
        assert len(experts) == sum(len(group.names) for p in plans for group in p.expert_groups)
        assert len(experts) >= 18
        assert result.peak_bytes <= result.planned_bytes
    assert lost["gptq"] < 0.8 * lost["rtn"]
    assert lost["awq"] < lost["rtn"]
    source = TensorFolder(model)
    tensors = written(tmp_path / "gptq")
    routers = [name for name in source if name.endswith(".gate.weight")]
    assert routers
    assert all(tensors[name][2] == source.raw(name).data.tobytes() for name in routers)


def test_experts_without_tokens_are_rounded_to_nearest_and_named(tmp_path: Path) -> None:
    model = model_of("olmoe", tmp_path, num_experts=24, num_experts_per_tok=1)
    result = run(model, tmp_path / "gptq", "The fox.", method="gptq")
    (note, *_) = [note for note in result.notes if "layers.0" in note]
    assert "of 24 experts no token came to" in note
    unseen = note.partition("no token came to ")[2].partition(";")[0].split(", ")
    assert any("fewer than 64 tokens came to" in note for note in result.notes)
    run(model, tmp_path / "rtn", method="rtn")
    nearest, calibrated = written(tmp_path / "rtn"), written(tmp_path / "gptq")
    name = "model.layers.0.mlp.experts.{}.down_proj.weight_packed"
    same = [str(i) for i in range(24) if nearest[name.format(i)] == calibrated[name.format(i)]]
    assert same == unseen


def test_experts_in_several_passes_have_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("mixtral", tmp_path)
    run(model, tmp_path / "once", method="awq")
    monkeypatch.setattr(memory_bound, "_MAX_EXPERT_BYTES", 80 * 80 * 4 * 3)
    parts = memory_bound.calibration_parts(
        plans_of(model)[0], TensorFolder(model), has_moments=True
    )
    assert [sorted({g.expert for g in part.expert_groups}) for part in parts] == [
        [0, 1],
        [2, 3],
        [4],
    ]
    assert sum((part.groups for part in parts), ()) == plans_of(model)[0].groups
    run(model, tmp_path / "passes", method="awq")
    assert written(tmp_path / "once") == written(tmp_path / "passes")


def test_bits_by_need_are_the_same_for_all_experts_of_a_layer(tmp_path: Path) -> None:
    """Engines take the experts of a layer as one matrix."""
    model = model_of("olmoe", tmp_path)
    result = run(model, tmp_path / "out", method="rtn", target_bits=7.0)
    kinds = [
        {scheme for name, scheme in result.schemes.items() if f"{i}.mlp.experts" in name}
        for i in range(2)
    ]
    assert set().union(*kinds) == {"int4", "int8"}
    downs = {result.schemes.get(f"model.layers.0.mlp.experts.{e}.down_proj") for e in range(5)}
    assert len(downs) == 1
    assert logits(result.out, [5, 6, 7]).shape == (3, 2048)


@pytest.mark.parametrize("family", ["granitemoe", "granitemoeshared"])
@pytest.mark.parametrize("scheme", ["int4", "int4-asym", "w8a8", "fp8"])
def test_experts_of_one_tensor_stay_together(family: str, scheme: str, tmp_path: Path) -> None:
    model = model_of(family, tmp_path)
    with LLM(str(model), num_gpu_blocks_override=64) as llm:
        token_ids = llm.get_tokenizer().encode(PROMPT)
    expected = logits(model, token_ids)
    group = {"group_size": 16} if scheme.startswith("int4") else {"group_size": None}
    limit = 0.05 if scheme.startswith("int4") else 0.002
    result = run(model, tmp_path / "out", scheme=scheme, method="auto", **group)
    got = logits(result.out, token_ids)
    assert np.square(got - expected).sum() < limit * np.square(expected).sum()
    tensors = written(tmp_path / "out")
    name = "model.layers.0.block_sparse_moe.input_linear"
    suffix = "weight_packed" if scheme.startswith("int4") else "weight"
    assert tensors[f"{name}.{suffix}"][1][0] == 5
    assert tensors[f"{name}.weight_scale"][1][:2] == [5, 64]
    assert not any("[" in key for key in tensors)
    experts = [key for key in result.errors if key.startswith(name)]
    assert len(experts) == 5
    assert result.bits_per_weight < 10


def test_a_part_of_experts_that_is_ignored_is_ignored_of_all(tmp_path: Path) -> None:
    model = model_of("granitemoe", tmp_path)
    run(model, tmp_path / "out", method="rtn", ignore=("lm_head", "output_linear"))
    tensors = written(tmp_path / "out")
    name = "model.layers.1.block_sparse_moe.output_linear"
    assert tensors[f"{name}.weight"][1] == [5, 48, 32]
    assert tensors[f"{name}.weight"][2] == TensorFolder(model).raw(f"{name}.weight").data.tobytes()
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["ignore"].count(name) == 1
    assert logits(tmp_path / "out", [5, 6, 7]).shape == (3, 2048)


def test_stored_in_out_experts_stay_floats_and_are_told(tmp_path: Path) -> None:
    model = model_of("gpt_oss", tmp_path)
    result = run(model, tmp_path / "out", method="rtn")
    assert any("experts.gate_up_proj: a tensor of 3 dimensions" in note for note in result.notes)
    assert logits(tmp_path / "out", [5, 6, 7]).shape == (3, 2048)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe"])
def test_transformers_loads_experts_and_says_the_same(family: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    import torch
    import transformers

    model = model_of(family, tmp_path)
    result = run(model, tmp_path / "out", method="gptq")
    token_ids = list(range(5, 40))
    with LLM(
        str(result.out), dtype="float32", quantization="none", num_gpu_blocks_override=64
    ) as llm:
        prompts = [{"prompt_token_ids": token_ids}]
        (output,) = llm.encode(prompts, pooling_task="token_logits", use_tqdm=False)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(result.out, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([token_ids])).logits[0].numpy()
    np.testing.assert_allclose(np.array(output.outputs.data), expected, atol=2e-4, rtol=1e-3)
