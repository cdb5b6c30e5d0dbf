"""A sequence's blocks go to a peer at its end, and another request goes on with them."""

from __future__ import annotations

import pytest
from llmserve import _core, errors
from llmserve import _core_testing as testing
from scripted import Runner, expected_tokens

PROMPT = list(range(1, 11))
NUM_TOKENS = 4
HAND_OVER = (1, 7)  # peer, id


def send(
    runner: Runner, *, max_tokens: int = NUM_TOKENS, **fields: object
) -> list[testing.Transfer]:
    """Runs a request to its end, and returns the transfers that send its blocks."""
    runner.add(0, PROMPT, max_tokens=max_tokens, send_to=HAND_OVER, **fields)
    runner.run()
    runner.step()
    sent = runner.transfers
    assert all(one.hand_over == HAND_OVER and not one.is_load for one in sent)
    assert [one.is_first for one in sent] == [True] + [False] * (len(sent) - 1)
    assert [one.is_last for one in sent] == [False] * (len(sent) - 1) + [True]
    return list(sent)


def carry_out(runner: Runner, sent: list[testing.Transfer]) -> None:
    for one in sent:
        runner.model.carry_out(one)
        testing.transfer_done(runner.scheduler, one.id)


def test_what_was_to_go_is_not_sent_from_a_pool_that_is_given_back() -> None:
    runner = Runner(num_blocks=32)
    runner.add(0, PROMPT, max_tokens=NUM_TOKENS, send_to=HAND_OVER)
    runner.run()  # the last blocks wait for a plan
    testing.cancel_sends(runner.scheduler)
    sent = testing.transfers(runner.scheduler.schedule())
    assert all(one.is_withdrawal for one in sent)
    runner.scheduler.check_integrity()


def plan_of_transfers(runner: Runner) -> _core.StepPlan:
    plan = runner.scheduler.schedule()
    runner.flights.append(runner.model.execute(plan))
    runner.finish_steps()
    return plan


def receive(runner: Runner, prompt: list[int], **fields: object) -> testing.Transfer:
    runner.add(1, prompt, max_tokens=NUM_TOKENS, receive_from=HAND_OVER, **fields)
    plan = plan_of_transfers(runner)
    assert not plan.sequences
    assert [d.kind for d in plan.decisions] == ["admitted", "waits_for_transfer"]
    (transfer,) = testing.transfers(plan)
    assert transfer.hand_over == HAND_OVER
    assert transfer.is_load
    return transfer


@pytest.mark.parametrize("windows", [[0], [0, 6]])
@pytest.mark.parametrize("caching", [True, False])
def test_a_received_sequence_runs_its_last_token_alone(windows: list[int], caching: bool) -> None:
    config = {"windows": windows, "enable_prefix_caching": caching}
    runner = Runner(num_blocks=32, **config)
    sent = send(runner)
    carry_out(runner, sent)
    runner.scheduler.reset_prefix_cache()
    prompt = PROMPT + runner.tokens(0)
    received = receive(runner, prompt)
    # And one more of a window, for who runs the last computed token again.
    places = {(group, block) for one in sent for group, _, block in one.moves}
    assert places >= {(group, block) for group, block, _ in received.moves}
    assert len(places) - len(received.moves) == windows.count(6)
    assert runner.scheduler.sequences()[0].state == "loading"
    runner.model.carry_out(received)
    testing.transfer_done(runner.scheduler, received.id)
    step = runner.step()
    assert step.sequences == [(1, 0, len(prompt) - 1, 1)]
    runner.run()
    runner.check()
    assert runner.tokens(1) == expected_tokens(prompt, NUM_TOKENS)
    assert runner.outputs[1, 0].events[-1].num_cached_tokens == len(prompt) - 1


def test_what_the_pool_has_is_not_received_again() -> None:
    runner = Runner(num_blocks=32)
    sent = send(runner)
    carry_out(runner, sent)
    prompt = PROMPT + runner.tokens(0)  # 14 tokens in blocks of 4, 13 of them computed
    received = receive(runner, prompt)
    assert [place for _, place, _ in received.moves] == [3]
    runner.model.carry_out(received)
    testing.transfer_done(runner.scheduler, received.id)
    runner.run()
    assert runner.tokens(1) == expected_tokens(prompt, NUM_TOKENS)


def test_with_everything_here_the_peer_is_told_all_the_same() -> None:
    runner = Runner(num_blocks=32)
    sent = send(runner, max_tokens=3)  # 12 of its tokens fill three blocks
    carry_out(runner, sent)
    prompt = PROMPT + runner.tokens(0)
    received = receive(runner, prompt)
    assert received.moves == []
    testing.transfer_done(runner.scheduler, received.id)
    assert runner.step().sequences == [(1, 0, 12, 1)]
    runner.run()
    assert runner.tokens(1) == expected_tokens(prompt, NUM_TOKENS)


def test_blocks_that_do_not_come_are_computed() -> None:
    runner = Runner(num_blocks=32)
    received = receive(runner, PROMPT)
    testing.transfer_failed(runner.scheduler, received.id)
    assert runner.scheduler.sequences()[0].state == "waiting"
    assert runner.scheduler.metrics().num_blocks_used == 0
    assert runner.step().sequences == [(1, 0, 0, len(PROMPT))]
    runner.run()
    runner.check()
    assert runner.tokens(1) == expected_tokens(PROMPT, NUM_TOKENS)


def test_a_received_sequence_that_is_preempted_asks_its_peer_for_nothing_more() -> None:
    runner = Runner(num_blocks=32)
    received = receive(runner, PROMPT)
    # The peer's blocks: of the same tokens.
    other = Runner(num_blocks=32)
    sent = send(other, max_tokens=1)
    runner.model = other.model
    carry_out(other, sent)
    runner.model.carry_out(received)
    testing.transfer_done(runner.scheduler, received.id)
    runner.step()
    runner.scheduler.preempt(1)
    runner.scheduler.reset_prefix_cache()
    plan = plan_of_transfers(runner)
    assert testing.transfers(plan) == []
    assert [s.num_tokens for s in plan.sequences] == [len(PROMPT) + 1]
    runner.run()
    assert runner.tokens(1) == expected_tokens(PROMPT, NUM_TOKENS)


def test_sent_blocks_are_held_until_the_transfer_has_ended() -> None:
    runner = Runner(num_blocks=8, enable_prefix_caching=False)
    sent = send(runner)
    assert runner.scheduler.metrics().num_blocks_used == 4  # 13 tokens
    runner.add(1, list(range(100, 120)), max_tokens=1)  # needs six of the eight
    assert runner.step().sequences == []
    runner.scheduler.check_integrity()
    carry_out(runner, sent)
    runner.run()
    runner.check()
    assert runner.tokens(1) == expected_tokens(list(range(100, 120)), 1)


@pytest.mark.parametrize("ending", ["aborted", "failed", "lost"])
def test_what_is_not_whole_or_not_to_be_trusted_is_not_sent(ending: str) -> None:
    runner = Runner(num_blocks=32)
    runner.add(0, PROMPT, max_tokens=NUM_TOKENS, send_to=HAND_OVER)
    runner.step()
    if ending == "aborted":
        runner.scheduler.abort(0)
    elif ending == "failed":
        runner.scheduler.fail("asked to")
    else:
        runner.run()  # the last of it has begun to be sent, and no plan has that yet
        testing.rank_lost(runner.scheduler, 0)
    if ending == "lost":
        (withdrawn,) = testing.transfers(plan_of_transfers(runner))
        assert withdrawn.is_withdrawal
        assert withdrawn.hand_over == HAND_OVER
        assert runner.scheduler.metrics().num_blocks_used == 3  # sent before, and held
        carry_out(runner, [*runner.transfers, withdrawn])
    else:  # nobody has heard of it
        assert testing.transfers(plan_of_transfers(runner)) == []
    assert runner.scheduler.metrics().num_blocks_used == 0


LONG = [7 + i * 5 % 90 for i in range(38)]  # in blocks of 4, the last of 2 tokens


def places(sent: list[testing.Transfer], group: int = 0) -> list[int]:
    return [place for one in sent for which, _, place in one.moves if which == group]


def test_full_blocks_go_as_soon_as_they_are_computed() -> None:
    runner = Runner(num_blocks=32, max_num_batched_tokens=10)
    runner.add(0, LONG, max_tokens=1, send_to=HAND_OVER)
    # Of the steps before: 10, 20 and 30 tokens.
    for num_before in (0, 2, 5, 7):
        runner.step()
        assert places(runner.transfers) == list(range(num_before))
    runner.step()
    assert places(runner.transfers) == list(range(10))
    # Of the last step what is full, and the rest.
    assert [one.is_first for one in runner.transfers] == [True, False, False, False, False]
    assert [one.is_last for one in runner.transfers] == [False, False, False, False, True]
    assert runner.scheduler.metrics().num_blocks_used == 10
    carry_out(runner, runner.transfers)
    assert runner.scheduler.metrics().num_blocks_used == 0
    # What was sent in parts is received as one.
    runner.scheduler.reset_prefix_cache()
    received = receive(runner, LONG)
    carry_out(runner, [received])
    runner.run()
    runner.check()
    assert runner.tokens(1) == expected_tokens(LONG, NUM_TOKENS)


def test_of_a_window_only_what_its_end_looks_at_is_sent() -> None:
    runner = Runner(num_blocks=32, max_num_batched_tokens=10, windows=[0, 6])
    runner.add(0, LONG, max_tokens=1, send_to=HAND_OVER)
    runner.run()
    runner.step()
    assert places(runner.transfers) == list(range(10))
    assert places(runner.transfers, group=1) == [8, 9]


def test_what_is_found_in_the_cache_goes_with_the_first_that_is_computed() -> None:
    runner = Runner(num_blocks=32, max_num_batched_tokens=10)
    runner.add(1, LONG[:24], max_tokens=1)
    runner.run()
    runner.add(0, LONG, max_tokens=1, send_to=HAND_OVER)
    runner.step()
    runner.step()
    assert places(runner.transfers) == list(range(8))


@pytest.mark.parametrize("ending", ["preempted", "aborted", "failed"])
def test_what_was_sent_of_a_prompt_without_an_end_is_withdrawn(ending: str) -> None:
    runner = Runner(num_blocks=32, max_num_batched_tokens=10, enable_prefix_caching=False)
    runner.add(0, LONG, max_tokens=1, send_to=HAND_OVER)
    for _ in range(3):
        runner.step()
    first, second = runner.transfers
    if ending == "preempted":
        runner.scheduler.preempt(0)
    elif ending == "aborted":
        runner.scheduler.abort(0)
    else:
        runner.scheduler.fail("asked to")
    runner.step()
    withdrawn = runner.transfers[2]
    assert withdrawn.is_withdrawal
    assert withdrawn.moves == []
    # Its sender ends all, and gives the blocks back.
    carry_out(runner, [first, second, withdrawn])
    runner.run()
    runner.step()
    again = runner.transfers[3:]
    if ending == "preempted":  # a peer that comes now gets all of it
        assert places(again) == list(range(10))
        assert again[0].is_first
        assert again[-1].is_last
        carry_out(runner, again)
    else:
        assert again == []
    assert runner.scheduler.metrics().num_blocks_used == 0


def test_blocks_that_still_come_are_nobody_elses() -> None:
    """A write that comes late must not find another sequence's block."""
    runner = Runner(num_blocks=8, enable_prefix_caching=False)
    received = receive(runner, PROMPT)
    runner.scheduler.abort(1)
    assert runner.scheduler.metrics().num_blocks_used == 3
    runner.add(2, list(range(100, 124)), max_tokens=1)  # needs six of the eight
    assert runner.step().sequences == []
    testing.transfer_failed(runner.scheduler, received.id)
    runner.run()
    runner.check()
    assert runner.tokens(2) == expected_tokens(list(range(100, 124)), 1)


@pytest.mark.parametrize(
    "fields",
    [{"n": 2}, {"beam_width": 2}, {"is_pooled": True}, {"has_embeds": True},
     {"prompt_logprobs": 1}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("field", ["receive_from", "send_to"])
def test_one_sequence_of_token_ids_is_handed_over(fields: dict[str, object], field: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=f"{field}: one sequence of token ids"):
        Runner(num_blocks=32).add(0, PROMPT, max_tokens=2, **fields, **{field: HAND_OVER})
