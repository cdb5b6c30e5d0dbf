"""Speculation changes no token and no end: any drafter, any number of guesses, in any company. On
an oracle whose next token is a hash of the whole context as it is read back through the block
tables: a guess that stays in the KV or prefix cache, or in a fork, changes what follows."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest
from engine_requests import add_request
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from llmserve import _core, _core_testing

VOCAB = 64
DEADLINE_S = 60.0
SHARED = [7 * i % VOCAB for i in range(20)]  # a beginning that many prompts have


@dataclass(frozen=True)
class Machine:
    """What requests run on."""

    num_blocks: int
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_in_flight: int
    windows: tuple[int, ...]
    has_prefix_cache: bool
    policy: str


@dataclass(frozen=True)
class Guesser:
    accuracy: float
    k: int
    is_adaptive: bool
    width: int  # guesses of a place at most


@dataclass(frozen=True)
class Wanted:
    """A request."""

    prompt: tuple[int, ...]
    seed: int
    max_tokens: int
    n: int
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    logprobs: int | None


MACHINES = st.builds(
    Machine,
    num_blocks=st.sampled_from([40, 40, 200]),
    block_size=st.sampled_from([4, 8]),
    max_num_batched_tokens=st.sampled_from([9, 24, 64]),
    max_num_seqs=st.sampled_from([1, 3, 8]),
    max_in_flight=st.sampled_from([1, 2]),
    windows=st.sampled_from([(0,), (0, 10)]),
    has_prefix_cache=st.booleans(),
    policy=st.sampled_from(["fcfs", "fcfs", "static"]),
)
GUESSERS = st.builds(
    Guesser,
    accuracy=st.sampled_from([0.0, 0.5, 0.8, 1.0]),
    k=st.sampled_from([1, 2, 4, 7, 32]),
    is_adaptive=st.sampled_from([False, False, True]),
    width=st.sampled_from([1, 1, 2, 3]),
)
PROMPTS = st.tuples(
    st.sampled_from([0, 8, 20]), st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30)
).map(lambda parts: (*SHARED[: parts[0]], *parts[1]))
REQUESTS = st.builds(
    Wanted,
    prompt=PROMPTS,
    seed=st.integers(0, 3),
    max_tokens=st.integers(1, 40),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    min_tokens=st.sampled_from([0, 0, 6]),
    stop_token_ids=st.sampled_from([(), (), (3, 4, 5), tuple(range(8))]),
    logprobs=st.sampled_from([None, None, 0, 2]),
)
Case = tuple[Machine, Guesser, list[Wanted]]
CASES = st.tuples(MACHINES, GUESSERS, st.lists(REQUESTS, min_size=1, max_size=6))


def make_engine(machine: Machine, guesser: Guesser | None) -> _core.Engine:
    groups = [_core.CacheGroupSpec(window=window) for window in machine.windows]
    fields: dict[str, Any] = {
        "cache": _core.CacheConfig(
            num_blocks=machine.num_blocks * len(groups),
            block_size=machine.block_size,
            enable_prefix_caching=machine.has_prefix_cache,
            groups=groups,
        ),
        "scheduler": _core.SchedulerConfig(
            max_model_len=100,
            max_num_batched_tokens=max(machine.max_num_batched_tokens, machine.max_num_seqs),
            max_num_seqs=machine.max_num_seqs,
            policy=machine.policy,
        ),
    }
    drafter = None
    if guesser is not None:
        fields["speculation"] = _core.SpeculationConfig(
            method="draft_model",
            num_speculative_tokens=guesser.k,
            adaptive=guesser.is_adaptive,
            speculative_eagle_topk=guesser.width,
        )
        drafter = _core_testing.RecordedDrafter(
            vocab_size=VOCAB, accuracy=guesser.accuracy, follows_context=True
        )
    return _core_testing.oracle_engine(
        _core.EngineConfig(**fields),
        _core_testing.OracleOptions(
            vocab_size=VOCAB, max_in_flight=machine.max_in_flight, reads_blocks=True
        ),
        drafter=drafter,
    )


def run(engine: _core.Engine, requests: list[Wanted]) -> dict[tuple[int, int], list[Any]]:
    """[tokens, logprobs, finish reason, stop, error] by request and sample."""
    ids = {}
    for request in requests:
        params = _core.SamplingParams(
            detokenize=False,
            max_tokens=request.max_tokens,
            seed=request.seed,
            n=request.n,
            min_tokens=min(request.min_tokens, request.max_tokens),
            stop_token_ids=list(request.stop_token_ids),
            logprobs=request.logprobs,
        )
        ids[add_request(engine, list(request.prompt), params)] = len(ids)
    found: dict[tuple[int, int], list[Any]] = {}
    left = set(ids)
    deadline = time.monotonic() + DEADLINE_S
    while left:
        assert time.monotonic() < deadline, f"requests {left} never ended"
        for event in engine.wait_events(0.1):
            key = (ids[event.request_id], event.sample_index)
            tokens, logprobs, *_ = kept = found.setdefault(key, [[], [], None])
            tokens += event.token_ids
            logprobs += [(t.token_id, t.logprob, t.rank) for t in event.logprobs]
            if event.finish_reason:
                kept[2:] = [event.finish_reason, event.stop_reason, event.error]
            if event.is_request_finished:
                left.discard(event.request_id)
    return found


def check(case: Case) -> None:
    machine, guesser, requests = case
    plain, drafted = make_engine(machine, None), make_engine(machine, guesser)
    try:
        expected = run(plain, requests)
        assert run(drafted, requests) == expected
        # Once more, with what the first time left in the prefix cache.
        assert run(drafted, requests) == expected
    finally:
        plain.close()
        drafted.close()


@settings(
    max_examples=640,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)
@given(CASES)
def test_any_guesses_in_any_company_give_what_plain_steps_give(case: Case) -> None:
    check(case)


@pytest.mark.long
@settings(max_examples=80_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(CASES)
def test_they_do_so_in_very_many_cases(case: Case) -> None:
    check(case)
