"""The runner of steps without an engine: empty steps, wanted states, ranks that cannot be made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from checkpoints import checkpoint
from llmserve import LLM, SamplingParams, _core
from llmserve import _core_testing as testing
from llmserve.errors import InternalError, InvalidArgument, NotSupported
from model_runner import PagedRunner
from ranks import engine_config

PROMPTS = [[5, 6, 7], list(range(3, 43)), [9] * 17]
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def config() -> _core.EngineConfig:
    return engine_config(checkpoint("llama"))


def wanting_request(num_layers: int, num_ranks: int = 1) -> _core.ConfigRequest:
    return _core.ConfigRequest(
        model=str(checkpoint("llama")),
        device="cpu",
        dtype="float32",
        max_model_len=128,
        num_gpu_blocks_override=64,
        num_threads=1,
        max_wanted_layers=num_layers,
        tensor_parallel_size=num_ranks,
    )


def wanting_config(num_layers: int, num_ranks: int) -> _core.EngineConfig:
    """Of steps of which the states of so many layers are wanted."""
    request = wanting_request(num_layers, num_ranks)
    return _core.resolve_config(request, _core.Checkpoint(str(checkpoint("llama"))))


def make_scheduler(config: _core.EngineConfig) -> _core.Scheduler:
    return _core.Scheduler(config.scheduler, config.cache)


def add(scheduler: _core.Scheduler, prompts: Sequence[list[int]]) -> None:
    for i, prompt in enumerate(prompts):
        params = _core.SamplingParams(
            temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False
        )
        scheduler.add(i, prompt, params)


def expected_tokens(config: _core.EngineConfig) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(config.model_path, dtype="float32", max_model_len=128) as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_empty_steps_run_nothing_and_change_nothing(
    config: _core.EngineConfig, num_ranks: int
) -> None:
    """Before the first step and between others: no rows, and the tokens of an engine."""
    nothing: Any = make_scheduler(config).schedule()
    assert nothing.sequences == []
    runner = testing.StepRunner(engine_config(checkpoint("llama"), tensor_parallel_size=num_ranks))
    scheduler = make_scheduler(config)
    add(scheduler, PROMPTS)
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    while scheduler.has_unfinished():
        for _ in range(2):
            runner.launch(nothing)
            assert runner.wait().token_ids == []
        runner.launch(scheduler.schedule())
        for event in scheduler.commit(runner.wait()):
            tokens[event.request_id] += event.token_ids
    runner.check_idle()
    assert tokens == expected_tokens(config)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_states_of_wanted_layers_are_those_of_the_model(num_ranks: int) -> None:
    config = wanting_config(2, num_ranks)
    runner = testing.StepRunner(config)
    scheduler = make_scheduler(config)
    add(scheduler, PROMPTS)
    runner.launch(scheduler.schedule(), wanted_layers=[0, 2])
    scheduler.commit(runner.wait())
    model = PagedRunner(checkpoint("llama"), device="cpu", dtype="float32")
    prompts = [(model.add_sequence(), prompt) for prompt in PROMPTS]
    num_tokens = sum(len(prompt) for prompt in PROMPTS)
    model.step(prompts, [0, 2], range(num_tokens))
    np.testing.assert_array_equal(runner.layer_states(), model.model.layer_states(2, num_tokens))
    runner.launch(scheduler.schedule())
    assert runner.layer_states().shape[0] == 0


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"adapter": 0}, "a sequence names an adapter, and this model has none"),
        ({"state_slot": 3}, "a sequence has a slot for its state, and this model keeps none"),
    ],
)
def test_what_a_model_does_not_have_is_refused(
    config: _core.EngineConfig, wanted: dict[str, int], message: str
) -> None:
    runner = testing.StepRunner(config)
    scheduler = make_scheduler(config)
    add(scheduler, PROMPTS)
    plan = scheduler.schedule()
    with pytest.raises(NotSupported, match=message):
        runner.launch(plan, **wanted)
    runner.launch(plan)
    assert len(runner.wait().token_ids) == len(PROMPTS)


def test_the_description_counts_the_ranks(config: _core.EngineConfig) -> None:
    one = testing.StepRunner(config).description
    assert one.startswith("LlamaForCausalLM float32 on cpu")
    two = engine_config(checkpoint("llama"), tensor_parallel_size=2)
    assert testing.StepRunner(two).description == one + ", rank 0 of 2"


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_rank_that_cannot_be_made_ends_the_others(
    config: _core.EngineConfig, num_ranks: int
) -> None:
    missing = _core.EngineConfig(
        model_path=str(checkpoint("qwen2")),
        parallel=_core.ParallelConfig(tensor_parallel_size=num_ranks),
        cache=_core.CacheConfig(num_blocks=8, groups=[_core.CacheGroupSpec(num_kv_heads=1)]),
        scheduler=config.scheduler,
    )
    with pytest.raises(InternalError, match="the plan's cache groups are the model's"):
        testing.StepRunner(missing)


def test_memory_of_wanted_layers_is_planned_and_taken_at_load() -> None:
    plans = [_core.plan_memory(wanting_request(n)) for n in (0, 3)]
    num_tokens = plans[1].config.scheduler.max_num_batched_tokens
    hidden_size = json.loads((checkpoint("llama") / "config.json").read_text())["hidden_size"]
    num_bytes = 3 * num_tokens * hidden_size * 4
    assert plans[1].workspace_bytes - plans[0].workspace_bytes == num_bytes
    runners = [testing.StepRunner(plan.config) for plan in plans]
    assert [runner.workspace_bytes for runner in runners] == [p.workspace_bytes for p in plans]


def test_more_layers_than_were_planned_for_are_refused(config: _core.EngineConfig) -> None:
    runner = testing.StepRunner(config)
    scheduler = make_scheduler(config)
    add(scheduler, PROMPTS)
    with pytest.raises(InvalidArgument, match=r"states of 2 layers.*max_wanted_layers=0"):
        runner.launch(scheduler.schedule(), wanted_layers=[0, 2])
