"""What configs and files say of experts: what is wrong is named, in seconds, without a crash."""

from __future__ import annotations

import contextlib
import json
import random
import re
from pathlib import Path
from typing import Any

import gguf_files
import numpy as np
import pytest
from checkpoints import FAMILIES, checkpoint, copy_checkpoint, edit_config
from llmserve import LLM, SamplingParams
from llmserve.errors import CorruptFile, LLMServeError, NotSupported
from safetensors.numpy import load_file, save_file

BOUNDED: dict[str, Any] = {"num_gpu_blocks_override": 16, "max_model_len": 64, "num_threads": 1}
# How each spells how many experts there are, and how many a token is given.
SPELLINGS = {
    "deepseek_v2": ("n_routed_experts", "num_experts_per_tok"),
    "deepseek_v3": ("n_routed_experts", "num_experts_per_tok"),
    "dots1": ("n_routed_experts", "num_experts_per_tok"),
    "ernie4_5_moe": ("moe_num_experts", "moe_k"),
    "exaone_moe": ("num_experts", "num_experts_per_tok"),
    "flex_olmo": ("num_experts", "num_experts_per_tok"),
    "glm4_moe": ("n_routed_experts", "num_experts_per_tok"),
    "glm4_moe_lite": ("n_routed_experts", "num_experts_per_tok"),
    "gpt_oss": ("num_local_experts", "num_experts_per_tok"),
    "granitemoe": ("num_local_experts", "num_experts_per_tok"),
    "granitemoeshared": ("num_local_experts", "num_experts_per_tok"),
    "hunyuan_v1_moe": ("num_experts", "moe_topk"),
    "hy_v3": ("num_experts", "num_experts_per_tok"),
    "minimax_m2": ("num_local_experts", "num_experts_per_tok"),
    "mistral4": ("n_routed_experts", "num_experts_per_tok"),
    "mixtral": ("num_local_experts", "num_experts_per_tok"),
    "olmoe": ("num_experts", "num_experts_per_tok"),
    "phimoe": ("num_local_experts", "num_experts_per_tok"),
    "qwen2_moe": ("num_experts", "num_experts_per_tok"),
    "qwen3_moe": ("num_experts", "num_experts_per_tok"),
    "solar_open": ("n_routed_experts", "num_experts_per_tok"),
}
MOE_FAMILIES = tuple(SPELLINGS)


def test_every_family_with_experts_is_here() -> None:
    def has_experts(family: str) -> bool:
        config = json.loads((checkpoint(family) / "config.json").read_text())
        return any("experts_per_tok" in key or key in ("moe_k", "moe_topk") for key in config)

    assert {family for family in FAMILIES if has_experts(family)} == set(MOE_FAMILIES)


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_more_experts_a_token_than_there_are_and_none_at_all_are_named(
    family: str, tmp_path: Path
) -> None:
    path = copy_checkpoint(checkpoint(family), tmp_path / "model")
    count, top_k = SPELLINGS[family]
    edit_config(path, **{top_k: 7, "n_group": 1, "topk_group": 1})
    with pytest.raises((CorruptFile, NotSupported), match=f"{top_k}: expected"):
        LLM.plan(path, **BOUNDED)
    edit_config(path, **{top_k: 0})
    with pytest.raises((CorruptFile, NotSupported), match=f"{top_k}: expected"):
        LLM.plan(path, **BOUNDED)
    edit_config(path, **{top_k: 2, count: 0})
    with pytest.raises(CorruptFile, match=f"{count}: expected"):
        LLM.plan(path, **BOUNDED)


@pytest.mark.parametrize("family", MOE_FAMILIES)
@pytest.mark.parametrize("by", [-2, 2])
def test_other_counts_of_experts_than_the_file_has_are_named(
    family: str, by: int, tmp_path: Path
) -> None:
    """By the tensor that is absent, of another shape, or of nobody."""
    path = copy_checkpoint(checkpoint(family), tmp_path / "model")
    count, top_k = SPELLINGS[family]
    config = json.loads((path / "config.json").read_text())
    number = config.get(count, config.get("num_local_experts")) + by
    edit_config(path, **{count: number, top_k: 2, "n_group": 1, "topk_group": 1})
    with pytest.raises(
        (CorruptFile, NotSupported), match=r'"model\.layers\.\d.*(mlp|block_sparse_moe)\.'
    ):
        LLM(path, **BOUNDED)


@pytest.mark.parametrize(
    "family", ["deepseek_v2", "deepseek_v3", "dots1", "glm4_moe", "glm4_moe_lite", "mistral4"]
)
def test_groups_that_do_not_divide_the_experts_are_named(family: str, tmp_path: Path) -> None:
    path = copy_checkpoint(checkpoint(family), tmp_path / "model")
    for num_groups in (4, 5, 7):
        edit_config(path, n_group=num_groups)
        with pytest.raises(CorruptFile, match="n_group: expected a divisor of the 6 experts"):
            LLM.plan(path, **BOUNDED)
    edit_config(path, n_group=3, topk_group=4)
    with pytest.raises(CorruptFile, match="topk_group: expected an integer from 1 to 3"):
        LLM.plan(path, **BOUNDED)


@pytest.mark.parametrize("family", [f for f in MOE_FAMILIES if f in gguf_files.ARCHITECTURES])
def test_metadata_of_gguf_files_that_does_not_fit_their_experts_is_named(
    family: str, tmp_path: Path
) -> None:
    known = gguf_files.OVERRIDES.get(family, {})
    path = copy_checkpoint(checkpoint(family, **known), tmp_path / "model")
    fields = json.loads((path / "config.json").read_text())
    count, top_k = SPELLINGS[family]
    count = count if count in fields else "num_local_experts"
    cases = {
        "fewer": ({count: fields[count] - 1, top_k: 2}, r'"model\.layers\.\d.*mlp\.'),
        "more": ({count: fields[count] + 1, top_k: 2}, r'"model\.layers\.\d.*mlp\.'),
        "chosen": ({top_k: fields[count] + 1}, r"expected at most the|expected 2"),
        "none": ({top_k: 0}, r"expected"),
    }
    for name, (changes, match) in cases.items():
        one_group = {"n_group": 1, "topk_group": 1} if "n_group" in fields else {}
        edit_config(path, **fields | changes | one_group)
        file = gguf_files.write_gguf(tmp_path / f"{name}.gguf", path)
        with pytest.raises((CorruptFile, NotSupported), match=match):
            LLM(file, **BOUNDED)


# Families whose experts are one tensor of all: what a wrong one may look like.
FUSED = {
    "granitemoe": ("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
    "gpt_oss": ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    "mistral4": ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    "qwen3_vl_moe:qwen3_vl_moe_text": ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
}
WRONG = {
    "one expert less": lambda array: array[1:],
    "flat": lambda array: array.reshape(-1, array.shape[-1]),
    "a row less": lambda array: array[:, 1:],
    "a column less": lambda array: array[..., 1:],
    "turned": lambda array: array.swapaxes(1, 2),
    "empty": lambda array: array[:0],
}


@pytest.mark.parametrize("family", FUSED)
@pytest.mark.parametrize("wrong", WRONG)
def test_fused_experts_of_another_shape_are_named(family: str, wrong: str, tmp_path: Path) -> None:
    for name in FUSED[family]:
        path = copy_checkpoint(checkpoint(family), tmp_path / name)

        def damage(tensors: dict[str, np.ndarray], name: str = name) -> None:
            (whole,) = (key for key in tensors if key.endswith(f"layers.0.{name}"))
            assert tensors[whole].shape[1] != tensors[whole].shape[2]
            tensors[whole] = np.ascontiguousarray(WRONG[wrong](tensors[whole]))

        edit_tensors(path, damage)
        with pytest.raises(CorruptFile, match=rf"{re.escape(name)}.*expected"):
            LLM(path, **BOUNDED)


def edit_tensors(path: Path, edit: Any) -> None:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("family", "fields", "error", "match"),
    [
        (
            "mixtral",
            {"num_experts_per_tok": 6},
            CorruptFile,
            "num_experts_per_tok: .*at most the 5",
        ),
        ("mixtral", {"num_local_experts": 0}, CorruptFile, "num_local_experts: "),
        ("olmoe", {"num_experts": "many"}, CorruptFile, "num_experts: "),
        ("olmoe", {"clip_qkv": 8.0}, NotSupported, "clip_qkv: 8 is not supported"),
        ("qwen3_moe", {"moe_intermediate_size": -1}, CorruptFile, "moe_intermediate_size: "),
        ("qwen3_moe", {"mlp_only_layers": ["one"]}, CorruptFile, "mlp_only_layers"),
        ("glm4_moe", {"n_group": 4}, CorruptFile, "n_group: expected a divisor of the 6 experts"),
        ("glm4_moe", {"n_group": 6}, CorruptFile, "n_group: expected groups of at least 2"),
        ("dots1", {"topk_group": 4}, CorruptFile, "topk_group: "),
        ("dots1", {"topk_group": 1}, CorruptFile, "topk_group: .* at least the 3 experts"),
        ("phimoe", {"num_experts_per_tok": 3}, NotSupported, "num_experts_per_tok: expected 2"),
        ("hunyuan_v1_moe", {"moe_topk": [3, 2]}, NotSupported, "moe_topk: layers that differ"),
        ("qwen3", {"num_experts": 8}, NotSupported, "num_experts: got .* experts"),
    ],
)
def test_what_is_wrong_with_a_config_is_named(
    family: str, fields: dict[str, Any], error: type[Exception], match: str, tmp_path: Path
) -> None:
    path = copy_checkpoint(checkpoint(family), tmp_path / "model")
    edit_config(path, **fields)
    with pytest.raises(error, match=match):
        LLM.plan(path, **BOUNDED)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("DeepseekV32ForCausalLM", "indexer"),
        ("DeepseekV4ForCausalLM", "hyper-connections"),
        ("GlmMoeDsaForCausalLM", "indexer"),
        ("MiniMaxM3ForCausalLM", "indexer"),
        ("MiniMaxM3SparseForConditionalGeneration", "indexer"),
        ("KimiK3ForCausalLM", "linear"),
        ("KimiLinearForCausalLM", "linear"),
        ("Llama4ForConditionalGeneration", "chunks"),
    ],
)
def test_families_that_are_not_run_are_refused_with_the_reason(
    architecture: str, reason: str, tmp_path: Path
) -> None:
    path = copy_checkpoint(checkpoint("olmoe"), tmp_path / "model")
    edit_config(path, architectures=[architecture])
    with pytest.raises(NotSupported, match=rf'"{architecture}" is not supported: .*{reason}'):
        LLM(path)


def test_an_expert_that_is_missing_or_misshapen_is_named(tmp_path: Path) -> None:
    path = copy_checkpoint(checkpoint("olmoe"), tmp_path / "missing")
    name = "model.layers.1.mlp.experts.4.down_proj.weight"
    edit_tensors(path, lambda tensors: tensors.pop(name))
    with pytest.raises(CorruptFile, match=rf'the tensor "{name}" \[48, 80\] is absent'):
        LLM(path, **BOUNDED)
    path = copy_checkpoint(checkpoint("granitemoe"), tmp_path / "fused")
    fused = "model.layers.0.block_sparse_moe.input_linear.weight"
    edit_tensors(path, lambda t: t.update({fused: np.ascontiguousarray(t[fused].swapaxes(1, 2))}))
    with pytest.raises(CorruptFile, match=r"expected floats \[5, 64, 48\].* \[5, 48, 64\]"):
        LLM(path, **BOUNDED)
    path = copy_checkpoint(checkpoint("mixtral"), tmp_path / "nan")
    bad = "model.layers.0.block_sparse_moe.experts.2.w3.weight"

    def poison(tensors: dict[str, np.ndarray]) -> None:
        tensors[bad][3, 7] = np.nan

    edit_tensors(path, poison)
    with pytest.raises(CorruptFile, match=rf'"{bad}": element 151 of .* is NaN'):
        LLM(path, **BOUNDED)


def test_one_expert_more_than_the_config_says_is_refused(tmp_path: Path) -> None:
    path = copy_checkpoint(checkpoint("qwen3_moe"), tmp_path / "model")
    edit_config(path, num_experts=5, num_experts_per_tok=2)
    with pytest.raises(CorruptFile, match=r'mlp\.gate\.weight": expected floats \[5, 48\]'):
        LLM(path, **BOUNDED)


def test_layers_that_draft_are_passed_over(tmp_path: Path) -> None:
    path = copy_checkpoint(checkpoint("glm4_moe"), tmp_path / "model")
    expected = greedy(path)
    edit_config(path, num_nextn_predict_layers=1)
    extra = {
        "model.layers.2.eh_proj.weight": np.ones((48, 96), np.float32),
        "model.layers.2.mlp.experts.0.up_proj.weight": np.ones((32, 48), np.float32),
    }
    edit_tensors(path, lambda tensors: tensors.update(extra))
    assert greedy(path) == expected
    edit_config(path, num_nextn_predict_layers=0)
    with pytest.raises(NotSupported, match=r'"model\.layers\.2\.eh_proj\.weight" and 1 others'):
        LLM(path, **BOUNDED)


def greedy(path: Path) -> list[int]:
    with LLM(path, **BOUNDED) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, detokenize=False, ignore_eos=True)
        return list(llm.generate([[5, 9, 200]], params, use_tqdm=False)[0].outputs[0].token_ids)


def test_quantized_experts_keep_their_router_in_floats() -> None:
    groups = [
        {g.name: g.num_bytes for g in LLM.plan(path, **BOUNDED, **quantization).weights}
        for path in [checkpoint("olmoe", hidden_size=256, intermediate_size=256)]
        for quantization in ({"dtype": "float32"}, {"quantization": "int8"})
    ]
    assert groups[1]["experts"] < groups[0]["experts"] / 3
    assert groups[1]["mlp"] == groups[0]["mlp"]  # the routers


FUZZED = (
    *("expert", "moe", "group", "topk", "mlp_only", "mlp_layer_types", "dense", "routed", "sparse"),
    *("lora_rank", "qk_", "v_head_dim", "nextn", "shared_"),
)


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_mutated_configs_are_models_or_typed_errors(family: str, tmp_path: Path) -> None:
    rng = random.Random(family)
    source = json.loads((checkpoint(family) / "config.json").read_text())
    names = [name for name in source if any(part in name for part in FUZZED)]
    values = [None, 0, 1, 2, 3, 5, 7, -1, 2**40, 0.5, "x", [], [1], [2, 3], {}, True, 1e-9]
    assert len(names) > 1
    for _ in range(100):
        path = tmp_path / "config.json"
        mutated = dict(source)
        for name in rng.sample(names, rng.randint(1, min(3, len(names)))):
            mutated[name] = rng.choice(values)
        path.write_text(json.dumps(mutated))
        with contextlib.suppress(LLMServeError):
            LLM.plan(path, **BOUNDED)
