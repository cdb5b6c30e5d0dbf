"""LLMEngine: requests go in one by one, steps give what came of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llmserve import (
    LLM,
    EngineArgs,
    InvalidArgument,
    LLMEngine,
    NotSupported,
    PoolingParams,
    QueueFull,
    RequestOutputKind,
    SamplingParams,
)
from offline import GREEDY, LONG, generate, tokens

PROMPTS = [[5, 6, 7], [8, 9], [10]]


@pytest.fixture
def engine(llm: LLM) -> Iterator[LLMEngine]:
    yield llm.llm_engine
    assert not llm.llm_engine.has_unfinished_requests()


def run(engine: LLMEngine) -> dict[str, list[Any]]:
    """What each request gave, step by step."""
    given: dict[str, list[Any]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            given.setdefault(output.request_id, []).append(output)
    return given


def test_requests_give_what_generate_gives(engine: LLMEngine, llm: LLM) -> None:
    for idx, prompt in enumerate(PROMPTS):
        engine.add_request(f"r{idx}", prompt, GREEDY)
    assert engine.get_num_unfinished_requests() == 3
    given = run(engine)
    last = [given[f"r{idx}"][-1] for idx in range(3)]
    assert all(output.finished for output in last)
    assert tokens(last) == tokens(generate(llm, PROMPTS))
    assert engine.step() == []


def test_output_kind_says_what_a_step_gives(engine: LLMEngine) -> None:
    engine.add_request("delta", [5], GREEDY.clone(output_kind=RequestOutputKind.DELTA))
    engine.add_request("final", [5], GREEDY.clone(output_kind=RequestOutputKind.FINAL_ONLY))
    engine.add_request("whole", [5], GREEDY)
    given = run(engine)
    assert len(given["final"]) == 1
    deltas = [token for output in given["delta"] for token in output.outputs[0].token_ids]
    assert deltas == given["final"][0].outputs[0].token_ids
    assert deltas == given["whole"][-1].outputs[0].token_ids


def test_an_aborted_request_gives_nothing_more(engine: LLMEngine) -> None:
    engine.add_request("long", [5], LONG)
    engine.add_request("short", [5], GREEDY)
    engine.abort_request(["long", "nobody"])
    assert engine.get_num_unfinished_requests() == 1
    assert set(run(engine)) == {"short"}
    engine.add_request("long", [5], GREEDY)  # its name is free again
    engine.abort_request("long")


def test_hidden_states_are_asked_for_by_pooling_params(engine: LLMEngine, llm: LLM) -> None:
    engine.add_request("e", [5, 6], PoolingParams())
    engine.add_request("t", [5, 6], PoolingParams(task="token_embed"))
    given = run(engine)
    (expected,) = llm.embed([[5, 6]], use_tqdm=False)
    assert list(given["e"][0].outputs.data.__array__()) == expected.outputs.embedding
    assert given["t"][0].outputs.data.shape[0] == 2


def test_a_bad_request_is_refused_and_nothing_runs(engine: LLMEngine) -> None:
    engine.add_request("a", [5], GREEDY)
    with pytest.raises(InvalidArgument, match="request_id 'a' is running; use another"):
        engine.add_request("a", [5], GREEDY)
    with pytest.raises(InvalidArgument, match="add_request takes one prompt, got 2"):
        engine.add_request("b", [[5], [6]], GREEDY)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="request_id is empty"):
        engine.add_request("", [5], GREEDY)
    with pytest.raises(NotSupported, match="add_request: lora_request='x' is not supported"):
        engine.add_request("b", [5], GREEDY, lora_request="x")  # type: ignore[arg-type]
    assert set(run(engine)) == {"a"}


def test_a_full_queue_is_said(checkpoint: Path) -> None:
    args = EngineArgs(str(checkpoint), max_num_seqs=1, max_num_queued_reqs=1, max_model_len=256)
    engine = LLMEngine.from_engine_args(args)

    def add_many() -> None:
        for idx in range(20):
            engine.add_request(str(idx), [5], LONG)

    with pytest.raises(QueueFull):
        add_many()
    engine.abort_request([str(idx) for idx in range(20)])
    assert not engine.has_unfinished_requests()


def test_what_vllm_asks_of_an_engine_is_there(llm: LLM) -> None:
    engine = llm.llm_engine
    assert engine.model_config.max_model_len == llm.max_model_len
    assert engine.get_model_config().get_vocab_size() == engine.model_config.vocab_size
    assert engine.vllm_config.cache_config.num_gpu_blocks > 0
    assert engine.vllm_config.scheduler_config.max_num_seqs == llm.max_num_seqs
    assert engine.get_tokenizer() is engine.tokenizer is llm.get_tokenizer()
    assert not engine.errored
    engine.check_health()
    assert engine.reset_prefix_cache()
    engine.sleep()
    assert engine.is_sleeping()
    engine.wake_up()
    for call in (engine.collective_rpc, llm.collective_rpc):
        with pytest.raises(NotSupported, match="there are no worker processes"):
            call("method")
    for call in (engine.apply_model, llm.apply_model):
        with pytest.raises(NotSupported, match=r"the model is C\+\+ and no torch module"):
            call(print)


METHODS = ["generate", "chat", "embed", "encode", "beam_search", "enqueue"]


@pytest.mark.parametrize("name", METHODS)
def test_help_shows_what_a_method_takes(name: str) -> None:
    kinds = {
        parameter.kind for parameter in inspect.signature(getattr(LLM, name)).parameters.values()
    }
    assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}


def test_a_closed_engine_says_so(checkpoint: Path) -> None:
    llm = LLM(checkpoint, kv_cache_memory_bytes=2**22)
    engine = llm.llm_engine
    engine.add_request("a", [5], LONG)
    llm.close()
    for call in (engine.step, lambda: engine.add_request("b", [5], GREEDY)):
        with pytest.raises(InvalidArgument, match="this LLM is closed"):
            call()
    assert engine.errored


def test_no_prompts_have_no_outputs(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2)
    assert llm.generate([], params) == llm.chat([], params) == llm.embed([]) == []
    assert llm.encode([]) == llm.enqueue([], params) == llm.generate(()) == []


def test_token_ids_have_an_older_name(llm: LLM) -> None:
    expected = tokens(generate(llm, PROMPTS))
    outputs = llm.generate(prompt_token_ids=PROMPTS, sampling_params=GREEDY, use_tqdm=False)
    assert tokens(outputs) == expected
    with pytest.raises(InvalidArgument, match="generate has prompts and prompt_token_ids; give on"):
        llm.generate(PROMPTS, prompt_token_ids=PROMPTS)
    with pytest.raises(InvalidArgument, match="prompts must be a string"):
        llm.generate()


def test_pooling_keeps_so_many_tokens_of_each_prompt(llm: LLM) -> None:
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    kept = llm.embed(prompts, truncate_prompt_tokens=2, use_tqdm=False)
    assert [output.prompt_token_ids for output in kept] == [[7, 8], [10, 11]]
    each = [PoolingParams(dimensions=3), PoolingParams(dimensions=4)]
    kept = llm.embed(prompts, each, truncate_prompt_tokens=1, use_tqdm=False)
    assert [len(output.outputs.embedding) for output in kept] == [3, 4]
    (hidden,) = llm.encode([prompts[0]], truncate_prompt_tokens=3, use_tqdm=False)
    assert hidden.prompt_token_ids == [6, 7, 8]
    with pytest.raises(InvalidArgument, match="must be PoolingParams, got 3"):
        llm.embed(prompts, 3, truncate_prompt_tokens=1)  # type: ignore[arg-type]


def test_parameters_may_change_while_requests_run(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    llm.enqueue([[5], [6]], params)
    params.max_tokens = 2
    llm.enqueue([[7]], params)
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [len(ids) for ids in tokens(outputs)] == [6, 6, 2]
    params.top_p = 7.0
    with pytest.raises(InvalidArgument, match=r"sampling_params\[0\]: top_p must be in"):
        generate(llm, [[5]], params)
    defaults = llm.get_default_sampling_params()
    defaults.max_tokens = 1
    assert llm.get_default_sampling_params().max_tokens != 1


def test_a_bar_of_ones_own_counts_the_requests(llm: LLM) -> None:
    seen: list[int] = []

    class Bar:
        def __init__(self, total: int, **_: object) -> None:
            self.total = total

        def set_postfix_str(self, *_: object, **__: object) -> None:
            pass

        def update(self, count: int) -> None:
            seen.append(count)

        def close(self) -> None:
            seen.append(self.total)

    llm.generate(PROMPTS, GREEDY, use_tqdm=Bar)
    assert seen == [1, 1, 1, 3]
    with pytest.raises(InvalidArgument, match="use_tqdm must be True or False, got 3"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=3)  # type: ignore[arg-type]
