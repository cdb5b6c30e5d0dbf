"""Samples that fork, sequences that give way, and prefixes that are shared."""

from __future__ import annotations

import random

import pytest
from scripted import Runner, expected_tokens, random_prompt

RNG = random.Random(0)


def prompt_of(num_tokens: int) -> list[int]:
    return random_prompt(RNG, num_tokens)


def test_n_samples_share_the_prompt_and_copy_on_write() -> None:
    runner = Runner(num_blocks=32)
    prompt = prompt_of(6)
    runner.add(1, prompt, n=3, max_tokens=5, seed=4)
    first = runner.step()
    assert (first.num_tokens, first.num_logit_rows) == (6, 3)
    assert runner.scheduler.metrics().num_blocks_used == 2
    second = runner.step()
    assert len(second.copies) == 2  # the last holder writes in place
    assert len({source for source, _ in second.copies}) == 1
    runner.check()
    runner.run()
    for i in range(3):
        assert runner.tokens(1, i) == expected_tokens(prompt, 5, seed=4, sample_index=i)
    assert runner.finished_requests == [1]


def test_samples_beyond_max_num_seqs_wait_and_read_the_prompt_from_the_cache() -> None:
    runner = Runner(num_blocks=64, max_num_seqs=2)
    prompt = prompt_of(9)
    runner.add(1, prompt, n=5, max_tokens=4)
    steps = runner.run()
    assert max(len(s.sequences) for s in steps) == 2
    assert runner.scheduler.metrics().num_prefill_tokens <= 9 + 3 * 2
    for i in range(5):
        assert runner.tokens(1, i) == expected_tokens(prompt, 4, sample_index=i)


def test_samples_end_on_their_own() -> None:
    prompt = prompt_of(6)
    stop = expected_tokens(prompt, 3, sample_index=1)[2]
    runner = Runner(num_blocks=32)
    runner.add(1, prompt, n=2, max_tokens=6, stop_token_ids=[stop])
    runner.run()
    assert runner.outputs[1, 1].finish_reason == "stop"
    assert runner.outputs[1, 0].finish_reason == "length"
    flags = [e.is_request_finished for i in (0, 1) for e in runner.outputs[1, i].events]
    assert flags.count(True) == 1


def test_samples_that_end_with_their_first_token_leave_nothing_behind() -> None:
    runner = Runner(num_blocks=32)
    runner.add(1, prompt_of(6), n=4, max_tokens=1)
    runner.run()
    runner.check()
    assert all(len(runner.tokens(1, i)) == 1 for i in range(4))


def test_preemption_takes_the_last_in_order_and_changes_no_output() -> None:
    runner = Runner(num_blocks=8, block_size=4, max_num_seqs=4)
    prompts = {request: prompt_of(8) for request in range(3)}
    for request, prompt in prompts.items():
        runner.add(request, prompt, max_tokens=12)
    steps = runner.run()
    preempted = [d[0] for s in steps for d in s.decisions if d[2] == "preempted"]
    assert preempted
    assert 0 not in preempted
    for step in steps:  # who was just preempted does not take the blocks back at once
        assert not {"preempted", "admitted"} <= {d[2] for d in step.decisions}
    for request, prompt in prompts.items():
        assert runner.tokens(request) == expected_tokens(prompt, 12)
    assert runner.finished_requests == [0, 1, 2]


def test_a_sequence_that_outgrows_the_pool_fails_alone() -> None:
    runner = Runner(num_blocks=4, block_size=4)
    prompts = {1: prompt_of(4), 2: prompt_of(4)}
    runner.add(1, prompts[1], max_tokens=500)
    runner.add(2, prompts[2], max_tokens=6)
    runner.run()
    failed = runner.outputs[1, 0]
    assert failed.finish_reason == "error"
    assert "needs 5 blocks (17 tokens" in failed.events[-1].error
    assert failed.token_ids == expected_tokens(prompts[1], 13)
    assert runner.tokens(2) == expected_tokens(prompts[2], 6)


def test_the_head_of_the_queue_is_not_overtaken_for_want_of_blocks() -> None:
    runner = Runner(num_blocks=8, block_size=4)
    runner.add(1, prompt_of(16), max_tokens=8)
    runner.step()
    runner.add(2, prompt_of(20), max_tokens=1)
    runner.add(3, prompt_of(2), max_tokens=1)
    step = runner.step()
    assert [s[0] for s in step.sequences] == [1]
    assert ("waits_for_blocks", 2) in [(d[2], d[3]) for d in step.decisions if d[0] == 2]


def test_a_reserve_keeps_blocks_free_for_those_that_run() -> None:
    runner = Runner(num_blocks=8, admission_reserve_tokens=12)
    prompts = [prompt_of(16), prompt_of(8)]
    runner.add(1, prompts[0], max_tokens=4)
    runner.add(2, prompts[1], max_tokens=2)
    step = runner.step()
    # Of 8 blocks the first has 4; the second wants 2, and 3 more are to stay free.
    assert [s[0] for s in step.sequences] == [1]
    assert (2, 0, "waits_for_blocks", 1) in step.decisions
    runner.run()
    assert runner.tokens(1) == expected_tokens(prompts[0], 4)
    assert runner.tokens(2) == expected_tokens(prompts[1], 2)


def test_a_sequence_that_runs_alone_needs_no_reserve() -> None:
    runner = Runner(num_blocks=8, admission_reserve_tokens=2**31 - 1)
    prompts = [prompt_of(16), prompt_of(28)]
    for i, prompt in enumerate(prompts):
        runner.add(i, prompt, max_tokens=3)
    steps = runner.run()
    assert max(len(step.sequences) for step in steps) == 1
    assert [runner.tokens(i) for i in range(2)] == [expected_tokens(p, 3) for p in prompts]


@pytest.mark.parametrize(("reserve", "is_preempted"), [(0, True), (24, False)])
def test_with_an_outputs_length_in_reserve_nobody_is_preempted(
    reserve: int, is_preempted: bool
) -> None:
    runner = Runner(num_blocks=16, admission_reserve_tokens=reserve)
    prompts = [prompt_of(16) for _ in range(4)]
    for i, prompt in enumerate(prompts):
        runner.add(i, prompt, max_tokens=12, seed=i)
    runner.run()
    assert (runner.scheduler.metrics().num_preemptions > 0) == is_preempted
    for i, prompt in enumerate(prompts):
        assert runner.tokens(i) == expected_tokens(prompt, 12, seed=i)


def test_preempt_on_request_recomputes_the_same_continuation() -> None:
    runner = Runner(num_blocks=32)
    prompt = prompt_of(6)
    runner.add(1, prompt, max_tokens=12, n=2)
    while runner.scheduler.has_unfinished():
        runner.step()
        runner.scheduler.preempt(1)
        runner.check()
    for i in range(2):
        assert runner.tokens(1, i) == expected_tokens(prompt, 12, sample_index=i)
    assert runner.outputs[1, 0].events[-1].num_preemptions == 11


def test_a_second_request_reads_the_first_ones_prompt_and_answer() -> None:
    runner = Runner(num_blocks=32, block_size=4)
    prompt = prompt_of(8)
    runner.add(1, prompt, max_tokens=9)
    runner.run()
    follow_up = [*prompt, *runner.tokens(1), 5]
    runner.add(2, follow_up, max_tokens=3)
    runner.run()
    assert runner.outputs[2, 0].events[-1].num_cached_tokens == 16
    assert runner.tokens(2) == expected_tokens(follow_up, 3)


def test_a_prefix_under_way_is_waited_for_and_the_queue_goes_on() -> None:
    runner = Runner(num_blocks=64, block_size=4)
    shared = prompt_of(16)
    runner.add(1, [*shared, 1], max_tokens=4)
    runner.add(2, [*shared, 2], max_tokens=4)
    runner.add(3, prompt_of(2), max_tokens=4)
    first, second = runner.step(), runner.step()
    assert first.sequences == [(1, 0, 0, 17), (3, 0, 0, 2)]
    assert (2, 0, "waits_for_prefix", 1) in first.decisions
    assert second.sequences == [(1, 0, 17, 1), (3, 0, 2, 1), (2, 0, 16, 1)]
    runner.run()
    assert runner.outputs[2, 0].events[-1].num_cached_tokens == 16
    assert runner.tokens(2) == expected_tokens([*shared, 2], 4)


@pytest.mark.parametrize("how", ["abort", "preempt", "finish"])
def test_nobody_waits_for_a_prefix_whose_owner_is_gone(how: str) -> None:
    runner = Runner(num_blocks=64, block_size=4, max_num_batched_tokens=8)
    shared = prompt_of(24)
    runner.add(1, [*shared, 1], max_tokens=1)
    runner.add(2, [*shared, 2], max_tokens=4)
    runner.step()
    if how == "abort":
        runner.scheduler.abort(1)
    elif how == "preempt":
        runner.scheduler.preempt(1)
    runner.run(max_steps=20)
    assert runner.tokens(2) == expected_tokens([*shared, 2], 4)


def test_salts_keep_requests_apart() -> None:
    runner = Runner(num_blocks=32, block_size=4)
    prompt = prompt_of(9)
    runner.add(1, prompt, max_tokens=1, cache_salt="a")
    runner.run()
    for request, salt in ((2, "b"), (3, "a")):
        runner.add(request, prompt, max_tokens=1, cache_salt=salt)
        runner.run()
    cached = [runner.outputs[r, 0].events[-1].num_cached_tokens for r in (2, 3)]
    assert cached == [0, 8]


def test_reset_forgets_what_was_computed_before() -> None:
    runner = Runner(num_blocks=32, block_size=4)
    prompt = prompt_of(9)
    runner.add(1, prompt, max_tokens=8)
    runner.step()
    runner.scheduler.reset_prefix_cache()
    runner.check()
    runner.run()
    runner.check()
    runner.add(2, prompt, max_tokens=2)
    runner.run()
    assert runner.outputs[2, 0].events[-1].num_cached_tokens == 0
    assert runner.tokens(1) == expected_tokens(prompt, 8)


def test_cache_counters_add_up_to_the_prompts() -> None:
    runner = Runner(num_blocks=64, block_size=4)
    shared = prompt_of(20)
    for request in range(6):
        runner.add(request, [*shared, *prompt_of(3)], max_tokens=3)
    runner.run()
    metrics = runner.scheduler.metrics()
    assert metrics.prefix_cache_queries == metrics.num_prompt_tokens == 6 * 23
    assert metrics.prefix_cache_hits == 5 * 20
    assert metrics.num_prefill_tokens == 6 * 23 - 5 * 20
    assert metrics.num_generation_tokens == 18


def test_forged_collisions_change_no_output() -> None:
    runner = Runner(num_blocks=16, block_size=4, forge_collisions=True)
    prompts = {request: prompt_of(11) for request in range(8)}
    for request, prompt in prompts.items():
        runner.add(request, prompt, max_tokens=6, n=1 + request % 2)
    while runner.scheduler.has_unfinished():
        runner.step()
        runner.check()
    for request, prompt in prompts.items():
        assert runner.tokens(request) == expected_tokens(prompt, 6)
