"""A pipeline has the bits of one rank: stages of any layers, with ranks that share each or not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import FAMILIES, checkpoint
from gguf_files import in_format, write_gguf
from llmserve import LLM, InvalidArgument, SamplingParams, _core
from llmserve import _core_testing as testing
from test_family_invariance import PROMPTS, run
from test_invariance import Result

# Of every kind of layer: experts, latent attention, windows, sinks, learned positions, layers that
# differ within a model.
DIFFERENT = (
    *("cohere2", "deepseek_v3", "gemma3_text", "glm4_moe", "gpt2", "gpt_oss", "llama"),
    *("minicpm3", "mixtral", "olmo2", "phi3", "qwen3_moe"),
)
STAGED = [family for family in DIFFERENT if family in FAMILIES]


def results(path: Path | str, **options: Any) -> list[Result]:
    """In chunks, and the second half of the prompts from the cache of the first."""
    defaults = {"max_model_len": 112, "num_threads": 1, "num_gpu_blocks_override": 64}
    defaults |= {"max_num_batched_tokens": 50, "max_num_seqs": 4}
    with LLM(path, **{**defaults, **options}) as llm:
        return run(llm, list(range(len(PROMPTS))))


def assert_no_bit_changes(path: Path | str, *parallel: dict[str, Any], **options: Any) -> None:
    one = results(path, **options)
    for sizes in parallel:
        assert results(path, **sizes, **options) == one, sizes


def stages(count: int, **others: Any) -> dict[str, Any]:
    return {"pipeline_parallel_size": count, **others}


@pytest.mark.parametrize("family", STAGED)
def test_two_stages_change_no_bit(family: str) -> None:
    assert_no_bit_changes(checkpoint(family), stages(2), dtype="float32")


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_stages_of_every_architecture_change_no_bit(family: str) -> None:
    path = checkpoint(family, num_hidden_layers=4)
    assert_no_bit_changes(path, stages(2), stages(3), stages(4), dtype="float32")
    assert_no_bit_changes(path, stages(2, tensor_parallel_size=2), dtype="bfloat16")


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gpt_oss"])
def test_stages_of_several_ranks_change_no_bit(family: str) -> None:
    path = checkpoint(family, num_hidden_layers=4)
    ways = [stages(3, tensor_parallel_size=2), stages(2, data_parallel_size=2)]
    assert_no_bit_changes(path, *ways, dtype="float32")


@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "int4"},
        {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
        {"speculative_config": {"method": "ngram"}},
    ],
    ids=str,
)
def test_stages_change_no_bit_beside_other_options(options: dict[str, Any]) -> None:
    path = checkpoint("llama", hidden_size=128, intermediate_size=256, num_hidden_layers=3)
    assert_no_bit_changes(path, stages(2), stages(3), **options)


def test_stages_of_a_gguf_file_and_of_packed_weights_change_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = checkpoint("llama", hidden_size=256, intermediate_size=256, num_hidden_layers=2)
    path = write_gguf(tmp_path / "model.gguf", source, in_format("Q4_K"))
    assert_no_bit_changes(path, stages(2))
    one = results(source, quantization="int8")
    for _ in range(2):  # written, then read
        assert results(source, quantization="int8", packed_cache_bytes=2**30, **stages(2)) == one


def test_hidden_states_and_sleep_are_those_of_one_rank() -> None:
    def outcome(**options: Any) -> list[Any]:
        with LLM(checkpoint("llama"), dtype="float32", max_model_len=64, **options) as llm:
            prompts = [{"prompt_token_ids": [3, 4, 5, 6, 7]}]
            params = SamplingParams(max_tokens=5, temperature=0, prompt_logprobs=1)
            first = np.asarray(llm.encode(prompts)[0].outputs.data).tolist()
            before = llm.generate(prompts, params, use_tqdm=False)[0]
            llm.sleep(level=2)
            llm.wake_up()
            after = llm.generate(prompts, params, use_tqdm=False)[0]
            assert before.outputs[0].token_ids == after.outputs[0].token_ids
            return [first, before.outputs[0].token_ids, before.prompt_logprobs]

    assert outcome(pipeline_parallel_size=2) == outcome()


def test_expert_loads_are_of_all_stages() -> None:
    loads = []
    for size in (1, 2):
        with LLM(
            checkpoint("mixtral"),
            dtype="float32",
            max_model_len=64,
            count_expert_loads=True,
            pipeline_parallel_size=size,
        ) as llm:
            params = SamplingParams(max_tokens=4, temperature=0)
            llm.generate([{"prompt_token_ids": [3, 4, 5, 6, 7]}], params, use_tqdm=False)
            loads.append(llm.expert_loads())
    assert loads[0] == loads[1]
    assert len(loads[0]) == 2


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "mixtral", "gemma3_text"])
@pytest.mark.parametrize("sizes", [stages(2), stages(3, tensor_parallel_size=2)], ids=str)
def test_the_plan_of_stages_is_what_they_allocate(family: str, sizes: dict[str, Any]) -> None:
    path = checkpoint(family, num_hidden_layers=4)
    arguments: dict[str, Any] = {"max_model_len": 100, "max_num_seqs": 4, "num_threads": 2}
    arguments |= {"num_gpu_blocks_override": 40, "dtype": "bfloat16", **sizes}
    plan = LLM.plan(path, **arguments)
    assert plan.refusal is None
    ranks = plan.ranks
    assert len(ranks) == sizes["pipeline_parallel_size"] * sizes.get("tensor_parallel_size", 1)
    assert sum(rank.weight_bytes for rank in ranks) == plan.weight_bytes
    assert sum(rank.kv_cache_bytes for rank in ranks) == plan.kv_cache_bytes
    assert sum(rank.workspace_bytes for rank in ranks) == plan.workspace_bytes
    first, last = ranks[-1].layers, ranks[0].layers
    assert first is not None
    assert last is not None
    assert first[0] == 0
    assert last[1] == 4
    assert f"layers 0 to {first[1] - 1}" in str(plan)
    before = _core.host_allocations().num_bytes
    with LLM(path, **arguments) as llm:
        use = llm.get_memory_use()
        measured = _core.host_allocations().num_bytes - before
        llm.generate([{"prompt_token_ids": [7] * 90}], SamplingParams(max_tokens=5), use_tqdm=False)
        assert _core.host_allocations().num_bytes - before == measured  # no step takes more
    assert use.weight_bytes == plan.weight_bytes
    assert use.workspace_bytes == plan.workspace_bytes
    assert use.kv_cache_bytes == plan.kv_cache_bytes


def test_layers_are_split_by_what_a_token_reads_of_them() -> None:
    """A head of as many weights as several layers leaves its stage fewer of those."""
    path = checkpoint("llama", num_hidden_layers=8, vocab_size=2048)
    plan = LLM.plan(path, pipeline_parallel_size=2, max_model_len=64, num_gpu_blocks_override=16)
    first, last = plan.ranks[1], plan.ranks[0]
    assert first.layers is not None
    assert last.layers is not None
    assert first.layers == (0, last.layers[0])
    assert last.layers[1] == 8
    assert first.layers[1] > 4


@pytest.mark.parametrize("fault", ["throw", "leave", "hang"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stage_that_fails_loses_no_token(
    monkeypatch: pytest.MonkeyPatch, rank: int, fault: str
) -> None:
    path = checkpoint("llama")
    expected = results(path, dtype="float32")
    timeout_s = 2.0 if fault == "hang" else 60

    def engine(
        loading: _core.LoadingModel, vocabulary: _core.Vocabulary | None = None
    ) -> _core.Engine:
        faults = testing.RankFaultOptions(
            rank=rank, fault=fault, fail_at_exchange=5, timeout_s=timeout_s
        )
        return testing.faulty_engine(loading.config, vocabulary=vocabulary, rank_faults=faults)

    monkeypatch.setattr(_core, "Engine", engine)
    begin = time.monotonic()
    options: dict[str, Any] = {"max_model_len": 112, "num_threads": 1, "dtype": "float32"}
    options |= {"num_gpu_blocks_override": 64, "max_num_batched_tokens": 50, "max_num_seqs": 4}
    with LLM(path, pipeline_parallel_size=2, **options) as llm:
        assert run(llm, list(range(len(PROMPTS)))) == expected
        assert llm.get_metrics().num_rank_failures == 1
    assert time.monotonic() - begin < 30


def test_what_a_pipeline_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="pipeline_parallel_size=3: the model has 2 layers"):
        results(checkpoint("llama"), pipeline_parallel_size=3)
