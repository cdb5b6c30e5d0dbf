"""Guesses that are a tree: the path of which most is right becomes the sequence's, the others leave
nothing behind, and nobody pays for them with a token or a block."""

from __future__ import annotations

from typing import Any

import pytest
from llmserve import _core_testing as testing
from scripted import VOCAB_SIZE, Runner, expected_tokens

PROMPT = [5, 6, 7]
KNOWN = expected_tokens(PROMPT, 30, seed=1)


def drafting_runner(max_tokens: int = 20, *, num_blocks: int = 32, **config: Any) -> Runner:
    runner = Runner(num_blocks=num_blocks, **config)
    runner.add(0, PROMPT, max_tokens=max_tokens, seed=1, has_drafter=True)
    runner.step()
    return runner


def draft(runner: Runner, own: list[int], *branches: list[int], request_id: int = 0) -> None:
    (record,) = (s for s in runner.scheduler.sequences() if s.request_id == request_id)
    position = len(record.token_ids)
    testing.draft_ready(runner.scheduler, request_id, 0, position, own, list(branches))


def wrong(token_id: int) -> int:
    return (token_id + 1) % VOCAB_SIZE


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize("shared", [0, 1, 2])
def test_the_path_of_which_most_is_right_is_taken(shared: int, block_size: int) -> None:
    runner = drafting_runner(block_size=block_size, num_blocks=64)
    right = KNOWN[1:5]
    own = right[:shared] + [wrong(token) for token in right[shared:]]
    other = right[:shared] + [wrong(wrong(token)) for token in right[shared:]]
    draft(runner, own, other, right)
    step = runner.step()
    assert step.sequences == [(0, 0, 3, 5)] * 3
    assert step.num_logit_rows == 15
    runner.check()
    assert runner.tokens(0) == KNOWN[:6]
    metrics = runner.scheduler.metrics()
    assert (metrics.num_drafts, metrics.num_accepted_tokens) == (1, 4)
    assert metrics.num_draft_tokens == 4 + 2 * (4 - shared)  # a guess of several paths is one
    runner.run()
    assert runner.tokens(0) == KNOWN[:20]
    runner.check()
    assert runner.scheduler.metrics().num_blocks_used == 0


def test_of_equal_paths_the_sequences_own_is_taken_and_nothing_is_lost() -> None:
    runner = drafting_runner()
    draft(runner, [KNOWN[1], wrong(KNOWN[2])], [KNOWN[1], wrong(wrong(KNOWN[2]))], [9, 9, 9])
    runner.step()
    assert runner.tokens(0) == KNOWN[:3]
    runner.check()
    (record,) = runner.scheduler.sequences()
    assert (record.num_computed, record.num_scheduled) == (5, 5)
    runner.run()
    assert runner.tokens(0) == KNOWN[:20]


def test_the_blocks_of_a_branch_that_was_taken_are_found_by_later_prompts() -> None:
    runner = drafting_runner(block_size=4)
    draft(runner, [wrong(KNOWN[1])], KNOWN[1:9])
    runner.run()
    runner.add(1, [*PROMPT, *KNOWN[:12]], max_tokens=3, seed=1)
    runner.run()
    assert runner.outputs[1, 0].events[0].num_cached_tokens == 12
    assert runner.tokens(1) == expected_tokens([*PROMPT, *KNOWN[:12]], 3, seed=1)


def test_wrong_branches_are_not_found_by_later_prompts() -> None:
    runner = drafting_runner(block_size=4)
    others = [900, 901, 902, 903, 904]
    draft(runner, KNOWN[1:3], others)
    runner.run()
    runner.add(1, [*PROMPT, KNOWN[0], *others], max_tokens=2, seed=1)
    runner.run()
    assert runner.outputs[1, 0].events[0].num_cached_tokens == 4
    runner.check()


@pytest.mark.parametrize("max_tokens", [2, 3, 5])
def test_branches_do_not_run_beyond_max_tokens(max_tokens: int) -> None:
    runner = drafting_runner(max_tokens)
    draft(runner, [wrong(KNOWN[1])], KNOWN[1:9])
    runner.run()
    assert runner.tokens(0) == KNOWN[:max_tokens]
    assert runner.outputs[0, 0].finish_reason == "length"
    runner.check()
    assert runner.scheduler.metrics().num_blocks_used == 0


def test_a_stop_token_on_a_branch_ends_the_sequence_there() -> None:
    runner = Runner(num_blocks=32)
    runner.add(0, PROMPT, max_tokens=12, seed=1, has_drafter=True, stop_token_ids=[KNOWN[2]])
    runner.step()
    draft(runner, [wrong(KNOWN[1])], KNOWN[1:6])
    runner.step()
    output = runner.outputs[0, 0]
    assert (output.token_ids, output.finish_reason) == (KNOWN[:3], "stop")
    runner.check()
    assert runner.scheduler.metrics().num_blocks_used == 0


def test_a_branch_that_nobody_has_blocks_for_does_not_run_and_preempts_nobody() -> None:
    # Blocks of 4: the sequence has 1, its guesses take 1 more, a branch would take 2.
    runner = drafting_runner(max_tokens=8, num_blocks=3)
    draft(runner, [wrong(KNOWN[1])], KNOWN[1:4])
    step = runner.step()
    assert step.sequences == [(0, 0, 3, 2)]
    assert not [kind for *_, kind, _ in step.decisions if kind == "preempted"]
    runner.check()
    runner.run()
    assert runner.tokens(0) == KNOWN[:8]


def test_branches_take_no_token_from_others_and_none_from_who_waits() -> None:
    runner = Runner(num_blocks=64, max_num_batched_tokens=12, max_num_seqs=3)
    runner.add(0, PROMPT, max_tokens=12, seed=1, has_drafter=True)
    runner.step()
    runner.add(1, list(range(8)), max_tokens=12, seed=1)
    draft(runner, [wrong(KNOWN[1])], KNOWN[1:4])
    # 2 of 12 tokens are the sequence's, 8 the newcomer's: one guess of the branch is left.
    assert runner.step().sequences == [(0, 0, 3, 2), (1, 0, 0, 8), (0, 0, 3, 2)]
    assert runner.tokens(0) == KNOWN[:3]
    runner.run()
    assert runner.tokens(0) == KNOWN[:12]
    runner.check()


def test_a_branch_that_says_what_others_say_does_not_run() -> None:
    runner = drafting_runner()
    draft(runner, KNOWN[1:4], KNOWN[1:3], [9, 8], [9, 8], [])
    assert runner.step().sequences == [(0, 0, 3, 4), (0, 0, 3, 3)]
    runner.check()


def test_an_abort_in_the_step_of_a_tree_leaves_no_block_behind() -> None:
    runner = drafting_runner()
    draft(runner, [wrong(KNOWN[1])], KNOWN[1:9], [9, 9, 9])
    plan = runner.scheduler.schedule()
    assert len(plan.sequences) == 3
    runner.scheduler.abort(0)
    runner.scheduler.check_integrity()
    runner.take(runner.scheduler.commit(runner.model.execute(plan)))
    assert runner.outputs[0, 0].finish_reason == "abort"
    assert runner.outputs[0, 0].token_ids == KNOWN[:1]
    assert not runner.scheduler.has_unfinished()
    runner.check()
    assert runner.scheduler.metrics().num_blocks_used == 0


def test_a_step_of_a_tree_that_fails_leaves_no_block_behind() -> None:
    runner = drafting_runner()
    draft(runner, [wrong(KNOWN[1])], KNOWN[1:9])
    runner.scheduler.schedule()
    runner.scheduler.fail_step("the device said no")
    runner.take(runner.scheduler.take_events())
    assert runner.outputs[0, 0].finish_reason == "error"
    runner.check()
    assert runner.scheduler.metrics().num_blocks_used == 0


def test_a_rank_that_is_lost_in_the_step_of_a_tree_changes_no_token() -> None:
    runner = drafting_runner()
    draft(runner, [wrong(KNOWN[1])], KNOWN[1:9])
    runner.scheduler.schedule()
    runner.model.forget()
    testing.rank_lost(runner.scheduler, 0)
    runner.check()
    runner.run()
    assert runner.tokens(0) == KNOWN[:20]


def test_the_prefix_cache_may_be_emptied_in_the_step_of_a_tree() -> None:
    runner = drafting_runner(block_size=2)
    draft(runner, [wrong(KNOWN[1])], KNOWN[1:9])
    plan = runner.scheduler.schedule()
    runner.scheduler.reset_prefix_cache()
    runner.scheduler.check_integrity()
    runner.take(runner.scheduler.commit(runner.model.execute(plan)))
    assert runner.tokens(0) == KNOWN[:10]
    runner.check()
    runner.run()
    assert runner.tokens(0) == KNOWN[:20]


def test_a_preempted_sequence_forgets_its_guesses() -> None:
    runner = drafting_runner()
    draft(runner, [wrong(KNOWN[1])], KNOWN[1:9])
    runner.scheduler.preempt(0)
    assert runner.step().sequences == [(0, 0, 0, 4)]
    runner.run()
    assert runner.tokens(0) == KNOWN[:20]
    runner.check()


def test_a_windowed_group_goes_on_from_the_branch_that_was_taken() -> None:
    runner = drafting_runner(windows=[0, 5], num_blocks=64, block_size=4)
    for begin in range(1, 18, 5):
        draft(runner, [wrong(KNOWN[begin])], KNOWN[begin : begin + 4])
        runner.step()
        runner.check()
        assert runner.tokens(0) == KNOWN[: begin + 5][:20]
    runner.run()
    assert runner.tokens(0) == KNOWN[:20]
