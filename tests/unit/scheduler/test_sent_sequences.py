"""A sequence's blocks go to a peer at its end, and another request goes on with them."""

from __future__ import annotations

import pytest
from llmserve import _core, errors
from llmserve import _core_testing as testing
from scripted import Runner, expected_tokens

PROMPT = list(range(1, 11))
NUM_TOKENS = 4
HAND_OVER = (1, 7)  # peer, id


def send(runner: Runner, *, max_tokens: int = NUM_TOKENS, **fields: object) -> testing.Transfer:
    """Runs a request to its end, and returns the transfer that sends its blocks."""
    runner.add(0, PROMPT, max_tokens=max_tokens, send_to=HAND_OVER, **fields)
    runner.run()
    (transfer,) = testing.transfers(plan_of_transfers(runner))
    assert transfer.hand_over == HAND_OVER
    assert not transfer.is_load
    return transfer


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
    runner.model.carry_out(sent)
    testing.transfer_done(runner.scheduler, sent.id)
    runner.scheduler.reset_prefix_cache()
    prompt = PROMPT + runner.tokens(0)
    received = receive(runner, prompt)
    # And one more of a window, for who runs the last computed token again.
    places = {(group, block) for group, _, block in sent.moves}
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
    runner.model.carry_out(sent)
    testing.transfer_done(runner.scheduler, sent.id)
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
    testing.transfer_done(runner.scheduler, sent.id)
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
    runner.model.carry_out(sent)
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
    testing.transfer_done(runner.scheduler, sent.id)
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
        runner.run()  # the send has begun, and no plan has it yet
        testing.rank_lost(runner.scheduler, 0)
    assert testing.transfers(plan_of_transfers(runner)) == []
    assert runner.scheduler.metrics().num_blocks_used == 0


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
