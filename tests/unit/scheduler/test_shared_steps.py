"""Steps side by side: each of those in flight decodes a share of the sequences."""

from __future__ import annotations

from typing import Any

import pytest
from llmserve import errors
from scripted import Runner, Step, expected_tokens, make_scheduler

PROMPTS = [list(range(50 * i, 51 * i + 5)) for i in range(12)]


def make_runner(num_steps: int, **config: Any) -> Runner:
    flights = {"max_in_flight": num_steps, "runs_ahead": False}
    return Runner(**{"num_blocks": 128, **flights, **config})


def decoding(num_steps: int, num_sequences: int) -> Runner:
    """After the step that runs all prompts, and is known."""
    runner = make_runner(num_steps, max_num_batched_tokens=256, max_num_seqs=12)
    for i, prompt in enumerate(PROMPTS[:num_sequences]):
        runner.add(i, prompt, max_tokens=40, ignore_eos=True)
    runner.step()
    runner.finish_steps()
    return runner


def requests_of(step: Step) -> set[int]:
    return {sequence[0] for sequence in step.sequences}


@pytest.mark.parametrize("num_steps", [2, 3, 4])
@pytest.mark.parametrize("count", [4, 5, 8, 12])
def test_as_many_steps_as_are_in_flight_share_the_sequences(num_steps: int, count: int) -> None:
    runner = decoding(num_steps, count)
    steps = [requests_of(runner.step()) for _ in range(4 * num_steps)]
    share = -(-count // num_steps)
    for first in range(len(steps) - num_steps + 1):
        together = steps[first : first + num_steps]
        assert sum(map(len, together)) == len(set().union(*together))  # none is in two
        assert max(map(len, together)) == share
    assert set().union(*steps) == set(range(count))
    runner.run()
    for i, prompt in enumerate(PROMPTS[:count]):
        assert runner.tokens(i) == expected_tokens(prompt, 40)


def test_one_sequence_alone_waits_for_its_step() -> None:
    runner = decoding(2, 1)
    plan = runner.scheduler.schedule()
    assert [s.request_id for s in plan.sequences] == [0]
    behind = runner.scheduler.schedule()
    assert not behind.sequences
    assert [d.kind for d in behind.decisions] == ["waits_for_step"]


def test_each_step_in_flight_has_the_next_chunk_of_a_prompt() -> None:
    runner = make_runner(4, max_num_batched_tokens=8)
    runner.add(0, list(range(40)), max_tokens=2, ignore_eos=True)
    plans = [runner.scheduler.schedule() for _ in range(4)]
    assert [plan.sequences[0].start_position for plan in plans] == [0, 8, 16, 24]
    assert runner.scheduler.sequences()[0].num_scheduled == 32


@pytest.mark.parametrize("num_steps", [2, 4])
def test_a_small_pool_gives_the_tokens_of_one_step_at_a_time(num_steps: int) -> None:
    runner = make_runner(num_steps, num_blocks=26, max_num_batched_tokens=16)
    for i, prompt in enumerate(PROMPTS):
        runner.add(i, prompt, max_tokens=12, n=1 + i % 2, ignore_eos=True)
    steps = runner.run()
    assert any(decision[2] == "preempted" for step in steps for decision in step.decisions)
    for i, prompt in enumerate(PROMPTS):
        for sample in range(1 + i % 2):
            expected = expected_tokens(prompt, 12, sample_index=sample)
            assert runner.tokens(i, sample) == expected
    runner.check()


def test_replaced_blocks_wait_for_every_step_that_reads_them() -> None:
    """Two equal prompts that run at once: the second's blocks give way to the first's while later
    chunks of it are in flight, which were planned with the old ones."""
    runner = make_runner(4, max_num_batched_tokens=8, num_blocks=64)
    for i in range(2):
        runner.add(i, list(range(48)), max_tokens=3, ignore_eos=True)
    runner.run()
    assert runner.tokens(0) == runner.tokens(1) == expected_tokens(list(range(48)), 3)
    runner.check()


def test_an_abort_takes_effect_when_no_step_in_flight_runs_the_request() -> None:
    runner = make_runner(4, max_num_batched_tokens=8)
    runner.add(0, list(range(40)), max_tokens=2)
    for _ in range(3):
        runner.step()
    runner.scheduler.abort(0)
    assert runner.outputs == {}
    runner.run()
    assert runner.outputs[0, 0].finish_reason == "abort"
    runner.check()


def test_a_step_that_fails_ends_those_of_all_steps_in_flight_and_nobody_else() -> None:
    runner = decoding(3, 9)
    runner.add(9, PROMPTS[9], max_tokens=4, ignore_eos=True)
    plans = [runner.scheduler.schedule() for _ in range(2)]
    in_flight = {s.request_id for plan in plans for s in plan.sequences}
    runner.scheduler.fail_step("told to")
    failed = {e.request_id for e in runner.scheduler.take_events() if e.finish_reason == "error"}
    assert failed == in_flight
    runner.run()
    assert all(runner.outputs[i, 0].finish_reason == "length" for i in set(range(10)) - failed)
    runner.check()


def test_no_more_steps_are_in_flight_than_can_be() -> None:
    for count in (0, 5):
        with pytest.raises(
            errors.InvalidArgument, match=f"max_in_flight must be 1 to 4, got {count}"
        ):
            make_scheduler(num_blocks=4, max_in_flight=count, runs_ahead=False)


def test_each_step_takes_a_part_of_the_prompts_that_are_there() -> None:
    """Of 3,200 tokens two stages get eight parts or so, and of few tokens no less than 128."""
    runner = make_runner(2, num_blocks=1024, max_num_batched_tokens=2048)
    for i in range(4):
        runner.add(i, [10 * i + j % 7 for j in range(800)], max_tokens=2, ignore_eos=True)
    sizes = [step.num_prefill_tokens for step in runner.run() if step.num_prefill_tokens]
    assert sizes[0] == 400
    assert 128 <= max(sizes[1:]) <= 400
    assert 8 <= len(sizes) <= 20
    alone = make_runner(1, num_blocks=1024, max_num_batched_tokens=2048)
    alone.add(0, list(range(800)), max_tokens=2, ignore_eos=True)
    assert alone.step().num_prefill_tokens == 800


def sizes_after(us_a_step: int, us_a_token: int) -> list[int]:
    """Of steps of eight that decode, at the end of many, where a step takes so long."""
    runner = make_runner(2, max_num_batched_tokens=256, num_blocks=512)
    for i, prompt in enumerate(PROMPTS[:8]):
        runner.add(i, prompt, max_tokens=200, ignore_eos=True)
    sizes = []
    while runner.scheduler.has_unfinished():
        step = runner.step()
        # It has begun when those before it have ended: only the time of commits is looked at.
        if step.sequences:
            runner.scheduler.advance_us(us_a_step + us_a_token * step.num_tokens)
            sizes.append(step.num_tokens)
    return sizes[-40:-20]


def test_sequences_are_shared_out_as_costs_least() -> None:
    assert set(sizes_after(us_a_step=0, us_a_token=10)) == {4}
    assert set(sizes_after(us_a_step=100, us_a_token=0)) == {8}
