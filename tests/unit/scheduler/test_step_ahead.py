"""Two steps in flight: the same tokens as one after the other, and nothing given out too early."""

from __future__ import annotations

import random
from typing import Any

import pytest
from llmserve import errors
from scripted import VOCAB_SIZE, Output, Runner, make_scheduler

LETTERS = [bytes([97 + i % 26]) for i in range(VOCAB_SIZE)]


def make_runner(max_in_flight: int = 2, **config: Any) -> Runner:
    return Runner(**{"num_blocks": 64, "max_in_flight": max_in_flight, **config})


def outcome(output: Output) -> tuple[list[int], bytes, str]:
    return output.token_ids, output.text, output.finish_reason


def run_workload(seed: int, max_in_flight: int, policy: str) -> dict[tuple[int, int], Any]:
    """Requests of all kinds in a pool that is too small for them, some aborted before any token."""
    draw = random.Random(seed)
    runner = make_runner(
        max_in_flight,
        num_blocks=14,
        policy=policy,
        max_num_seqs=5,
        max_num_batched_tokens=9,
        bytes_by_id=LETTERS,
    )
    for request_id in range(16):
        prompt = [draw.randrange(2) for _ in range(draw.randint(1, 20))]
        fields: dict[str, Any] = {
            "n": draw.choice([1, 1, 1, 3]),
            "max_tokens": draw.randint(1, 24),
            "seed": draw.randrange(3),
            "priority": draw.randrange(3),
            "stop_token_ids": draw.choice([[], list(range(0, 1000, 20))]),
            "stop": draw.choice([[], ["q"], ["ab", "xyz"], ["e"]]),
            "logprobs": draw.choice([None, None, 2]),
        }
        fields["min_tokens"] = draw.choice([0, 0, fields["max_tokens"] // 2])
        runner.add(request_id, prompt, **fields)
        if draw.random() < 0.1:
            runner.scheduler.abort(request_id)
        for _ in range(draw.randrange(3)):
            runner.step()
            runner.check()
    runner.run()
    runner.check()
    metrics = runner.scheduler.metrics()
    assert metrics.num_preemptions > 0
    assert metrics.num_blocks_used == 0
    return {key: outcome(output) for key, output in runner.outputs.items()}


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("seed", range(6))
def test_tokens_texts_and_ends_are_those_of_one_step_at_a_time(seed: int, policy: str) -> None:
    one, two = (run_workload(seed, count, policy) for count in (1, 2))
    assert one == two
    assert {reason for _, _, reason in one.values()} >= {"stop", "length"}


def test_the_second_plan_names_the_row_that_draws_its_token() -> None:
    runner = make_runner()
    runner.add(0, [5, 6], max_tokens=1)  # its only token is known to be the last
    runner.add(1, [7, 8, 9], max_tokens=4)
    first = runner.scheduler.schedule()
    second = runner.scheduler.schedule()
    assert [s.awaited_row for s in first.sequences] == [-1, -1]
    (decode,) = second.sequences
    assert (decode.request_id, decode.awaited_row, decode.start_position) == (1, 1, 3)
    assert (decode.num_tokens, decode.is_prefill) == (1, False)
    with pytest.raises(errors.InvalidArgument, match="commit the last plan"):
        runner.scheduler.schedule()


def test_the_next_chunk_of_a_prompt_runs_before_the_last_is_committed() -> None:
    runner = make_runner(max_num_batched_tokens=8)
    runner.add(0, list(range(20)), max_tokens=2)
    starts = []
    for _ in range(2):
        (chunk,) = runner.scheduler.schedule().sequences
        starts.append((chunk.start_position, chunk.num_tokens))
    assert starts == [(0, 8), (8, 8)]


def who_went_on(fields: dict[str, Any]) -> tuple[set[int], list[int]]:
    """Whom the second plan runs, beside one that asks for nothing, and who waits in it."""
    runner = make_runner()
    runner.add(0, [1, 2, 3], max_tokens=8, **fields)
    runner.add(1, [4, 5, 6], max_tokens=8)
    runner.scheduler.schedule()
    plan = runner.scheduler.schedule()
    waits = [d.request_id for d in plan.decisions if d.kind == "waits_for_step"]
    return {sequence.request_id for sequence in plan.sequences}, waits


@pytest.mark.parametrize(
    "fields",
    [
        {"bad_words": [[3]]},
        {"n": 2},
        {"prompt_logprobs": 1},
        {"beam_width": 2},
    ],
    ids=str,
)
def test_who_needs_the_newest_token_waits_and_the_others_go_on(fields: dict[str, Any]) -> None:
    # Once its prompt is scored, a request that wants no more than that goes on as any other.
    assert who_went_on(fields) == ({1}, [0])


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": 1},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.5},
        {"logit_bias": [(1, 2.0)]},
        {"allowed_token_ids": [1, 2]},
        {"min_tokens": 4, "stop_token_ids": [3]},
    ],
    ids=str,
)
def test_edits_that_the_device_can_make_and_reports_run_ahead(fields: dict[str, Any]) -> None:
    assert who_went_on(fields) == ({0, 1}, [])


def test_what_ends_by_its_token_keeps_its_blocks_until_the_step_ahead_is_over() -> None:
    runner = make_runner(num_blocks=4)
    expected = make_runner(1)
    expected.add(0, [1, 2, 3], max_tokens=2)
    expected.run()
    stop = expected.tokens(0)[0]
    runner.add(0, [1, 2, 3], max_tokens=8, stop_token_ids=[stop])
    plans = [runner.scheduler.schedule(), runner.scheduler.schedule()]
    drawn = [runner.model.execute(plan) for plan in plans]
    (block,) = plans[1].sequences[0].block_table
    (event,) = runner.scheduler.commit(drawn[0])
    assert (event.finish_reason, event.token_ids) == ("stop", [stop])
    assert runner.scheduler.has_unfinished()
    assert runner.scheduler.ref_count(block) == 1
    runner.scheduler.check_integrity()
    assert runner.scheduler.commit(drawn[1]) == []
    assert not runner.scheduler.has_unfinished()
    assert runner.scheduler.metrics().num_blocks_free == 4


def test_a_token_that_is_not_committed_is_not_in_the_prefix_cache() -> None:
    runner = make_runner(block_size=4)
    runner.add(0, [1, 2, 3], max_tokens=8)
    plans = [runner.scheduler.schedule(), runner.scheduler.schedule()]
    drawn = [runner.model.execute(plan) for plan in plans]
    runner.scheduler.commit(drawn[0])
    runner.scheduler.abort(0)
    # The fourth position has been run with the token that was drawn, and nobody has taken it in.
    assert runner.scheduler.metrics().num_blocks_cached == 0
    runner.scheduler.commit(drawn[1])
    runner.check()


def test_an_abort_takes_effect_when_no_step_in_flight_runs_the_request() -> None:
    runner = make_runner()
    for request_id in range(2):
        runner.add(request_id, [1, 2, 3 + request_id], max_tokens=8)
    drawn = [runner.model.execute(runner.scheduler.schedule()) for _ in range(2)]
    runner.scheduler.abort(0)
    events = runner.scheduler.commit(drawn[0])
    assert [event.request_id for event in events] == [1]
    third = runner.scheduler.schedule()
    assert [sequence.request_id for sequence in third.sequences] == [1]
    events = runner.scheduler.commit(drawn[1])
    assert {e.request_id: e.finish_reason for e in events} == {0: "abort", 1: None}
    runner.scheduler.commit(runner.model.execute(third))
    runner.check()


def test_a_step_that_fails_takes_the_one_ahead_with_it_and_no_others() -> None:
    runner = make_runner(max_num_seqs=2)
    for request_id in range(3):
        runner.add(request_id, [1, 2, request_id], max_tokens=4)
    plans = [runner.scheduler.schedule() for _ in range(2)]
    assert {s.request_id for plan in plans for s in plan.sequences} == {0, 1}
    runner.scheduler.fail_step("told to")
    events = runner.scheduler.take_events()
    assert {event.request_id: event.finish_reason for event in events} == {0: "error", 1: "error"}
    runner.run()
    assert runner.outputs[2, 0].finish_reason == "length"
    runner.check()


def test_one_or_two_steps_are_in_flight() -> None:
    for count in (0, 3):
        message = f"max_in_flight must be 1 to 2 where plans run ahead, got {count}"
        with pytest.raises(errors.InvalidArgument, match=message):
            make_scheduler(num_blocks=4, max_in_flight=count)
