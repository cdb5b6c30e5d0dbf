"""How sequences end, and what is refused at admission."""

from __future__ import annotations

import random

import pytest
from llmserve import _core_testing as testing
from llmserve import errors
from scripted import VOCAB_SIZE, Runner, expected_tokens, make_scheduler, random_prompt

RNG = random.Random(0)
BYTES = [bytes([65 + i % 26]) for i in range(VOCAB_SIZE)]


def prompt_of(num_tokens: int) -> list[int]:
    return random_prompt(RNG, num_tokens)


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
    assert output.events[-1].stop_reason == stop
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
        assert output.events[-1].stop_reason == stop.decode()
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
    runner.take(runner.scheduler.commit([stop]))
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
    assert runner.scheduler.metrics().num_blocks_used == 1
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
    assert len(plan.sequences) == 2
    runner.take(runner.scheduler.commit(runner.model.execute(plan)))
    runner.check()
    assert sorted(runner.finished_requests) == [1, 3]
    for key in ((1, 0), (1, 1), (3, 0), (3, 1)):
        assert runner.outputs[key].finish_reason == "abort"
        assert runner.outputs[key].token_ids == []
    runner.scheduler.abort(99)  # unknown: nothing happens


def test_a_failed_step_ends_its_requests_and_the_others_go_on() -> None:
    runner = Runner(num_blocks=32, max_num_seqs=2)
    common = prompt_of(17)
    prompts = {request: [*common, request] for request in (1, 2, 3, 4)}
    runner.add(1, prompts[1], max_tokens=6)
    runner.step()
    for request in (2, 3, 4):
        runner.add(request, prompts[request], max_tokens=6)
    runner.step()
    runner.model.execute(runner.scheduler.schedule())  # its work is done, and comes to nothing
    runner.scheduler.fail_step("no memory left")
    runner.take(runner.scheduler.take_events())
    runner.check()
    assert runner.finished_requests == [1, 2]
    assert runner.outputs[1, 0].events[-1].error == "no memory left"
    runner.run()
    for request in (3, 4):
        assert runner.tokens(request) == expected_tokens(prompts[request], 6)
        assert runner.outputs[request, 0].events[-1].num_cached_tokens > 0  # of those that failed


def test_a_failed_step_halves_the_batches_until_enough_have_gone_well() -> None:
    runner = Runner(num_blocks=256, max_num_seqs=8)
    prompts = [prompt_of(5) for _ in range(40)]
    for request, prompt in enumerate(prompts):
        runner.add(request, prompt, max_tokens=30)

    def fail() -> None:
        runner.model.execute(runner.scheduler.schedule())
        runner.scheduler.fail_step("no memory left")
        runner.take(runner.scheduler.take_events())

    assert len(runner.step().sequences) == 8
    sizes = []
    for _ in range(4):  # it stays at one
        fail()
        sizes.append(len(runner.step().sequences))
    assert sizes == [4, 2, 1, 1]
    assert runner.scheduler.metrics().num_seats == 1
    steps = runner.run()
    runner.check()
    sizes = [len(step.sequences) for step in steps if step.sequences]
    assert max(sizes[:31]) == 1
    assert max(sizes[31:63]) == 2
    assert max(sizes) == 8
    assert runner.scheduler.metrics().num_seats == 8
    for request in range(15, 40):
        assert runner.tokens(request) == expected_tokens(prompts[request], 30)


def test_what_a_failed_step_computed_is_not_in_the_prefix_cache() -> None:
    runner = Runner(num_blocks=32)
    prompt = prompt_of(20)
    runner.add(1, prompt, max_tokens=4)
    runner.model.execute(runner.scheduler.schedule())
    runner.scheduler.fail_step("no memory left")
    runner.take(runner.scheduler.take_events())
    metrics = runner.scheduler.metrics()
    assert (metrics.num_blocks_cached, metrics.num_blocks_free) == (0, 32)
    runner.add(2, prompt, max_tokens=4)
    runner.run()
    assert runner.outputs[2, 0].events[-1].num_cached_tokens == 0


def test_a_failed_step_takes_all_samples_of_its_requests_along() -> None:
    runner = Runner(num_blocks=32, max_num_seqs=2)
    runner.add(1, prompt_of(9), max_tokens=6, n=4)
    prompt = prompt_of(5)
    runner.step()
    runner.add(2, prompt, max_tokens=6)
    plan = runner.scheduler.schedule()
    assert {sequence.request_id for sequence in plan.sequences} == {1}
    runner.scheduler.fail_step("no memory left")
    runner.take(runner.scheduler.take_events())
    runner.check()
    assert runner.finished_requests == [1]
    runner.run()
    assert runner.tokens(2) == expected_tokens(prompt, 6)


def test_a_failed_scheduler_ends_every_request_and_the_next_one_works() -> None:
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
    assert runner.scheduler.metrics().num_blocks_free == 32
    prompt = prompt_of(5)
    runner.add(3, prompt, max_tokens=3)
    runner.run()
    assert runner.tokens(3) == expected_tokens(prompt, 3)


def test_a_commit_that_was_refused_can_be_followed_by_fail() -> None:
    runner = Runner(num_blocks=32)
    runner.add(1, prompt_of(9), max_tokens=5, n=2)
    runner.scheduler.schedule()
    with pytest.raises(errors.InternalError, match="one row for each logit row"):
        testing.commit_unchecked(runner.scheduler, [1])
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
    (logprob,) = event.logprobs
    assert (logprob.token_id, logprob.logprob, logprob.rank) == (event.token_ids[0], -0.5, 3)


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
    times = runner.outputs[1, 0].events[-1].times
    assert (times.arrival_us, times.scheduled_us) == (10, 20)
    assert (times.first_token_us, times.last_token_us) == (30, 40)
    assert runner.scheduler.metrics().prefill_us == 10


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "prompt is empty"),
        ([1] * 64, {}, r"64 tokens, but max_model_len=64"),
        ([1], {"n": 0}, "n must be between 1 and 128"),
        ([1], {"max_tokens": 0}, "max_tokens must be at least 1"),
        ([1], {"max_tokens": 2, "min_tokens": 3}, "min_tokens must not exceed"),
        ([1], {"stop": ["x"]}, "stop strings need a tokenizer"),
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
        errors.ResourceExhausted,
        match=r"needs 5 blocks \(17 tokens.*4 \(16 tokens\); raise kv_cache_memory_bytes \(num_",
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
        ({"policy": "best"}, r"one of fcfs, priority, .*, got 'best'"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_batched_tokens": 4, "max_num_seqs": 8}, "at least max_num_seqs"),
        ({"num_blocks": 0}, "num_blocks"),
    ],
)
def test_a_contradictory_config_is_refused(config: dict[str, object], message: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=message):
        make_scheduler(**{"num_blocks": 8, **config})


def test_schedule_and_commit_alternate() -> None:
    runner = Runner(num_blocks=8)
    with pytest.raises(errors.InvalidArgument, match="there is no plan"):
        runner.scheduler.commit([])
    runner.scheduler.schedule()
    with pytest.raises(errors.InvalidArgument, match="alternate"):
        runner.scheduler.schedule()
    with pytest.raises(errors.InvalidArgument, match="expected 0 token ids"):
        runner.scheduler.commit([1])
    runner.scheduler.commit([])
