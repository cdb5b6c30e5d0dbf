"""The scheduler, stepped by hand: what a step runs, how sequences end, fork, wait and give way."""

from __future__ import annotations

import random

import pytest
from llmserve import errors
from llmserve._core import testing
from scripted import VOCAB_SIZE, Runner, expected_tokens, random_prompt

RNG = random.Random(0)
BYTES = [bytes([65 + i % 26]) for i in range(VOCAB_SIZE)]


def prompt_of(num_tokens: int) -> list[int]:
    return random_prompt(RNG, num_tokens)


def kinds(decisions: list[tuple[int, int, str, int]], request_id: int) -> list[str]:
    return [kind for request, _, kind, _ in decisions if request == request_id]


# -- one ragged batch ------------------------------------------------------------------------------


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


# -- how a sequence ends ---------------------------------------------------------------------------


def test_max_tokens_ends_with_length() -> None:
    runner = Runner(num_blocks=32)
    prompt = prompt_of(5)
    runner.add(1, prompt, max_tokens=6, seed=9)
    runner.run()
    assert runner.tokens(1) == expected_tokens(prompt, 6, seed=9)
    assert runner.outputs[1, 0].finish_reason == "length"


def test_max_model_len_ends_with_length() -> None:
    runner = Runner(num_blocks=32, max_model_len=8)
    runner.add(1, prompt_of(5), max_tokens=100)
    runner.run()
    assert len(runner.tokens(1)) == 3
    assert runner.outputs[1, 0].finish_reason == "length"


@pytest.mark.parametrize("as_eos", [False, True])
def test_a_stop_token_ends_the_sequence_and_is_reported(as_eos: bool) -> None:
    prompt = prompt_of(5)
    tokens = expected_tokens(prompt, 8)
    stop = tokens[4]
    runner = Runner(num_blocks=32, bytes_by_id=BYTES, eos_token_ids=[stop] if as_eos else [])
    runner.add(1, prompt, max_tokens=8, stop_token_ids=[] if as_eos else [stop])
    runner.run()
    output = runner.outputs[1, 0]
    assert output.token_ids == tokens[: tokens.index(stop) + 1]
    assert output.finish_reason == "stop"
    assert output.events[-1].stop_token_id == stop
    assert len(output.text) == len(output.token_ids) - 1


def test_ignore_eos_goes_on_past_the_end_of_sequence() -> None:
    prompt = prompt_of(5)
    tokens = expected_tokens(prompt, 8)
    runner = Runner(num_blocks=32, eos_token_ids=[tokens[2]])
    runner.add(1, prompt, max_tokens=8, ignore_eos=True)
    runner.run()
    assert runner.tokens(1) == tokens


def test_a_stop_string_across_tokens_ends_the_sequence() -> None:
    prompt = prompt_of(5)
    text = b"".join(BYTES[t] for t in expected_tokens(prompt, 8))
    stop = text[3:5]
    end = text.index(stop) + 2
    for include in (False, True):
        runner = Runner(num_blocks=32, bytes_by_id=BYTES)
        runner.add(1, prompt, max_tokens=8, stop=[stop], include_stop_str_in_output=include)
        runner.run()
        output = runner.outputs[1, 0]
        assert output.text == text[: end if include else end - 2]
        assert output.finish_reason == "stop"
        assert output.events[-1].stop_string == stop.decode()
        assert len(output.token_ids) == end


def test_text_held_back_for_a_stop_string_comes_with_the_end() -> None:
    prompt = prompt_of(5)
    text = b"".join(BYTES[t] for t in expected_tokens(prompt, 4))
    runner = Runner(num_blocks=32, bytes_by_id=BYTES)
    runner.add(1, prompt, max_tokens=4, stop=[text[-1:] + b"!"])
    runner.run()
    assert runner.outputs[1, 0].text == text


def test_stop_tokens_are_banned_until_min_tokens() -> None:
    prompt = prompt_of(5)
    stop = expected_tokens(prompt, 1)[0]
    runner = Runner(num_blocks=32, eos_token_ids=[7])
    runner.add(1, prompt, max_tokens=8, min_tokens=3, stop_token_ids=[stop])
    plan = runner.scheduler.schedule()
    assert plan.logit_rows[0].banned_token_ids == sorted({7, stop})
    runner.take(runner.scheduler.commit(runner.model.execute(plan)))
    runner.step()
    runner.step()
    plan = runner.scheduler.schedule()
    assert plan.logit_rows[0].banned_token_ids == []
    runner.take(runner.scheduler.commit(testing.SampledTokens([stop])))
    banned = sorted({7, stop})
    expected = testing.ShadowModel.expected(prompt, 0, VOCAB_SIZE, 3, banned, 3)
    assert runner.tokens(1) == [*expected, stop]
    assert runner.outputs[1, 0].finish_reason == "stop"


def test_a_row_that_is_not_finite_fails_its_request_alone() -> None:
    runner = Runner(num_blocks=32)
    prompts = {request: prompt_of(4) for request in (1, 2)}
    for request, prompt in prompts.items():
        runner.add(request, prompt, max_tokens=5)
    sampled = runner.model.execute(runner.scheduler.schedule())
    sampled.invalidate(0)
    runner.take(runner.scheduler.commit(sampled))
    runner.check()
    assert runner.outputs[1, 0].finish_reason == "error"
    assert "not finite" in runner.outputs[1, 0].events[-1].error
    runner.run()
    assert runner.tokens(2) == expected_tokens(prompts[2], 5)


def test_an_abort_frees_the_blocks_at_once() -> None:
    runner = Runner(num_blocks=32, enable_prefix_caching=False)
    runner.add(1, prompt_of(20), max_tokens=5)
    runner.add(2, prompt_of(4), max_tokens=5)
    runner.step()
    runner.scheduler.abort(1)
    assert runner.scheduler.metrics()["num_blocks_used"] == 1
    (event,) = runner.scheduler.take_events()
    assert (event.request_id, event.finish_reason) == (1, "abort")
    assert event.is_request_finished
    runner.check()


def test_an_abort_during_a_step_takes_effect_at_its_commit() -> None:
    runner = Runner(num_blocks=32)
    for request in (1, 2, 3):
        runner.add(request, prompt_of(4), max_tokens=5, n=2)
    runner.scheduler.abort(3)
    plan = runner.scheduler.schedule()
    runner.scheduler.abort(1)
    assert plan.num_sequences == 2
    runner.take(runner.scheduler.commit(runner.model.execute(plan)))
    runner.check()
    assert sorted(runner.finished_requests) == [1, 3]
    for key in ((1, 0), (1, 1), (3, 0), (3, 1)):
        assert runner.outputs[key].finish_reason == "abort"
        assert runner.outputs[key].token_ids == []
    runner.scheduler.abort(99)  # unknown: nothing happens


def test_a_failed_step_ends_every_request_and_the_next_one_works() -> None:
    runner = Runner(num_blocks=32)
    runner.add(1, prompt_of(9), max_tokens=5)
    runner.step()
    runner.add(2, prompt_of(9), max_tokens=5)
    runner.scheduler.schedule()
    runner.scheduler.fail("the device is gone")
    runner.take(runner.scheduler.take_events())
    runner.check()
    assert [runner.outputs[r, 0].finish_reason for r in (1, 2)] == ["error", "error"]
    assert runner.outputs[1, 0].events[-1].error == "the device is gone"
    assert runner.scheduler.metrics()["num_blocks_free"] == 32
    prompt = prompt_of(5)
    runner.add(3, prompt, max_tokens=3)
    runner.run()
    assert runner.tokens(3) == expected_tokens(prompt, 3)


def test_a_commit_that_was_refused_can_be_followed_by_fail() -> None:
    runner = Runner(num_blocks=32)
    runner.add(1, prompt_of(9), max_tokens=5, n=2)
    runner.scheduler.schedule()
    with pytest.raises(errors.InternalError, match="one row for each logit row"):
        runner.scheduler.commit(testing.SampledTokens([1]))
    runner.scheduler.fail("rows are missing")
    runner.take(runner.scheduler.take_events())
    runner.check()
    assert runner.finished_requests == [1]
    assert not runner.scheduler.has_unfinished()


def test_logprobs_come_with_their_tokens() -> None:
    runner = Runner(num_blocks=32)
    runner.add(1, prompt_of(4), max_tokens=1, logprobs=0)
    sampled = runner.model.execute(runner.scheduler.schedule())
    sampled.set_logprob(0, -0.5, 3)
    (event,) = runner.scheduler.commit(sampled)
    assert event.logprobs == [(event.token_ids[0], -0.5, 3)]


def test_times_are_the_clock_at_each_event() -> None:
    runner = Runner(num_blocks=32)
    runner.scheduler.advance_us(10)
    runner.add(1, prompt_of(4), max_tokens=2)
    runner.scheduler.advance_us(10)
    sampled = runner.model.execute(runner.scheduler.schedule())
    runner.scheduler.advance_us(10)
    runner.take(runner.scheduler.commit(sampled))
    runner.scheduler.advance_us(10)
    runner.step()
    event = runner.outputs[1, 0].events[-1]
    times = (event.arrival_us, event.scheduled_us, event.first_token_us, event.last_token_us)
    assert times == (10, 20, 30, 40)
    assert runner.scheduler.metrics()["prefill_us"] == 10


# -- what is refused at the door -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "prompt is empty"),
        ([1] * 64, {}, r"64 tokens, but max_model_len=64"),
        ([1], {"n": 0}, "n must be between 1 and 128"),
        ([1], {"max_tokens": 0}, "max_tokens must be at least 1"),
        ([1], {"max_tokens": 2, "min_tokens": 3}, "min_tokens must not exceed"),
        ([1], {"stop": ["x"]}, "stop strings need a vocabulary"),
    ],
)
def test_a_request_that_can_never_run_is_refused(
    prompt: list[int], params: dict[str, object], message: str
) -> None:
    runner = Runner(num_blocks=32, max_model_len=64)
    with pytest.raises(errors.InvalidArgument, match=message):
        runner.add(1, prompt, **params)
    assert not runner.scheduler.has_unfinished()
    runner.check()


def test_a_prompt_larger_than_the_pool_is_refused_with_the_arithmetic() -> None:
    runner = Runner(num_blocks=4)
    with pytest.raises(
        errors.ResourceExhausted, match=r"needs 5 blocks \(17 tokens.*has 4 \(16 tokens\)"
    ):
        runner.add(1, prompt_of(16))
    runner.add(2, prompt_of(15), max_tokens=1)
    runner.run()
    assert runner.outputs[2, 0].finish_reason == "length"


def test_a_full_queue_refuses_and_says_so() -> None:
    runner = Runner(num_blocks=32, max_num_queued_reqs=2)
    runner.add(1, [1])
    runner.add(2, [1])
    with pytest.raises(errors.ResourceExhausted, match="queue is full: 2 requests wait"):
        runner.add(3, [1])
    runner.step()
    runner.add(3, [1])


def test_an_id_in_use_is_refused() -> None:
    runner = Runner(num_blocks=32)
    runner.add(1, [1])
    with pytest.raises(errors.InvalidArgument, match="id 1 is in use"):
        runner.add(1, [2])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"policy": "best"}, "one of fcfs, priority, static, dynamic, got 'best'"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_batched_tokens": 4, "max_num_seqs": 8}, "at least max_num_seqs"),
        ({"num_blocks": 0}, "num_blocks"),
    ],
)
def test_a_contradictory_config_is_refused(config: dict[str, object], message: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=message):
        testing.Scheduler(**{"num_blocks": 8, **config})


def test_schedule_and_commit_alternate() -> None:
    runner = Runner(num_blocks=8)
    runner.scheduler.schedule()
    with pytest.raises(errors.InternalError):
        runner.scheduler.schedule()
    runner.scheduler.commit(testing.SampledTokens([]))
    with pytest.raises(errors.InternalError):
        runner.scheduler.commit(testing.SampledTokens([]))


# -- n samples -------------------------------------------------------------------------------------


def test_n_samples_share_the_prompt_and_copy_on_write() -> None:
    runner = Runner(num_blocks=32)
    prompt = prompt_of(6)
    runner.add(1, prompt, n=3, max_tokens=5, seed=4)
    first = runner.step()
    assert (first.num_tokens, first.num_logit_rows) == (6, 3)
    assert runner.scheduler.metrics()["num_blocks_used"] == 2
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
    assert runner.scheduler.metrics()["num_prefill_tokens"] <= 9 + 3 * 2
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


# -- memory ----------------------------------------------------------------------------------------


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


# -- the prefix cache ------------------------------------------------------------------------------


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
    assert metrics["prefix_cache_queries"] == metrics["num_prompt_tokens"] == 6 * 23
    assert metrics["prefix_cache_hits"] == 5 * 20
    assert metrics["num_prefill_tokens"] == 6 * 23 - 5 * 20
    assert metrics["num_generation_tokens"] == 18


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
