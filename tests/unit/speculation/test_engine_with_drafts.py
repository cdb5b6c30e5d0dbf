"""The engine with a drafter of known quality, on a token oracle: nothing but the number of steps
depends on it."""

from __future__ import annotations

import time
from typing import Any

import pytest
from engine_requests import add_request
from llmserve import _core, _core_testing

VOCAB = 256
DEADLINE_S = 30.0

Tokens = dict[tuple[int, int], list[int]]


def make_engine(
    drafter: dict[str, Any] | None,
    k: int = 4,
    oracle: dict[str, Any] | None = None,
    speculation: dict[str, Any] | None = None,
    num_blocks: int = 64,
    **scheduler: Any,
) -> _core.Engine:
    """drafter: of a RecordedDrafter; None: no speculation."""
    defaults = {"max_model_len": 256, "max_num_batched_tokens": 64, "max_num_seqs": 16}
    settings: dict[str, Any] = {
        "cache": _core.CacheConfig(num_blocks=num_blocks, block_size=8),
        "scheduler": _core.SchedulerConfig(**{**defaults, **scheduler}),
    }
    if drafter is not None:
        settings["speculation"] = _core.SpeculationConfig(
            **{
                "method": "draft_model",
                "num_speculative_tokens": k,
                "adaptive": False,
                **(speculation or {}),
            }
        )
    return _core_testing.oracle_engine(
        _core.EngineConfig(**settings),
        _core_testing.OracleOptions(vocab_size=VOCAB, **(oracle or {})),
        drafter=None
        if drafter is None
        else _core_testing.RecordedDrafter(vocab_size=VOCAB, **drafter),
    )


def run(engine: _core.Engine, requests: list[dict[str, Any]]) -> tuple[Tokens, dict[Any, str]]:
    """(tokens, finish reasons) by request and sample."""
    ids = [
        add_request(
            engine,
            request.get("prompt", [1, 2, 3]),
            _core.SamplingParams(
                **{"detokenize": False, "max_tokens": 24, "seed": 7, **request.get("params", {})}
            ),
        )
        for request in requests
    ]
    tokens: Tokens = {}
    reasons: dict[Any, str] = {}
    left = set(ids)
    deadline = time.monotonic() + DEADLINE_S
    while left:
        assert time.monotonic() < deadline, f"requests {left} never ended"
        for event in engine.wait_events(0.1):
            key = (event.request_id - ids[0], event.sample_index)
            tokens.setdefault(key, []).extend(event.token_ids)
            if event.finish_reason:
                reasons[key] = event.finish_reason
            if event.is_request_finished:
                left.discard(event.request_id)
    return tokens, reasons


REQUESTS: list[dict[str, Any]] = [
    {},
    {"prompt": list(range(40)), "params": {"max_tokens": 1}},
    {"params": {"seed": 3, "max_tokens": 60, "n": 3}},
    {"prompt": [5] * 17, "params": {"seed": 4, "max_tokens": 31, "min_tokens": 5}},
    {"params": {"seed": 5, "max_tokens": 100, "stop_token_ids": [11, 12, 13, 14, 15, 16]}},
]


@pytest.fixture(scope="module")
def plain() -> tuple[Tokens, dict[Any, str]]:
    engine = make_engine(None)
    result = run(engine, REQUESTS)
    engine.close()
    return result


@pytest.mark.parametrize("accuracy", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("k", [1, 3, 8, 32])
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_tokens_and_ends_are_those_of_plain_steps(
    plain: tuple[Tokens, dict[Any, str]], accuracy: float, k: int, max_in_flight: int
) -> None:
    engine = make_engine({"accuracy": accuracy}, k, {"max_in_flight": max_in_flight})
    assert run(engine, REQUESTS) == plain
    metrics = engine.metrics()
    engine.close()
    assert metrics.num_draft_tokens >= metrics.num_accepted_tokens
    assert sum(metrics.num_accepted_per_pos) == metrics.num_accepted_tokens
    assert metrics.num_accepted_per_pos[k:] == [0] * (32 - k)
    assert (metrics.num_accepted_tokens == 0) == (accuracy == 0.0)


def test_good_guesses_save_steps() -> None:
    request = [{"params": {"max_tokens": 101}}]
    num_steps = {}
    for accuracy in (0.0, 1.0):
        engine = make_engine({"accuracy": accuracy}, 4)
        run(engine, request)
        num_steps[accuracy] = engine.metrics().num_decode_steps
        engine.close()
    assert num_steps == {0.0: 100, 1.0: 20}


def test_tokens_a_step_are_as_the_accuracy_says() -> None:
    """E = (1 - a^(k+1)) / (1 - a): 3.36 at 0.8 and k 4."""
    engine = make_engine({"accuracy": 0.8}, 4, max_model_len=10_000, num_blocks=2000)
    run(engine, [{"params": {"max_tokens": 8001, "seed": s}} for s in range(1)])
    metrics = engine.metrics()
    engine.close()
    expected = (1 - 0.8**5) / (1 - 0.8)
    assert 8000 / metrics.num_decode_steps == pytest.approx(expected, rel=0.04)


@pytest.mark.parametrize("index", range(6))
def test_a_stop_at_each_accepted_place_ends_there(index: int) -> None:
    engine = make_engine(None)
    whole = run(engine, [{"params": {"max_tokens": 12, "seed": 9}}])[0][0, 0]
    request = [{"params": {"max_tokens": 12, "seed": 9, "stop_token_ids": [whole[index]]}}]
    expected = run(engine, request)
    engine.close()
    drafted = make_engine({"accuracy": 1.0}, 5)
    assert run(drafted, request) == expected
    drafted.close()


def test_the_last_position_of_the_context_is_reached() -> None:
    request = [{"prompt": list(range(10)), "params": {"max_tokens": 500, "seed": 2}}]
    results = []
    for drafter in (None, {"accuracy": 1.0}):
        engine = make_engine(drafter, 8, max_model_len=64)
        results.append(run(engine, request))
        engine.close()
    assert results[0] == results[1]
    assert len(results[0][0][0, 0]) == 54


def test_guesses_take_no_tokens_from_others() -> None:
    """B (k + 1) is beyond what a step may run."""
    requests = [{"params": {"seed": seed, "max_tokens": 20}} for seed in range(12)]
    results = []
    for drafter in (None, {"accuracy": 1.0}):
        engine = make_engine(drafter, 8, max_num_batched_tokens=16)
        results.append(run(engine, requests))
        engine.close()
    assert results[0] == results[1]


def test_preemption_forgets_guesses_and_no_token() -> None:
    requests = [{"params": {"seed": seed, "max_tokens": 100}} for seed in range(8)]
    results = []
    for drafter in (None, {"accuracy": 0.8}):
        engine = make_engine(drafter, 6, num_blocks=24, max_model_len=160)
        results.append(run(engine, requests))
        assert engine.metrics().num_preemptions > 0
        engine.close()
    assert results[0] == results[1]


def test_a_drafter_that_fails_is_switched_off_and_hurts_nobody() -> None:
    expected = make_engine(None)
    wanted = run(expected, REQUESTS)
    expected.close()
    engine = make_engine({"accuracy": 1.0, "fail_at": 3}, 4)
    assert run(engine, REQUESTS) == wanted
    notice = engine.take_notice()
    assert "the drafter draft_model failed and is switched off" in notice
    assert "the drafter was told to fail" in notice
    assert engine.take_notice() == ""
    before = engine.metrics().num_drafts
    assert run(engine, REQUESTS) == wanted
    assert engine.metrics().num_drafts == before
    engine.close()


@pytest.mark.parametrize("bad_token", [-7, VOCAB, 2**30])
def test_guesses_outside_the_vocabulary_are_not_run(bad_token: int) -> None:
    expected = make_engine(None)
    wanted = run(expected, REQUESTS)
    expected.close()
    engine = make_engine({"accuracy": 0.5, "bad_token": bad_token}, 4)
    assert run(engine, REQUESTS) == wanted
    assert engine.metrics().num_accepted_tokens == engine.metrics().num_draft_tokens
    engine.close()


def test_a_model_that_does_not_match_is_told_once() -> None:
    engine = make_engine({"accuracy": 0.1}, 4, speculation={"model": "some/draft"})
    run(engine, [{"params": {"max_tokens": 240, "seed": s}} for s in range(4)])
    assert "some/draft trained for this model" in engine.take_notice()
    engine.close()
    matching = make_engine({"accuracy": 0.8}, 4)
    run(matching, [{"params": {"max_tokens": 240, "seed": s}} for s in range(4)])
    assert matching.take_notice() == ""
    matching.close()


def test_requests_tell_their_guesses_and_the_trace_says_why() -> None:
    engine = make_engine({"accuracy": 1.0}, 3)
    run(engine, [{"params": {"max_tokens": 13}}])
    (record,) = engine.request_records()
    assert (record.num_draft_tokens, record.num_accepted_tokens) == (9, 9)
    decisions = {(d.kind, d.detail) for step in engine.trace() for d in step.decisions}
    assert ("drafted", 3) in decisions
    steps = [step for step in engine.trace() if step.phase == "decode"]
    assert [(s.num_draft_tokens, s.num_accepted_tokens) for s in steps] == [(3, 3)] * 3
    engine.close()


def test_guessing_that_does_not_pay_is_said_to_be_off() -> None:
    oracle = {"step_us": 300, "row_us": 300}
    speculation = {"adaptive": True}
    engine = make_engine({"accuracy": 0.0}, 4, oracle, speculation)
    run(engine, [{"params": {"max_tokens": 200}}])
    kinds = [d.kind for step in engine.trace() for d in step.decisions]
    assert "drafts_off" in kinds
    engine.close()
