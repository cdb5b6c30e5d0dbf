"""Microseconds that schedule() and commit() take, without a model.

Decode: all sequences run one token a step, with events, stop checks and prefix caching; the medians
are over steps in which all of them run, and stand beside the time in which this machine reads the
weights of a model of 1.1 billion bf16 parameters once, as each of its steps must. Intake: the first
look at a long prompt, which hashes it, beside that model's arithmetic for the prompt. Overhead:
what a whole engine adds to a step, from one start to the next without the execution, where each
step reads 64 MiB and so leaves the caches as a forward does.

Example:
    pytest benchmarks/bench_scheduler.py --results scheduler.json
"""

from __future__ import annotations

import random
import statistics

import pytest
from core_testing import testing
from llmserve import _core
from llmserve.bench.machine import MachineProbe
from step_times import decode_times

VOCAB_SIZE = 32_000
BLOCK_SIZE = 16
PROMPT_TOKENS = 64
NUM_STEPS = 400
MODEL_PARAMETERS = 1.1e9


def cache_of(num_blocks: int) -> _core.CacheConfig:
    return _core.CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE)


def scheduler_config(num_seqs: int, num_steps: int) -> _core.SchedulerConfig:
    return _core.SchedulerConfig(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_seqs * PROMPT_TOKENS,
        max_model_len=PROMPT_TOKENS + num_steps,
    )


def bench_decode(num_seqs: int, num_steps: int, with_text: bool) -> dict[str, float]:
    rng = random.Random(0)
    blocks_each = -(-(PROMPT_TOKENS + num_steps) // BLOCK_SIZE) + 1
    config = scheduler_config(num_seqs, num_steps)
    vocabulary = _core.Vocabulary([b" tok%d" % i for i in range(VOCAB_SIZE)], [])
    scheduler = _core.Scheduler(
        config, cache_of(num_seqs * blocks_each), vocabulary if with_text else None
    )
    for request_id in range(num_seqs):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(PROMPT_TOKENS)]
        params = {"stop": ["###", "\n\n"]} if with_text else {}
        fields = {"max_tokens": num_steps, "seed": request_id, **params}
        scheduler.add(request_id, prompt, _core.SamplingParams(**fields))
    times = testing.time_steps(scheduler, num_steps, VOCAB_SIZE)[1:]
    full = [t for t in times if t[2] == num_seqs]
    return {
        "schedule_us": statistics.median(t[0] for t in full),
        "commit_us": statistics.median(t[1] for t in full),
        "schedule_us_max": max(t[0] for t in full),
        "commit_us_max": max(t[1] for t in full),
    }


def bench_intake(num_tokens: int) -> dict[str, float]:
    config = _core.SchedulerConfig(max_num_batched_tokens=num_tokens, max_model_len=num_tokens + 2)
    scheduler = _core.Scheduler(config, cache_of(num_tokens // BLOCK_SIZE + 2))
    scheduler.add(0, list(range(num_tokens)), _core.SamplingParams(max_tokens=1))
    ((schedule_us, commit_us, _),) = testing.time_steps(scheduler, 1, VOCAB_SIZE)
    return {"schedule_us": schedule_us, "commit_us": commit_us}


def bench_overhead(num_seqs: int, is_streamed: bool) -> dict[str, float]:
    config = _core.EngineConfig(
        cache=cache_of(num_seqs * (PROMPT_TOKENS + NUM_STEPS) // BLOCK_SIZE + num_seqs),
        scheduler=scheduler_config(num_seqs, NUM_STEPS),
    )
    oracle = testing.OracleOptions(vocab_size=VOCAB_SIZE, sweep_bytes=64 << 20)
    engine = testing.oracle_engine(config, oracle)
    rng = random.Random(0)
    requests = []
    for seed in range(num_seqs):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(PROMPT_TOKENS)]
        params = _core.SamplingParams(max_tokens=NUM_STEPS, seed=seed, detokenize=False)
        requests.append(_core.EngineRequest(prompt, params, is_streamed=is_streamed))
    left = set(engine.add_requests(requests))
    while left:
        left -= {event.request_id for event in engine.wait_events(1.0) if event.is_request_finished}
    steps = engine.trace()
    engine.close()
    return decode_times(steps, num_seqs)


@pytest.fixture(scope="module")
def rates(threads):
    probe = MachineProbe(threads, ["bfloat16"])
    for _ in range(5):
        probe.measure()
    return probe.rates()


def model_bound_us(rates, num_tokens: int) -> float:
    """Of a step of the model in bfloat16."""
    num_ops = 2 * MODEL_PARAMETERS * num_tokens
    return rates.bound_s(2 * MODEL_PARAMETERS, num_ops, "bfloat16") * 1e6


@pytest.mark.parametrize("with_text", [False, True], ids=["ids", "text_and_stops"])
@pytest.mark.parametrize("num_seqs", [32, 256])
def test_decode(num_seqs, with_text, rates, board):
    times = bench_decode(num_seqs, NUM_STEPS, with_text)
    step_us = model_bound_us(rates, num_seqs)
    share = (times["schedule_us"] + times["commit_us"]) / step_us
    label = "text and stops" if with_text else "ids"
    board.add(
        f"decode of {num_seqs} sequences, {label}",
        {**times, "model_bound_us": step_us, "share_of_bound": share},
    )


@pytest.mark.parametrize("is_streamed", [False, True], ids=["held", "streamed"])
def test_overhead(is_streamed, board):
    times = bench_overhead(32, is_streamed)
    board.add(f"engine at 32 sequences, {'streamed' if is_streamed else 'held'}", times)


def test_intake(rates, board):
    num_tokens = 20_000
    times = bench_intake(num_tokens)
    step_us = model_bound_us(rates, num_tokens)
    share = (times["schedule_us"] + times["commit_us"]) / step_us
    board.add(
        f"intake of {num_tokens} tokens",
        {**times, "model_bound_us": step_us, "share_of_bound": share},
    )
