"""What goes wrong for one request, and for the engine as a whole; on a token oracle."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from llmserve import InvalidArgument, SamplingParams, _core, _core_testing
from llmserve.requests.prompt_parser import Prompt
from llmserve.requests.runner import RequestRunner
from llmserve.requests.state import RequestState

MAX_MODEL_LEN = 256
PARAMS = SamplingParams(max_tokens=6, detokenize=False, ignore_eos=True)


def engine(
    options: dict[str, int] | None = None,
    fail_at_step: int = -1,
    gate: _core_testing.StepGate | None = None,
    **scheduler: object,
) -> _core.Engine:
    defaults = {"max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": 64, "max_num_seqs": 16}
    config = _core.EngineConfig(
        cache=_core.CacheConfig(num_blocks=64, block_size=8),
        scheduler=_core.SchedulerConfig(**{**defaults, **scheduler}),
    )
    oracle = _core_testing.OracleOptions(vocab_size=100, **(options or {}))
    faults = _core_testing.FaultOptions(fail_at_step=fail_at_step)
    return _core_testing.oracle_engine(config, oracle, faults=faults, gate=gate)


def states(count: int) -> list[RequestState]:
    core = PARAMS.to_core(MAX_MODEL_LEN)
    core.detokenize = False
    return [RequestState(Prompt(None, [1, 2, 3 + i]), PARAMS, core, 0, None) for i in range(count)]


def run(runner: RequestRunner, requests: list[RequestState]) -> None:
    for _ in runner.run(requests, is_streamed=False):
        pass


@pytest.fixture
def runner() -> Iterator[RequestRunner]:
    runner = RequestRunner(engine({"invalid_request_id": 2}))
    yield runner
    runner.close()


def test_a_request_that_fails_fails_alone_and_says_why(runner: RequestRunner) -> None:
    requests = states(5)
    run(runner, requests)
    completions = [request.output().outputs[0] for request in requests]
    assert [c.finish_reason for c in completions] == [
        "length",
        "length",
        "error",
        "length",
        "length",
    ]
    assert [len(c.token_ids) for c in completions] == [6, 6, 0, 6, 6]
    assert [c.error is None for c in completions] == [True, True, False, True, True]
    assert "finite" in (completions[2].error or "")
    assert all(request.output().finished for request in requests)


def test_a_request_that_failed_does_not_touch_the_next(runner: RequestRunner) -> None:
    run(runner, states(5))
    again = states(3)
    run(runner, again)
    assert [request.output().outputs[0].finish_reason for request in again] == ["length"] * 3


def test_a_step_that_fails_ends_its_requests_and_later_ones_run() -> None:
    gate = _core_testing.StepGate(1)
    runner = RequestRunner(engine(fail_at_step=3, gate=gate))
    requests = states(4)
    thread = threading.Thread(target=run, args=(runner, requests))
    thread.start()
    gate.wait_until_held()
    # Until all are in, and so in the step that fails.
    while thread.is_alive() and requests[-1].request_id < 0:
        time.sleep(0.001)
    gate.open()
    thread.join(60.0)
    completions = [request.output().outputs[0] for request in requests]
    assert [c.finish_reason for c in completions] == ["error"] * 4
    assert all("told to fail" in (c.error or "") for c in completions)
    later = states(1)
    run(runner, later)
    assert later[0].output().outputs[0].finish_reason == "length"
    runner.close()


def test_a_full_queue_holds_the_rest_of_a_call_back() -> None:
    runner = RequestRunner(engine({"step_us": 500}, max_num_queued_reqs=4, max_num_seqs=2))
    requests = states(40)
    run(runner, requests)
    assert all(state.num_generation_tokens == 6 for state in requests)
    runner.close()


def test_events_reach_their_own_thread_whoever_asks_for_them() -> None:
    runner = RequestRunner(engine({"step_us": 100}))
    batches = [states(20) for _ in range(8)]
    threads = [threading.Thread(target=run, args=(runner, batch)) for batch in batches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert all(state.num_generation_tokens == 6 for batch in batches for state in batch)
    runner.close()


def test_a_closed_runner_refuses() -> None:
    runner = RequestRunner(engine())
    runner.close()
    with pytest.raises(InvalidArgument, match="this LLM is closed"):
        run(runner, states(1))
