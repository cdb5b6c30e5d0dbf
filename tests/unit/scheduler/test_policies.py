"""Scheduling policies: who is served first, and when a batch starts."""

from __future__ import annotations

import pytest
from llmserve import _core
from scripted import Runner, Step, expected_tokens

POLICIES = [name for name, _ in _core.supported_policies()]


def ids(step: Step) -> list[int]:
    return [s[0] for s in step.sequences]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_policies_that_read_a_priority_are_told(policy: str) -> None:
    runner = Runner(num_blocks=8, policy=policy, max_num_seqs=1)
    runner.add(0, [5, 6], max_tokens=1)
    runner.add(1, [5, 6], max_tokens=1, priority=-1)
    runner.scheduler.advance_us(20_000)  # longer than any of them waits
    is_first = ids(runner.step()) == [1]
    assert is_first == (policy in _core.policies_with_priority())


def test_each_policy_has_a_name_and_a_summary() -> None:
    assert {"fcfs", "priority", "static", "dynamic"} <= set(POLICIES)
    assert len(set(POLICIES)) == len(POLICIES)
    assert all(summary for _, summary in _core.supported_policies())


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_gives_every_request_its_tokens(policy: str) -> None:
    runner = Runner(num_blocks=12, policy=policy, max_num_seqs=3)
    prompts = {request: [request, 1, 2, 3, 4] for request in range(10)}
    for request, prompt in prompts.items():
        runner.add(request, prompt, max_tokens=3 + request, priority=-request, n=1 + request % 2)
    while runner.scheduler.has_unfinished():
        runner.step()
        runner.check()
        runner.scheduler.advance_us(1_000)
    for request, prompt in prompts.items():
        assert runner.tokens(request) == expected_tokens(prompt, 3 + request)


def test_fcfs_serves_in_the_order_of_arrival() -> None:
    runner = Runner(num_blocks=32, max_num_seqs=1)
    for request in (5, 3, 9):
        runner.add(request, [1, 2], max_tokens=1, priority=-request)
    runner.run()
    assert runner.finished_requests == [5, 3, 9]


def test_priority_serves_lower_values_first_and_ties_by_arrival() -> None:
    runner = Runner(num_blocks=32, policy="priority", max_num_seqs=1)
    for request, priority in ((1, 2), (2, 0), (3, 0), (4, 1)):
        runner.add(request, [1, 2], max_tokens=1, priority=priority)
    runner.run()
    assert runner.finished_requests == [2, 3, 4, 1]


def test_priority_preempts_the_least_urgent() -> None:
    runner = Runner(num_blocks=6, policy="priority")
    runner.add(1, [1] * 4, max_tokens=16, priority=1)
    runner.add(2, [2] * 4, max_tokens=16, priority=0)
    steps = runner.run()
    preempted = {d[0] for s in steps for d in s.decisions if d[2] == "preempted"}
    assert preempted == {1}


def test_static_admits_nobody_until_the_batch_has_ended() -> None:
    runner = Runner(num_blocks=64, policy="static", max_num_seqs=2)
    for request, length in ((1, 1), (2, 4), (3, 1), (4, 1)):
        runner.add(request, [request] * 3, max_tokens=length)
    steps = [ids(step) for step in runner.run()]
    assert steps == [[1, 2], [2], [2], [2], [3, 4]]


def test_static_starts_a_part_batch_once_nothing_more_arrives() -> None:
    runner = Runner(num_blocks=64, policy="static", max_num_seqs=4)
    runner.add(1, [1], max_tokens=1)
    step = runner.step()
    assert step.sequences == []
    assert [d[2] for d in step.decisions] == ["waits_for_batch"]
    assert runner.scheduler.wake_us() == 0  # at once
    runner.add(2, [2], max_tokens=1)
    assert ids(runner.step()) == []
    assert ids(runner.step()) == [1, 2]


def test_dynamic_starts_when_full_or_when_the_oldest_has_waited() -> None:
    runner = Runner(num_blocks=64, policy="dynamic", max_num_seqs=2)
    runner.scheduler.advance_us(100)
    runner.add(1, [1], max_tokens=1)
    assert ids(runner.step()) == []
    assert runner.scheduler.wake_us() == 2_100
    runner.scheduler.advance_us(1_999)
    assert ids(runner.step()) == []
    runner.scheduler.advance_us(1)
    assert ids(runner.step()) == [1]
    for request in (2, 3):
        runner.add(request, [request], max_tokens=1)
    assert ids(runner.step()) == [2, 3]


def delay_of_a_lone_request(runner: Runner, request_id: int) -> int:
    """Microseconds that it waits for others, in simulated time."""
    runner.add(request_id, [1], max_tokens=1)
    delay_us = 0
    while not ids(runner.step()):
        runner.scheduler.advance_us(500)
        delay_us += 500
    return delay_us


def test_dynamic_waits_longer_after_small_batches_and_less_after_full_ones() -> None:
    runner = Runner(num_blocks=64, policy="dynamic", max_num_seqs=2)
    delays_us = [delay_of_a_lone_request(runner, request) for request in range(12)]
    assert delays_us == [*range(2_000, 10_000, 1_000), 10_000, 10_000, 10_000, 10_000]
    after_full_us = []
    for batch in range(4):
        for member in range(2):
            runner.add(100 + 10 * batch + member, [1], max_tokens=1)
        assert len(ids(runner.step())) == 2
        runner.add(105 + 10 * batch, [1], max_tokens=1)
        assert ids(runner.step()) == []
        now_us = sum(delays_us)
        wake_us = runner.scheduler.wake_us()
        assert wake_us is not None
        after_full_us.append(wake_us - now_us)
        runner.scheduler.abort(105 + 10 * batch)
    assert after_full_us == [5_000, 2_500, 2_000, 2_000]


@pytest.mark.parametrize("policy", ["static", "dynamic"])
def test_a_preempted_member_rejoins_its_batch(policy: str) -> None:
    runner = Runner(num_blocks=64, policy=policy, max_num_seqs=2, max_batch_delay_us=0)
    for request in (1, 2, 3):
        runner.add(request, [request] * 3, max_tokens=4)
    runner.step()
    runner.scheduler.preempt(2)
    assert ids(runner.step()) == [1, 2]


def test_a_member_aborted_in_the_queue_leaves_no_gap() -> None:
    runner = Runner(num_blocks=4, policy="static", max_num_seqs=2)
    for request in (1, 2, 3):
        runner.add(request, [request] * 9, max_tokens=2)
    assert ids(runner.step()) == [1]  # 2 belongs to the batch but does not fit
    runner.scheduler.abort(2)
    runner.run(max_steps=20)
    assert sorted(runner.finished_requests) == [1, 2, 3]
