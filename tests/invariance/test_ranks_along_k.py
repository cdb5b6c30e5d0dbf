"""Ranks that cut along K: within a tolerance of one rank, or, as a tree, alike at any number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import FAMILIES, checkpoint
from gguf_files import in_format, write_gguf
from llmserve import LLM, InvalidArgument, NotSupported, RequestOutput, SamplingParams
from nodes import nodes
from test_family_invariance import PROMPTS, assert_company_changes_no_bit

SIZES = {"max_model_len": 112, "num_threads": 1, "num_gpu_blocks_override": 64}
# Grouped heads, experts, norms over all heads, latents, sinks, one KV head, biases on transposed
# weights, attention beside feed-forward.
DIFFERENT = ["llama", "mixtral", "olmo2", "deepseek_v3", "gpt_oss", "gpt_bigcode", "gpt2", "falcon"]
EVERY = sorted(FAMILIES)

# How far log-probabilities may be from those of one rank: docs/ranks.md. A sum of n parts of
# float32 is off by n 2^-24 of its magnitude. Where a layer rounds what it reads, to bfloat16 (2^-9)
# or to integers (1/254 of the largest), such a difference moves an element to the next number now
# and then. Of int8 each part of a row has a scale of its own: as far as int8 is from float32.
TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2, "int4-g32": 5e-2, "int8": 5e-1}
PARAMS = SamplingParams(
    max_tokens=12, temperature=0, ignore_eos=True, logprobs=5, prompt_logprobs=1
)


def weights(name: str) -> dict[str, Any]:
    return {"quantization": name} if name.startswith("int") else {"dtype": name}


def answers(path: Path, **options: Any) -> list[RequestOutput]:
    with LLM(path, **{**SIZES, **options}) as llm:
        return answered(llm)


def answered(llm: LLM) -> list[RequestOutput]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return llm.generate(prompts, PARAMS, use_tqdm=False)


def logprobs_of_prompt(output: RequestOutput) -> np.ndarray:
    assert output.prompt_logprobs is not None
    tokens = output.prompt_token_ids[1:]
    rows = output.prompt_logprobs[1:]
    return np.array(
        [row[token].logprob for token, row in zip(tokens, rows, strict=True) if row is not None]
    )


def assert_near(got: list[RequestOutput], one: list[RequestOutput], tolerance: float) -> None:
    """Where a greedy token is another one, it was nearly as likely on one rank."""
    for mine, whole in zip(got, one, strict=True):
        np.testing.assert_allclose(
            logprobs_of_prompt(mine), logprobs_of_prompt(whole), rtol=0, atol=tolerance
        )
        tokens, expected = mine.outputs[0].token_ids, whole.outputs[0].token_ids
        rows = whole.outputs[0].logprobs
        assert rows is not None
        for step, (token, other) in enumerate(zip(tokens, expected, strict=True)):
            if token == other:
                continue
            assert token in rows[step], f"token {step}: {token} and not {other}"
            assert rows[step][other].logprob - rows[step][token].logprob <= 2 * tolerance
            break


def assert_rows_are_near(path: Path, num_ranks: list[int], name: str, **options: Any) -> None:
    one = answers(path, **weights(name))
    for count in num_ranks:
        ranks = {"tensor_parallel_size": count, "tensor_parallel_cut": "rows", **options}
        assert_near(answers(path, **weights(name), **ranks), one, TOLERANCES[name])


def all_of(outputs: list[RequestOutput]) -> list[Any]:
    return [
        (output.outputs[0].token_ids, logprobs_of_prompt(output).tolist()) for output in outputs
    ]


def assert_a_tree_is_alike(path: Path, num_ranks: list[int], **options: Any) -> None:
    one = all_of(answers(path, tensor_parallel_cut="tree", **options))
    for count in num_ranks:
        ranks = {"tensor_parallel_size": count, "tensor_parallel_cut": "tree"}
        assert all_of(answers(path, **ranks, **options)) == one, f"{count} ranks"


def has(families: list[str]) -> list[str]:
    return [family for family in families if family in FAMILIES]


@pytest.mark.parametrize("family", has(DIFFERENT))
def test_two_ranks_that_cut_rows_are_near_one(family: str) -> None:
    assert_rows_are_near(checkpoint(family), [2], "float32")


@pytest.mark.parametrize("name", TOLERANCES)
def test_rows_of_every_kind_of_weights_are_near_one_rank(name: str) -> None:
    path = checkpoint("llama", hidden_size=128, intermediate_size=256)  # whole groups
    assert_rows_are_near(path, [2, 3], name)


@pytest.mark.parametrize("family", has(["mixtral", "deepseek_v3"]))
def test_whole_experts_that_are_added_up_are_near_one_rank(family: str) -> None:
    assert_rows_are_near(checkpoint(family), [2, 3], "float32", enable_expert_parallel=True)


@pytest.mark.parametrize("family", has(DIFFERENT))
def test_a_tree_is_alike_on_any_number_of_ranks(family: str) -> None:
    assert_a_tree_is_alike(checkpoint(family), [2, 3], dtype="float32")


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        ([2, 4, 5], {"dtype": "bfloat16"}),
        ([3, 8], {"quantization": "int8"}),
        ([2, 3], {"quantization": "int4-g32"}),
        ([4], {"quantization": "int4"}),
    ],
)
def test_a_tree_is_alike_in_every_kind_of_weights(
    num_ranks: list[int], options: dict[str, Any]
) -> None:
    path = checkpoint("llama", hidden_size=128, intermediate_size=256)
    assert_a_tree_is_alike(path, num_ranks, **options)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K"])
def test_blocks_of_a_gguf_file_stay_whole(kind: str, tmp_path: Path) -> None:
    source = checkpoint("llama", hidden_size=512, intermediate_size=1024, num_hidden_layers=1)
    path = write_gguf(tmp_path / "model.gguf", source, in_format(kind))
    assert_a_tree_is_alike(path, [2, 3])
    one = answers(path)
    ranks = {"tensor_parallel_size": 2, "tensor_parallel_cut": "rows"}
    assert_near(answers(path, **ranks), one, TOLERANCES["int4-g32"])


@pytest.mark.parametrize("cut", ["rows", "tree"])
def test_the_company_changes_no_bit_within_a_cut(cut: str) -> None:
    ranks = {"tensor_parallel_size": 2, "tensor_parallel_cut": cut}
    assert_company_changes_no_bit(checkpoint("llama"), dtype="float32", **ranks)


def test_a_tree_on_one_rank_is_another_sum_than_that_of_columns() -> None:
    path = checkpoint("llama")
    one = answers(path, dtype="float32")
    tree = answers(path, dtype="float32", tensor_parallel_cut="tree")
    assert all_of(tree) != all_of(one), "a tree's bits are its own"
    assert_near(tree, one, TOLERANCES["float32"])


@pytest.mark.parametrize(("num_nodes", "cut"), [(2, "rows"), (2, "tree"), (3, "tree")])
def test_nodes_have_the_bits_of_threads(num_nodes: int, cut: str) -> None:
    path = checkpoint("llama")
    ranks = {"tensor_parallel_size": num_nodes, "tensor_parallel_cut": cut, "dtype": "bfloat16"}
    threads = all_of(answers(path, **ranks))
    with nodes(path, num_nodes, **SIZES, **ranks) as shared, LLM(path, **shared) as llm:
        assert all_of(answered(llm)) == threads


# The last has experts that stand whole on ranks.
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen2_moe", {}),
        ("deepseek_v3", {}),
        ("glm4_moe", {}),
        ("qwen2_moe", {"enable_expert_parallel": True}),
    ],
    ids=str,
)
def test_a_layer_is_two_sums_whatever_its_experts(family: str, options: dict[str, Any]) -> None:
    """The expert that all tokens have is added up with the others."""
    path = checkpoint(family)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    num_layers = config["num_hidden_layers"]
    one = answers(path, dtype="float32")
    ranks = {"tensor_parallel_size": 2, "tensor_parallel_cut": "rows", "dtype": "float32"}
    with (
        nodes(path, 2, **SIZES, **ranks, **options) as shared,
        LLM(path, **shared) as llm,
    ):
        assert_near(answered(llm), one, TOLERANCES["float32"])
        trace = llm.trace()
        num_steps = sum(step.num_tokens > 0 for step in trace)
        sums = [record for record in trace.exchanges if record.name == "Sum over ranks"]
        assert len(sums) == 2 * num_layers * num_steps


def test_the_numerics_class_says_how_ranks_add_up() -> None:
    path = checkpoint("llama")

    def of(num_ranks: int, cut: str) -> str:
        ranks = {"tensor_parallel_size": num_ranks, "tensor_parallel_cut": cut}
        with LLM(path, **{**SIZES, **ranks}) as llm:
            return llm.numerics_class

    plain = of(1, "columns")
    assert of(2, "columns") == of(1, "rows") == plain
    assert of(3, "tree") == of(1, "tree")
    assert len({plain, of(1, "tree"), of(2, "rows"), of(3, "rows")}) == 4


def test_another_cut_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match="tensor_parallel_cut must be columns, rows or tree"):
        answers(checkpoint("llama"), tensor_parallel_cut="cols")


def test_experts_that_are_kept_balanced_are_not_added_up_by_ranks() -> None:
    with pytest.raises(NotSupported, match="enable_eplb with tensor_parallel_cut='rows'"):
        answers(
            checkpoint("mixtral"),
            tensor_parallel_size=2,
            tensor_parallel_cut="rows",
            enable_expert_parallel=True,
            enable_eplb=True,
        )


@pytest.mark.long
@pytest.mark.parametrize("family", EVERY)
def test_rows_of_every_architecture_are_near_one_rank(family: str) -> None:
    for name in ("float32", "bfloat16"):
        assert_rows_are_near(checkpoint(family), [2, 3, 4], name)


@pytest.mark.long
@pytest.mark.parametrize("family", EVERY)
def test_a_tree_is_alike_for_every_architecture(family: str) -> None:
    assert_a_tree_is_alike(checkpoint(family), [2, 3, 4, 5], dtype="float32")
    assert_a_tree_is_alike(checkpoint(family), [2, 3], dtype="bfloat16")
