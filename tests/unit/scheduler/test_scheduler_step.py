"""What a step runs: one ragged batch under a budget of tokens and seats."""

from __future__ import annotations

import random
from typing import Any

import pytest
from llmserve import errors
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


def test_while_others_decode_a_step_takes_what_runs_in_time() -> None:
    options = {"max_num_batched_tokens": 64, "max_stall_us": 20_000, "us_per_token": 1_000}
    runner = Runner(num_blocks=128, **options)
    runner.add(1, prompt_of(64), max_tokens=30)
    assert runner.step().num_tokens == 64  # nobody decodes
    runner.add(2, prompt_of(50), max_tokens=5)
    runner.add(3, prompt_of(30), max_tokens=5)
    steps = [runner.step() for _ in range(5)]
    assert [s.num_tokens for s in steps] == [20, 20, 20, 20, 7]
    assert [s.sequences[0] for s in steps] == [(1, 0, 64 + i, 1) for i in range(5)]
    assert kinds(steps[0].decisions, 2) == ["admitted", "scheduled", "chunked_for_pace"]
    assert kinds(steps[0].decisions, 3) == ["waits_for_pace"]
    assert "chunked_for_pace" not in kinds(steps[-1].decisions, 3)


def test_the_pace_of_a_step_follows_the_machines() -> None:
    options = {"max_num_batched_tokens": 256, "max_num_seqs": 8, "max_stall_us": 40_000}
    runner = Runner(num_blocks=1200, us_per_token=500, max_model_len=4096, **options)
    runner.add(1, prompt_of(100), max_tokens=100)
    runner.step()
    runner.add(2, prompt_of(3000), max_tokens=1)
    assert [runner.step().num_tokens for _ in range(3)] == [80, 80, 80]
    runner.us_per_token = 1000
    slower = [runner.step().num_tokens for _ in range(8)]
    assert slower == sorted(slower, reverse=True)
    assert 39 <= slower[-1] <= 41
    runner.us_per_token = 250
    faster = [runner.step().num_tokens for _ in range(8)]
    assert faster == sorted(faster)
    assert 155 <= faster[-1] <= 165
    runner.us_per_token = 100_000  # nothing fits: prompts get on all the same
    assert [runner.step().num_tokens for _ in range(6)][-1] == 1 + 16


def test_without_time_or_bound_the_step_is_full() -> None:
    for options in ({"max_stall_us": 10}, {"us_per_token": 1000}):
        runner = Runner(num_blocks=64, **options)
        runner.add(1, prompt_of(8), max_tokens=9)
        runner.step()
        runner.add(2, prompt_of(63), max_tokens=1)
        assert runner.step().num_tokens == 64
    with pytest.raises(errors.InvalidArgument, match="max_stall_ms"):
        Runner(num_blocks=64, max_stall_us=1, enable_chunked_prefill=False, max_model_len=64)


def test_prompts_with_time_are_spread_so_that_all_end_together() -> None:
    runner = Runner(num_blocks=256, max_num_batched_tokens=256, min_spread_tokens=24)
    runner.add(1, prompt_of(16), max_tokens=41, is_streamed=False)
    runner.step()
    for request_id in (2, 3, 4):
        runner.add(request_id, prompt_of(200), max_tokens=10, is_streamed=False)
    steps = runner.run()
    # 600 tokens in 40 - 10 steps, 20 a step, beside request 1; then more beside who decodes.
    assert [s.num_tokens for s in steps[:9]] == [24] * 9
    assert kinds(steps[0].decisions, 2) == ["admitted", "scheduled", "chunked_to_spread"]
    assert kinds(steps[0].decisions, 3) == ["waits_to_spread"]
    assert sum(s.num_tokens for s in steps) == 40 + 600 + 3 * 9
    assert len(steps) == 40  # as if request 1 had run alone
    assert {s[0] for s in steps[-1].sequences} >= {1}


def test_a_spread_step_grows_where_small_steps_are_slow() -> None:
    runner = Runner(num_blocks=1000, max_num_batched_tokens=256, min_spread_tokens=8)
    first_id = iter(range(1, 100, 2))

    def num_tokens_of_steps(step_us: int) -> list[int]:
        first = next(first_id)
        runner.us_per_token = 100
        runner.add(first, prompt_of(256), max_tokens=200, is_streamed=False)
        assert runner.step().num_tokens == 256
        runner.add(first + 1, prompt_of(150), max_tokens=1, is_streamed=False)
        steps: list[int] = []
        for _ in range(8):
            runner.us_per_token = step_us // (steps[-1] if steps else 8)
            steps.append(runner.step().num_tokens)
        runner.run()
        return steps

    assert num_tokens_of_steps(800) == [8] * 8  # 100 us a token, as in large steps
    # 3,200 us a step whatever it runs, as 32 tokens take at the rate of large steps.
    assert num_tokens_of_steps(3200) == [8] * 3 + [16] * 3 + [32] * 2
    assert num_tokens_of_steps(800) == [8] * 8  # the next batch


def test_a_spread_step_that_is_held_up_says_nothing_of_its_size() -> None:
    runner = Runner(num_blocks=1000, max_num_batched_tokens=256, min_spread_tokens=8)
    runner.us_per_token = 100
    runner.add(1, prompt_of(256), max_tokens=200, is_streamed=False)
    assert runner.step().num_tokens == 256
    runner.add(2, prompt_of(150), max_tokens=1, is_streamed=False)
    sizes = []
    for us_per_token in [100, 900, 900, 900, 100, 900, 900, 900]:
        runner.us_per_token = us_per_token
        sizes.append(runner.step().num_tokens)
    assert sizes == [8] * 8


def test_a_spread_step_probes_larger_ones_once() -> None:
    runner = Runner(num_blocks=1000, max_num_batched_tokens=256, min_spread_tokens=8)
    runner.us_per_token = 100
    runner.add(1, prompt_of(7), max_tokens=200, is_streamed=False)
    runner.step()
    runner.add(2, prompt_of(150), max_tokens=1, is_streamed=False)
    assert [runner.step().num_tokens for _ in range(7)] == [8] * 3 + [16] + [8] * 3


BATCHED = {"max_tokens": 4, "is_streamed": False}


@pytest.mark.parametrize(
    "waiting",
    [
        pytest.param([BATCHED | {"num_tokens": 100, "max_tokens": 41}], id="as-long"),
        pytest.param([BATCHED | {"num_tokens": 60}] * 4, id="seats"),
        pytest.param([BATCHED | {"num_tokens": 100, "n": 4}], id="seats-of-samples"),
        pytest.param([BATCHED | {"num_tokens": 120}] * 2, id="blocks"),
        pytest.param([{"num_tokens": 100, "max_tokens": 4}], id="streamed"),
        pytest.param([{"num_tokens": 100, "max_tokens": 4, "beam_width": 2}], id="beams"),
        pytest.param([{"num_tokens": 100, "max_tokens": 1, "is_pooled": True}], id="pooled"),
    ],
)
def test_prompts_without_time_run_at_once(waiting: list[dict[str, Any]]) -> None:
    runner = Runner(num_blocks=60, max_num_batched_tokens=128, max_num_seqs=4, min_spread_tokens=8)
    runner.add(1, prompt_of(8), max_tokens=41, is_streamed=False)
    runner.step()
    for request_id, fields in enumerate(waiting, 2):
        options = dict(fields)
        runner.add(request_id, prompt_of(options.pop("num_tokens")), **options)
    step = runner.step()
    assert "chunked_to_spread" not in {kind for _, _, kind, _ in step.decisions}
    assert "waits_to_spread" not in {kind for _, _, kind, _ in step.decisions}


def test_without_chunks_nothing_can_be_spread() -> None:
    with pytest.raises(errors.InvalidArgument, match="min_spread_tokens"):
        Runner(num_blocks=64, min_spread_tokens=8, enable_chunked_prefill=False, max_model_len=64)


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
