"""Steps in two halves over a wire: the bits of one batch, one half's exchanges beside the other."""

from __future__ import annotations

import json
import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from checkpoints import FAMILIES, checkpoint
from llmserve import LLM, DeviceError, NotSupported, SamplingParams
from nodes import Node, free_port, nodes
from slow_wire import SlowWire
from test_family_invariance import PROMPTS, run
from test_family_nodes import DIFFERENT, SIZES, alone

HALVES = {"enable_dbo": True, "dbo_prefill_token_threshold": 2}
EXPERTS = {"enable_expert_parallel": True}


def halves_of(llm: LLM) -> set[int]:
    return {exchange.half for exchange in llm.trace().exchanges}


def assert_halves_change_no_bit(
    path: Path, num_nodes: int, parallel: dict[str, Any], **options: Any
) -> None:
    given = {**SIZES, **HALVES, **options}
    with nodes(path, num_nodes, **parallel, **given) as shared, LLM(path, **shared) as llm:
        assert run(llm, list(range(len(PROMPTS)))) == alone(path, **options), parallel
        assert halves_of(llm) == {0, 1, 2}
        assert llm.get_metrics().num_rank_failures == 0


@pytest.mark.parametrize("family", [family for family in DIFFERENT if family in FAMILIES])
def test_halves_change_no_bit(family: str) -> None:
    assert_halves_change_no_bit(checkpoint(family), 2, {"tensor_parallel_size": 2}, dtype="float32")


@pytest.mark.parametrize(
    ("num_nodes", "parallel", "options"),
    [
        (3, {"tensor_parallel_size": 3}, {"dtype": "bfloat16", "num_threads": 4}),
        (2, {"tensor_parallel_size": 4}, {"quantization": "int8", "block_size": 8}),
        (2, {"tensor_parallel_size": 3}, {"quantization": "int4-g32"}),
        (
            2,
            {"tensor_parallel_size": 2},
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        ),
        (2, {"tensor_parallel_size": 2}, {"max_num_batched_tokens": 3, "max_num_seqs": 3}),
    ],
)
def test_ranks_of_any_number_and_format_change_no_bit_in_halves(
    num_nodes: int, parallel: dict[str, Any], options: dict[str, Any]
) -> None:
    path = checkpoint("llama", num_hidden_layers=3)
    assert_halves_change_no_bit(path, num_nodes, parallel, **options)


def test_experts_that_stand_whole_change_no_bit_in_halves() -> None:
    parallel = {"tensor_parallel_size": 2, **EXPERTS}
    assert_halves_change_no_bit(checkpoint("mixtral"), 2, parallel, dtype="float32")


def test_only_prompts_of_enough_tokens_run_in_halves() -> None:
    path = checkpoint("llama")
    given = {**SIZES, **HALVES, "dbo_prefill_token_threshold": 40, "tensor_parallel_size": 2}
    short = SamplingParams(max_tokens=8, ignore_eos=True)
    with nodes(path, 2, **given) as shared, LLM(path, **shared) as llm:
        llm.generate([{"prompt_token_ids": [3] * 39}], short, use_tqdm=False)
        assert halves_of(llm) == {0}
        llm.generate([{"prompt_token_ids": [4] * 40}], short, use_tqdm=False)
        assert halves_of(llm) == {0, 1, 2}


def test_memory_for_halves_is_planned() -> None:
    path = checkpoint("llama")
    given = {**SIZES, **HALVES, "tensor_parallel_size": 2}
    with nodes(path, 2, **given) as shared:
        plan = LLM.plan(path, **shared)
        with LLM(path, **shared) as llm:
            assert llm._open_engine().memory_use.workspace_bytes == plan.workspace_bytes
        assert (
            plan.workspace_bytes > LLM.plan(path, **{**shared, "enable_dbo": False}).workspace_bytes
        )


def test_one_half_computes_while_the_other_is_on_the_wire(tmp_path: Path) -> None:
    path = checkpoint("mixtral")
    given = {**SIZES, **HALVES, **EXPERTS, "tensor_parallel_size": 2, "nnodes": 2}
    given["master_port"] = free_port()
    wire = SlowWire(given["master_port"], delay_s=0.01)
    other = Node(path, {**given, "node_rank": 1, "master_port": wire.port})
    try:
        with LLM(path, **given) as llm:
            llm.generate(
                [{"prompt_token_ids": PROMPTS[0]}], SamplingParams(max_tokens=1), use_tqdm=False
            )
            first, second = (
                [e for e in llm.trace().exchanges if e.half == half] for half in (1, 2)
            )
            llm.trace().to_perfetto(tmp_path / "trace.json")
    finally:
        other.stop()
        wire.close()
    # One half's exchange ends, and its next begins, all while the other's is under way.
    assert any(
        whole.start_us < before.start_us + before.duration_us
        and after.start_us < whole.start_us + whole.duration_us
        for whole in first
        for before, after in pairwise(second)
    )
    names = {exchange.name for exchange in first}
    assert names == {"Gather of columns", "All-to-all communication"}
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tracks = {e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 3}
    assert tracks >= {"exchanges of half 1", "exchanges of half 2"}
    assert {e["name"] for e in events if e["ph"] == "X" and e["pid"] == 3} == names


@pytest.mark.parametrize("num_bytes", [2_000, 30_000, 70_000])
def test_a_wire_that_breaks_within_halves_costs_no_token(num_bytes: int) -> None:
    path = checkpoint("llama")
    prompts = [{"prompt_token_ids": [(7 * i + j) % 250 + 3 for i in range(90)]} for j in range(4)]
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, logprobs=1)

    def results(llm: LLM) -> list[Any]:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]

    with LLM(path, **SIZES) as llm:
        expected = results(llm)
    given = {**SIZES, **HALVES, "tensor_parallel_size": 2, "nnodes": 2, "master_port": free_port()}
    wire = SlowWire(given["master_port"])
    other = Node(path, {**given, "node_rank": 1, "master_port": wire.port})
    try:
        with LLM(path, **given) as llm:
            wire.cut_after(num_bytes)
            assert results(llm) == expected
            assert llm.get_metrics().num_rank_failures == 1
            assert halves_of(llm) >= {1, 2}
    finally:
        other.stop()
        wire.close()


def test_without_a_wire_it_changes_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, "llmserve"),
        LLM(checkpoint("llama"), **SIZES, **HALVES, tensor_parallel_size=2) as llm,
    ):
        llm.generate([{"prompt_token_ids": PROMPTS[0]}], use_tqdm=False)
        assert llm.trace().exchanges == []
    said = [record.message for record in caplog.records if "enable_dbo" in record.message]
    assert said == ["enable_dbo=True changes nothing with nnodes=1: no wire is to be hidden"]


def test_what_halves_cannot_do_is_refused_by_name() -> None:
    path = checkpoint("llama")
    with pytest.raises(NotSupported, match="enable_dbo with nnodes=2 and pipeline_parallel_si"):
        LLM(path, **SIZES, **HALVES, nnodes=2, pipeline_parallel_size=2)
    with pytest.raises(NotSupported, match="dbo_decode_token_threshold=16 is not supported"):
        LLM(path, **SIZES, **HALVES, dbo_decode_token_threshold=16)


def test_nodes_that_differ_in_it_are_refused() -> None:
    path = checkpoint("llama")
    given = {**SIZES, "tensor_parallel_size": 2, "nnodes": 2, "master_port": free_port()}
    other = Node(path, {**given, **HALVES, "node_rank": 1})
    try:
        with pytest.raises(DeviceError, match="enable_dbo is 1 there and 0 here"):
            LLM(path, **given, distributed_timeout_seconds=1)
    finally:
        other.stop()
