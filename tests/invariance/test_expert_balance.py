"""Wherever experts run among ranks, and whoever runs their rows: the bits are those of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import FAMILIES, checkpoint
from gguf_files import in_format, write_gguf
from llmserve import LLM, InvalidArgument, NotSupported, SamplingParams, _core
from llmserve import _core_testing as testing
from llmserve.plan import load_balance
from test_family_invariance import PROMPTS, run
from test_family_ranks import EXPERTS
from test_invariance import Result

# Experts are placed anew every other step, and copied, and their rows are split.
OFTEN = {"step_interval": 2, "window_size": 2, "num_redundant_experts": 2, "capacity_factor": 1.0}
# Rows are many enough to be more than a copy's room.
LONG = [{"prompt_token_ids": [(7 * i + 3 * j) % 250 for i in range(60)]} for j in range(4)]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)


def results(path: Path | str, num_ranks: int, **options: Any) -> list[Result]:
    defaults = {"max_model_len": 112, "num_threads": 1, "num_gpu_blocks_override": 64}
    with LLM(
        path,
        tensor_parallel_size=num_ranks,
        max_num_batched_tokens=50,
        max_num_seqs=4,
        **{**defaults, **options},
    ) as llm:
        return run(llm, list(range(len(PROMPTS))))


def balanced(config: dict[str, Any]) -> dict[str, Any]:
    return {"enable_expert_parallel": True, "enable_eplb": True, "eplb_config": config}


@pytest.mark.parametrize("family", sorted(set(EXPERTS) & set(FAMILIES)))
def test_experts_that_move_and_are_split_change_no_bit(family: str) -> None:
    path = checkpoint(family)
    one = results(path, 1, dtype="float32")
    assert results(path, 3, dtype="float32", **balanced(OFTEN)) == one


def long_outputs(path: Path | str, num_ranks: int, **options: Any) -> tuple[Any, Any]:
    """Tokens and log-probabilities; and rows of each rank."""
    with LLM(
        path,
        tensor_parallel_size=num_ranks,
        max_model_len=80,
        max_num_batched_tokens=256,
        num_threads=1,
        enable_prefix_caching=False,
        **options,
    ) as llm:
        outputs = llm.generate(LONG, PARAMS, use_tqdm=False)
        given = [(out.outputs[0].token_ids, out.outputs[0].logprobs) for out in outputs]
        return given, llm.expert_rank_rows()


@pytest.mark.parametrize(
    ("num_ranks", "config"),
    [
        (2, {"step_interval": 0, "capacity_factor": 1.0}),
        (2, {"step_interval": 3, "window_size": 1, "capacity_factor": None}),
        (3, {"step_interval": 1, "window_size": 1, "capacity_factor": 1.5}),
        (4, {**OFTEN, "num_redundant_experts": 9}),
        (5, OFTEN),
    ],
)
def test_any_placement_and_factor_has_the_bits_of_one_rank(
    num_ranks: int, config: dict[str, Any]
) -> None:
    for dtype in ("float32", "bfloat16"):
        path = checkpoint("qwen2_moe")
        one, _ = long_outputs(path, 1, dtype=dtype)
        several, rows = long_outputs(path, num_ranks, dtype=dtype, **balanced(config))
        assert several == one
        num_tokens = 4 * (60 + 5)
        for counts in rows.values():
            assert len(counts) == num_ranks
            assert sum(counts) % num_tokens == 0  # k rows a token, none left out


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_experts_change_no_bit_where_they_move(quantization: str) -> None:
    path = checkpoint("mixtral", hidden_size=128, intermediate_size=128)
    one, _ = long_outputs(path, 1, quantization=quantization)
    several, _ = long_outputs(path, 3, quantization=quantization, **balanced(OFTEN))
    assert several == one


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0"])
def test_experts_of_a_gguf_file_change_no_bit_where_they_move(kind: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
    source = checkpoint("olmoe", **sizes)
    path = write_gguf(tmp_path / "model.gguf", source, in_format(kind))
    one, _ = long_outputs(path, 1)
    several, _ = long_outputs(path, 2, **balanced(OFTEN))
    assert several == one


def test_biases_and_interleaved_experts_go_where_their_expert_goes() -> None:
    path = checkpoint("gpt_oss")
    one, _ = long_outputs(path, 1)
    several, _ = long_outputs(path, 4, **balanced(OFTEN))
    assert several == one


def test_stages_and_replicas_balance_their_own_experts() -> None:
    path = checkpoint("olmoe", num_hidden_layers=2)
    one, _ = long_outputs(path, 1)
    staged, rows = long_outputs(path, 2, pipeline_parallel_size=2, **balanced(OFTEN))
    assert staged == one
    assert list(rows) == [0, 1]
    replicated, rows = long_outputs(path, 2, data_parallel_size=2, **balanced(OFTEN))
    assert replicated == one
    assert list(rows) == [0, 1]


def test_a_factor_evens_ranks_out_whose_experts_are_asked_for_unevenly() -> None:
    path = checkpoint("qwen2_moe")
    _, plain = long_outputs(path, 3, **balanced({"step_interval": 0, "capacity_factor": None}))
    _, even = long_outputs(path, 3, **balanced({"step_interval": 0, "capacity_factor": 1.0}))
    before = [load_balance(rows) for rows in plain.values()]
    after = [load_balance(rows) for rows in even.values()]
    assert sum(after) < sum(before)


# Before experts have been placed anew, and after it.
@pytest.mark.parametrize("at", [2, 9, 16, 31])
@pytest.mark.parametrize(("rank", "fault"), [(0, "throw"), (1, "leave"), (2, "throw")])
def test_a_rank_that_fails_costs_no_token_where_experts_move(
    monkeypatch: pytest.MonkeyPatch, rank: int, fault: str, at: int
) -> None:
    path = checkpoint("olmoe", num_hidden_layers=2)
    one, _ = long_outputs(path, 1)

    def engine(loading: _core.LoadingModel, vocabulary: Any = None, *_: Any) -> _core.Engine:
        faults = testing.RankFaultOptions(rank=rank, fault=fault, fail_at_exchange=at)
        return testing.faulty_engine(loading.config, vocabulary=vocabulary, rank_faults=faults)

    monkeypatch.setattr(_core, "Engine", engine)
    options = {"max_model_len": 80, "max_num_batched_tokens": 256, "num_threads": 1}
    with LLM(path, tensor_parallel_size=3, **options, **balanced(OFTEN)) as llm:
        for _ in range(2):  # with a cached prefix, too
            outputs = llm.generate(LONG, PARAMS, use_tqdm=False)
            found = [(out.outputs[0].token_ids, out.outputs[0].logprobs) for out in outputs]
            assert found == one
        assert llm.get_metrics().num_rank_failures == 1
        assert all(min(rows) > 0 for rows in llm.expert_rank_rows().values())


def test_weights_that_are_loaded_anew_are_found_again() -> None:
    path = checkpoint("olmoe")
    options = {"max_model_len": 80, "num_threads": 1, "tensor_parallel_size": 2}
    with LLM(path, **options, **balanced(OFTEN)) as llm:
        first = llm.generate(LONG, PARAMS, use_tqdm=False)
        llm.sleep(2)
        llm.wake_up()
        again = llm.generate(LONG, PARAMS, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in first]


def test_what_cannot_be_balanced_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match="enable_eplb: no experts stand whole on ranks"):
        LLM(checkpoint("olmoe"), enable_eplb=True)
    with pytest.raises(InvalidArgument, match="eplb_config takes effect with enable_eplb=True"):
        LLM(checkpoint("olmoe"), eplb_config={})
    ranks = {"tensor_parallel_size": 2, "num_threads": 1}
    with pytest.raises(NotSupported, match="enable_eplb with nnodes=2"):
        LLM(checkpoint("olmoe"), nnodes=2, **ranks, **balanced({}))
    with pytest.raises(NotSupported, match=r"enable_eplb: Llama.* has no experts"):
        LLM(checkpoint("llama"), **ranks, **balanced({}))
    for config, message in (
        ({"window_size": 5, "step_interval": 4}, "window_size: expected at most step_interval, 4"),
        ({"num_redundant_experts": 99}, "num_redundant_experts: expected at most "),
        ({"num_redundant_experts": 1, "step_interval": 0}, "expected a step_interval above 0"),
        ({"capacity_factor": 0.5}, r"capacity_factor: expected at least 1, got 0\.5"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            LLM(checkpoint("olmoe"), **ranks, **balanced(config))
