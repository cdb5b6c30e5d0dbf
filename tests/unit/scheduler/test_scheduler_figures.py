"""What continuous batching and the prefix cache are worth, in steps and tokens; seeds are stated.

The lengths are those of rows E3, E5, P3 of the requirements: Pareto(1.5, 20) outputs, prompts of
128 to 512 tokens, 8 slots.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from llmserve import _core_testing as testing
from scripted import (
    VOCAB_SIZE,
    Runner,
    add_request,
    expected_tokens,
    make_scheduler,
    pareto_length,
    random_prompt,
)

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Figures:
    num_steps: int
    slots_in_use: float  # share of max_num_seqs, mean over steps
    kv_waste: float  # share of the slots of allocated blocks that hold no token
    pool_in_use: float  # share of the blocks, mean over steps


@dataclass(frozen=True, slots=True)
class Job:
    prompt: list[int]
    max_tokens: int


def make_jobs(count: int, *, cap: int, prompt_tokens: tuple[int, int], seed: int) -> list[Job]:
    rng = random.Random(seed)
    return [
        Job(random_prompt(rng, rng.randint(*prompt_tokens)), pareto_length(rng, cap=cap))
        for _ in range(count)
    ]


def measure(jobs: list[Job], policy: str, *, num_slots: int, num_blocks: int) -> Figures:
    scheduler = make_scheduler(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        policy=policy,
        max_num_seqs=num_slots,
        max_num_batched_tokens=512,
        max_model_len=4096,
    )
    for request_id, job in enumerate(jobs):
        add_request(scheduler, request_id, job.prompt, max_tokens=job.max_tokens)
    num_steps = num_sequences = num_kv_slots = num_kv_tokens = 0
    while scheduler.has_unfinished():
        plan = scheduler.schedule()
        num_steps += len(plan.sequences) > 0
        num_sequences += len(plan.sequences)
        for sequence in plan.sequences:
            num_kv_slots += len(sequence.block_table) * BLOCK_SIZE
            num_kv_tokens += sequence.start_position + sequence.num_tokens
        scheduler.commit(testing.sample_oracle(plan, VOCAB_SIZE))
    scheduler.check_integrity()
    return Figures(
        num_steps,
        num_sequences / (num_steps * num_slots),
        1 - num_kv_tokens / num_kv_slots,
        num_kv_slots / (num_steps * num_blocks * BLOCK_SIZE),
    )


def test_continuous_batching_takes_less_than_half_the_steps_of_static_batching() -> None:
    jobs = make_jobs(512, cap=512, prompt_tokens=(128, 512), seed=7)
    continuous = measure(jobs, "fcfs", num_slots=8, num_blocks=240)
    static = measure(jobs, "static", num_slots=8, num_blocks=240)
    assert static.num_steps >= 2 * continuous.num_steps
    assert continuous.slots_in_use > 0.8
    assert continuous.kv_waste < 0.04


def test_fifty_requests_keep_four_slots_busy() -> None:
    jobs = make_jobs(50, cap=1_000_000, prompt_tokens=(16, 64), seed=3)
    continuous = measure(jobs, "fcfs", num_slots=4, num_blocks=300)
    static = measure(jobs, "static", num_slots=4, num_blocks=300)
    assert continuous.slots_in_use > 0.8
    assert continuous.num_steps < static.num_steps


def test_a_loaded_pool_is_eighty_percent_in_use_with_little_waste() -> None:
    """Row E3: contiguous reservation wastes 60 to 80%."""
    jobs = make_jobs(200, cap=512, prompt_tokens=(128, 512), seed=5)
    figures = measure(jobs, "fcfs", num_slots=16, num_blocks=200)
    assert 0.8 <= figures.pool_in_use <= 1
    assert figures.kv_waste < 0.04


@pytest.mark.parametrize("at_once", [True, False])
def test_ten_questions_on_one_document_prefill_it_once(at_once: bool) -> None:
    rng = random.Random(11)
    document = random_prompt(rng, 1_000)
    questions = [document + random_prompt(rng, 8) for _ in range(10)]

    def num_prefill_tokens(caching: bool) -> int:
        runner = Runner(
            num_blocks=900,
            block_size=BLOCK_SIZE,
            max_num_seqs=16,
            max_num_batched_tokens=512,
            max_model_len=2_000,
            enable_prefix_caching=caching,
        )
        for request_id, question in enumerate(questions):
            runner.add(request_id, question, max_tokens=4)
            if not at_once:
                runner.run()
        runner.run()
        for request_id, question in enumerate(questions):
            assert runner.tokens(request_id) == expected_tokens(question, 4)
        return runner.scheduler.metrics().num_prefill_tokens

    assert num_prefill_tokens(False) == 10_080
    assert num_prefill_tokens(True) * 8 <= 10_080


def hit_rate_of_common_prefixes(num_blocks: int) -> float:
    """Row P3: the share of 1,000 requests that reuse their whole common prefix; 600 have one of 5.

    A prefix is 4 blocks; the other tokens of a prompt, one block, are the request's own; requests
    come one after another in random order.
    """
    rng = random.Random(13)
    prefixes = [random_prompt(rng, 4 * BLOCK_SIZE) for _ in range(5)]
    shares = [i % 5 for i in range(600)] + [-1] * 400
    rng.shuffle(shares)
    scheduler = make_scheduler(num_blocks=num_blocks, block_size=BLOCK_SIZE, max_model_len=200)
    num_hits = 0
    for request_id, share in enumerate(shares):
        own = random_prompt(rng, BLOCK_SIZE)
        head = random_prompt(rng, 4 * BLOCK_SIZE) if share < 0 else prefixes[share]
        add_request(scheduler, request_id, head + own, max_tokens=1)
        (event,) = scheduler.commit(testing.sample_oracle(scheduler.schedule(), VOCAB_SIZE))
        num_hits += share >= 0 and event.num_cached_tokens >= 4 * BLOCK_SIZE
    scheduler.check_integrity()
    return num_hits / len(shares)


def test_common_prefixes_survive_in_five_hundred_blocks() -> None:
    assert hit_rate_of_common_prefixes(500) > 0.55
    assert hit_rate_of_common_prefixes(20_000) == 0.595
