"""What finishes beside the steps enters as a record, and changes no token."""

from __future__ import annotations

import pytest
from llmserve import _core, errors
from llmserve import _core_testing as testing
from scripted import Runner, expected_tokens

PROMPT = [5, 6, 7]


def drafting_runner(max_tokens: int = 12, **config: int) -> Runner:
    runner = Runner(num_blocks=32, **config)
    runner.add(0, PROMPT, max_tokens=max_tokens, seed=1, has_drafter=True)
    runner.step()
    return runner


def draft(runner: Runner, token_ids: list[int], num_behind: int = 0) -> None:
    (record,) = runner.scheduler.sequences()
    position = len(record.token_ids) - num_behind
    testing.draft_ready(runner.scheduler, 0, 0, position, token_ids)


def test_right_guesses_are_tokens_of_the_same_step() -> None:
    runner = drafting_runner()
    known = expected_tokens(PROMPT, 12, seed=1)
    draft(runner, known[1:4])
    step = runner.step()
    assert step.sequences == [(0, 0, 3, 4)]
    assert step.num_logit_rows == 4
    assert runner.outputs[0, 0].token_ids == known[:5]
    runner.run()
    assert runner.outputs[0, 0].token_ids == known


def test_a_wrong_guess_costs_its_successors_and_no_token() -> None:
    runner = drafting_runner()
    known = expected_tokens(PROMPT, 12, seed=1)
    draft(runner, [known[1], known[2] + 1, known[3]])
    runner.step()
    assert runner.outputs[0, 0].token_ids == known[:3]
    (record,) = runner.scheduler.sequences()
    assert (record.num_computed, record.num_scheduled) == (5, 5)
    runner.run()
    assert runner.outputs[0, 0].token_ids == known


def test_a_guess_of_another_place_is_not_run() -> None:
    runner = drafting_runner()
    known = expected_tokens(PROMPT, 12, seed=1)
    draft(runner, known[:3], num_behind=1)
    assert runner.step().sequences == [(0, 0, 3, 1)]


@pytest.mark.parametrize("max_tokens", [2, 3, 4])
def test_guesses_do_not_run_beyond_max_tokens(max_tokens: int) -> None:
    runner = drafting_runner(max_tokens)
    known = expected_tokens(PROMPT, 12, seed=1)
    draft(runner, known[1:6])
    runner.step()
    assert runner.outputs[0, 0].token_ids == known[:max_tokens]
    assert runner.outputs[0, 0].finish_reason == "length"


def test_a_stop_token_among_the_guesses_ends_the_sequence_there() -> None:
    known = expected_tokens(PROMPT, 12, seed=1)
    runner = Runner(num_blocks=32)
    runner.add(0, PROMPT, max_tokens=12, seed=1, has_drafter=True, stop_token_ids=[known[2]])
    runner.step()
    draft(runner, known[1:5])
    runner.step()
    output = runner.outputs[0, 0]
    assert (output.token_ids, output.finish_reason) == (known[:3], "stop")
    assert runner.scheduler.metrics().num_blocks_used == 0


def test_guesses_take_no_token_from_others() -> None:
    runner = Runner(num_blocks=32, max_num_batched_tokens=3, max_num_seqs=3)
    known = expected_tokens(PROMPT, 12, seed=1)
    runner.add(0, PROMPT, max_tokens=12, seed=1, has_drafter=True)
    runner.step()
    runner.add(1, [8, 9], max_tokens=12, seed=1)
    runner.step()
    testing.draft_ready(runner.scheduler, 0, 0, 5, known[2:5])
    assert runner.step().sequences == [(0, 0, 4, 2), (1, 0, 2, 1)]


def test_rejected_tokens_are_not_found_by_later_prompts() -> None:
    runner = drafting_runner(block_size=4)
    wrong = [900, 901, 902, 903]
    draft(runner, wrong)
    runner.run()
    known = expected_tokens(PROMPT, 12, seed=1)
    runner.add(1, [*PROMPT, known[0], *wrong, 1], max_tokens=2, seed=1)
    runner.run()
    assert runner.outputs[1, 0].events[0].num_cached_tokens == 4  # what both begin with


def test_a_request_that_goes_on_gives_what_it_would_have_given() -> None:
    known = expected_tokens(PROMPT, 12, seed=1)
    runner = Runner(num_blocks=32)
    runner.add(0, PROMPT, max_tokens=12, seed=1, resumed_token_ids=known[:5])
    runner.run()
    assert runner.outputs[0, 0].token_ids == known[5:]


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"n": 2}, "n must be 1"), ({"max_tokens": 2}, "nothing to go on with")],
)
def test_a_request_that_cannot_go_on_is_refused(fields: dict[str, int], message: str) -> None:
    runner = Runner(num_blocks=32)
    with pytest.raises(errors.InvalidArgument, match=message):
        runner.add(0, PROMPT, **{"max_tokens": 8, **fields}, resumed_token_ids=[1, 2])


def test_a_request_waits_for_its_grammar_and_holds_up_nobody() -> None:
    runner = Runner(num_blocks=32)
    runner.add(0, PROMPT, max_tokens=2, awaits_grammar=True)
    runner.add(1, [8, 9], max_tokens=2)
    step = runner.step()
    assert [sequence[0] for sequence in step.sequences] == [1]
    assert (0, 0, "waits_for_grammar", 0) in step.decisions
    testing.grammar_failed(runner.scheduler, 0, "no such rule")
    runner.take(runner.scheduler.take_events())
    event = runner.outputs[0, 0].events[-1]
    assert (event.finish_reason, event.error) == ("error", "no such rule")


def test_a_lost_rank_costs_time_and_no_token() -> None:
    runner = Runner(num_blocks=32)
    runner.add(0, PROMPT, n=2, max_tokens=6, seed=1)
    runner.step()
    runner.step()
    runner.scheduler.schedule()  # in flight
    runner.model.forget()
    testing.rank_lost(runner.scheduler, 0)
    runner.check()
    assert runner.scheduler.metrics().num_blocks_used == 0
    runner.run()
    for i in range(2):
        known = expected_tokens(PROMPT, 6, seed=1, sample_index=i)
        assert runner.outputs[0, i].token_ids == known


def test_news_of_what_is_there_no_more_change_nothing() -> None:
    runner = Runner(num_blocks=32)
    testing.draft_ready(runner.scheduler, 7, 0, 3, [1])
    testing.grammar_ready(runner.scheduler, 7, _core.SamplingParams())
    runner.check()


def test_keys_that_change_share_the_service_among_tenants() -> None:
    runner = Runner(num_blocks=64, max_num_seqs=1, is_fair=True)
    for i in range(6):
        runner.add(i, [i, 1, 2], max_tokens=4, tenant="busy")
    runner.add(6, [9, 1, 2], max_tokens=4, tenant="quiet")
    order: list[int] = []
    while runner.scheduler.has_unfinished():
        order += [sequence[0] for sequence in runner.step().sequences]
        runner.check()
    served = list(dict.fromkeys(order))
    assert served.index(6) == 1  # behind the one that ran already, before five that came first


def test_the_policys_victim_gives_its_blocks_back() -> None:
    """The sequence that has computed the least, not the last in the order of service."""
    runner = Runner(num_blocks=9, block_size=2, is_fair=True, max_num_batched_tokens=32)
    runner.add(0, [1], max_tokens=12, tenant="a")
    runner.add(1, [2, 3, 4, 5, 6, 7], max_tokens=12, tenant="b")
    preempted: list[int] = []
    while runner.scheduler.has_unfinished():
        preempted += [d[0] for d in runner.step().decisions if d[2] == "preempted"]
        runner.check()
    assert preempted
    assert preempted[0] == 0
