"""What a step runs: one ragged batch under a budget of tokens and seats."""

from __future__ import annotations

import random

from scripted import Runner, random_prompt

RNG = random.Random(0)


def prompt_of(num_tokens: int) -> list[int]:
    return random_prompt(RNG, num_tokens)


def kinds(decisions: list[tuple[int, int, str, int]], request_id: int) -> list[str]:
    return [kind for request, _, kind, _ in decisions if request == request_id]


def test_prefill_and_decode_share_a_step() -> None:
    runner = Runner(num_blocks=32)
    runner.add(1, prompt_of(5), max_tokens=4)
    runner.step()
    runner.add(2, prompt_of(7), max_tokens=4)
    assert runner.step().sequences == [(1, 0, 5, 1), (2, 0, 0, 7)]


def test_the_budget_cuts_a_prompt_into_chunks() -> None:
    runner = Runner(num_blocks=32, max_num_batched_tokens=8)
    runner.add(1, prompt_of(20), max_tokens=1)
    steps = runner.run()
    assert [s.sequences for s in steps] == [[(1, 0, 0, 8)], [(1, 0, 8, 8)], [(1, 0, 16, 4)]]
    assert [s.num_logit_rows for s in steps] == [0, 0, 1]
    assert kinds(steps[0].decisions, 1) == ["admitted", "scheduled", "chunked"]


def test_a_long_prompt_does_not_stall_those_that_decode() -> None:
    runner = Runner(num_blocks=64, max_num_batched_tokens=8, max_num_seqs=4)
    for request in (1, 2):
        runner.add(request, prompt_of(2), max_tokens=30)
    runner.step()
    runner.add(3, prompt_of(40), max_tokens=1)
    for step in [runner.step() for _ in range(6)]:
        assert {s[0]: s[3] for s in step.sequences} == {1: 1, 2: 1, 3: 6}


def test_an_earlier_prompt_leaves_later_decodes_their_token() -> None:
    runner = Runner(num_blocks=64, max_num_batched_tokens=8, max_num_seqs=4)
    runner.add(1, prompt_of(4), max_tokens=20)
    runner.add(2, prompt_of(4), max_tokens=20)
    for _ in range(9):
        runner.step()
    runner.scheduler.preempt(1)  # 13 tokens to recompute, ahead of request 2 in the order
    runner.scheduler.reset_prefix_cache()
    runner.step()  # admits request 1 with what request 2 leaves: 7 tokens
    assert runner.step().sequences == [(1, 0, 7, 6), (2, 0, 13, 1)]


def test_without_chunked_prefill_a_prompt_runs_whole_or_waits() -> None:
    runner = Runner(
        num_blocks=64, max_num_batched_tokens=32, max_model_len=32, enable_chunked_prefill=False
    )
    runner.add(1, prompt_of(20), max_tokens=2)
    runner.add(2, prompt_of(20), max_tokens=2)
    first, second = runner.step(), runner.step()
    assert first.sequences == [(1, 0, 0, 20)]
    assert kinds(first.decisions, 2) == ["waits_for_budget"]
    assert second.sequences == [(1, 0, 20, 1), (2, 0, 0, 20)]


def test_no_more_than_max_num_seqs_run() -> None:
    runner = Runner(num_blocks=64, max_num_seqs=2)
    for request in range(3):
        runner.add(request, prompt_of(3), max_tokens=2 + request)
    step = runner.step()
    assert [s[0] for s in step.sequences] == [0, 1]
    assert kinds(step.decisions, 2) == ["waits_for_seqs"]
    runner.run()
    assert runner.finished_requests == [0, 1, 2]


def test_a_20k_prompt_in_5k_chunks_has_the_published_attention_work() -> None:
    """Row E6: 12.5, 37.5, 62.5, 87.5 million query-key pairs, 200 million whatever the chunk."""
    work = {}
    for chunk in (5_000, 2_000):
        runner = Runner(
            num_blocks=1_300, block_size=16, max_num_batched_tokens=chunk, max_model_len=20_400
        )
        runner.add(1, [1] * 20_000, max_tokens=1)
        steps = runner.run()
        assert max(s.num_tokens for s in steps) <= chunk  # the stall is bounded
        # A token attends to those before it and half its own chunk on average.
        work[chunk] = [n * start + n * n / 2 for s in steps for _, _, start, n in s.sequences]
    assert work[5_000] == [12.5e6, 37.5e6, 62.5e6, 87.5e6]
    assert sum(work[5_000]) == sum(work[2_000]) == 200e6
