"""Where models of experts and of latent attention are known to go wrong, each by a model.

Of ops alone: equal scores, sinks over several spans, a gate that is clamped on one side, and rows
of an expert in any number stand in test_experts_op.py, test_ops.py, test_ref_ops.py and
test_grouped_linear.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import FAMILIES, VOCAB_SIZE, checkpoint, copy_checkpoint, edit_config
from llmserve import LLM, SamplingParams
from model_runner import PagedRunner
from safetensors.numpy import load_file, save_file
from test_models import LOGPROB_TOLERANCE, _log_softmax, _reference_logprobs

TOKENS = np.random.default_rng(3).integers(3, VOCAB_SIZE, 40).tolist()
Tensors = dict[str, np.ndarray]


def edited(source: Path, folder: Path, edit: Callable[[str, np.ndarray], np.ndarray]) -> Path:
    """A copy whose tensors are what `edit` makes of each."""
    path = copy_checkpoint(source, folder)
    tensors = load_file(path / "model.safetensors")
    made = {name: np.ascontiguousarray(edit(name, array)) for name, array in tensors.items()}
    save_file(made, path / "model.safetensors", metadata={"format": "pt"})
    return path


def logits(path: Path, tokens: list[int] = TOKENS) -> np.ndarray:
    chunks = [512] * (len(tokens) // 512)
    return PagedRunner(path, device="cpu", num_blocks=80).run(tokens, chunks)


def check_against_transformers(path: Path, tokens: list[int] = TOKENS) -> None:
    difference = np.abs(_log_softmax(logits(path, tokens)) - _reference_logprobs(path, tokens))
    assert difference.max() < LOGPROB_TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_no_tensor_of_a_tiny_checkpoint_is_neutral(family: str) -> None:
    """Biases of 0, norms of 1 and sinks without weight would hide that they are left out."""
    tensors = load_file(checkpoint(family) / "model.safetensors")
    for name, array in tensors.items():
        assert array.std() > 0.02, name
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            assert array.std() > 0.1, name


# What all router rows alike make of scores: the lower experts, whatever the rule.
@pytest.mark.parametrize(
    ("family", "num_chosen"),
    [
        *(("olmoe", 3), ("gpt_oss", 3), ("phimoe", 2), ("glm4_moe", 3), ("deepseek_v2", 3)),
        *(("ernie4_5_moe", 2), ("minimax_m2", 3), ("hy_v3", 3), ("exaone_moe", 3)),
    ],
)
def test_equal_scores_are_the_lower_experts(family: str, num_chosen: int, tmp_path: Path) -> None:
    def make_equal(name: str, array: np.ndarray) -> np.ndarray:
        if name.endswith(("correction_bias", "expert_bias")):
            return np.zeros_like(array)
        is_router = any(part in name for part in (".gate.", ".router."))
        return np.broadcast_to(array[:1], array.shape) if is_router else array

    path = edited(checkpoint(family), tmp_path / "model", make_equal)
    params = SamplingParams(temperature=0, max_tokens=2, detokenize=False, ignore_eos=True)
    options: dict[str, Any] = {"num_gpu_blocks_override": 32, "num_threads": 1}
    with LLM(path, count_expert_loads=True, **options) as llm:
        llm.generate([TOKENS], params, use_tqdm=False)
        loads = llm.expert_loads()
    assert loads
    for rows in loads.values():
        assert rows == [len(TOKENS) + 1] * num_chosen + [0] * (len(rows) - num_chosen)


# What an absent norm_topk_prob stands for, as in published files that leave it out. FlexOlmo norms
# what experts give, by which the sum of their weights does not count.
@pytest.mark.parametrize(
    ("family", "absent"),
    [
        *(("qwen2_moe", False), ("qwen3_moe", False), ("olmoe", False), ("dots1", False)),
        *(
            ("exaone_moe", True),
            ("glm4_moe", True),
            ("glm4_moe_lite", True),
            ("deepseek_v3", True),
            ("mistral4", True),
        ),
    ],
)
def test_an_absent_norm_topk_prob_is_what_transformers_takes_for_it(
    family: str, absent: bool, tmp_path: Path
) -> None:
    given = {value: checkpoint(family, norm_topk_prob=value) for value in (False, True)}
    path = copy_checkpoint(given[absent], tmp_path / "model")
    edit_config(path, remove=("norm_topk_prob",))
    rows = logits(path)
    np.testing.assert_array_equal(rows, logits(given[absent]))
    other = copy_checkpoint(path, tmp_path / "other")
    edit_config(other, norm_topk_prob=not absent)
    assert np.abs(rows - logits(other)).max() > 0.1
    check_against_transformers(path)


def test_the_weights_of_deepseek_v2_are_not_normalised_whatever_its_config_says() -> None:
    check_against_transformers(checkpoint("deepseek_v2", norm_topk_prob=True))


_LITE_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("deepseek_v2", {"q_lora_rank": None, "topk_method": "greedy"}),
        ("deepseek_v2", {}),
        ("deepseek_v3", {"q_lora_rank": None, "num_attention_heads": 3, "num_key_value_heads": 3}),
        ("glm4_moe_lite", {}),
        ("minicpm3", {}),
    ],
)
def test_scores_over_stretched_positions_are_scaled_twice_by_mscale(
    family: str, fields: dict[str, Any]
) -> None:
    """(0.1 mscale_all_dim ln 40 + 1)^2, beside cosines whose factor is 1; inner norms' own eps."""
    path = checkpoint(family, rope_parameters=_LITE_ROPE, **fields)
    assert json.loads((path / "config.json").read_text())["rms_norm_eps"] == 1e-2
    check_against_transformers(path)


def test_sinks_count_once_over_a_prompt_of_several_spans() -> None:
    path = checkpoint("gpt_oss", max_position_embeddings=2048, layer_types=["full_attention"])
    check_against_transformers(path, (TOKENS * 28)[:1100])


def test_gates_are_clamped_above_and_the_others_on_both_sides(tmp_path: Path) -> None:
    """Gates and the others reach 20 on either side, where they are 7 at most."""

    def widen(name: str, array: np.ndarray) -> np.ndarray:
        return 12 * array if "experts.gate_up_proj" in name else array

    check_against_transformers(edited(checkpoint("gpt_oss"), tmp_path / "model", widen))


@pytest.mark.parametrize(
    ("family", "field"),
    [
        ("deepseek_v3", "num_nextn_predict_layers"),
        ("glm4_moe", "num_nextn_predict_layers"),
        ("glm4_moe_lite", "num_nextn_predict_layers"),
        ("hy_v3", "num_nextn_predict_layers"),
        ("exaone_moe", ""),
        ("minimax_m2", ""),
        ("ernie4_5_moe", ""),
        ("qwen3_moe", ""),
    ],
)
def test_layers_that_draft_change_nothing(family: str, field: str, tmp_path: Path) -> None:
    """One more layer, or tensors of a module of their own."""
    path = copy_checkpoint(checkpoint(family), tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.startswith("model.layers.1.")]:
        more = name.replace("layers.1.", "layers.2.") if field else f"mtp.{name[6:]}"
        tensors[more] = tensors[name]
    tensors["model.layers.2.eh_proj.weight" if field else "mtp.fc.weight"] = np.ones(
        (48, 96), np.float32
    )
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    if field:
        edit_config(path, **{field: 1})
    np.testing.assert_array_equal(logits(path), logits(checkpoint(family)))
