"""Beam search in the scheduler: beams fork, share blocks, wait for each other, and are right."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from beam_reference import Found, search
from llmserve import _core_testing as testing
from llmserve import errors
from scripted import VOCAB_SIZE, Runner, expected_tokens, random_prompt


def next_tokens(context: list[int], count: int) -> list[tuple[int, float]]:
    found: list[tuple[int, float]] = testing.ShadowModel.top_logprobs(context, VOCAB_SIZE, count)
    return found


def expected_beams(prompt: list[int], width: int, max_tokens: int, **options: Any) -> list[Found]:
    return search(next_tokens, prompt, width, max_tokens, **options)


def check_beams(runner: Runner, request_id: int, expected: list[Found]) -> None:
    outputs = [o for (id_, _), o in sorted(runner.outputs.items()) if id_ == request_id]
    assert [output.token_ids for output in outputs] == [found.tokens for found in expected]
    for output, found in zip(outputs, expected, strict=True):
        (event,) = output.events
        assert sum(entry.logprob for entry in event.logprobs) == found.cum_logprob
        assert output.finish_reason == ("stop" if found.is_ended else "length")


@pytest.mark.parametrize("width", [1, 2, 3, 5])
@pytest.mark.parametrize("budget", [8, 64])
def test_beams_are_those_of_a_plain_search(width: int, budget: int) -> None:
    prompt = random_prompt(random.Random(0), 11)
    runner = Runner(num_blocks=100, max_num_batched_tokens=budget)
    runner.add(0, prompt, beam_width=width, max_tokens=9)
    while runner.scheduler.has_unfinished():
        runner.step()
        runner.check()
    check_beams(runner, 0, expected_beams(prompt, width, 9))
    assert runner.finished_requests == [0]
    assert runner.scheduler.metrics().num_blocks_used == 0


@pytest.mark.parametrize("length_penalty", [0.0, 0.5, 1.0, 3.0])
def test_ended_beams_are_set_aside_and_ranked_by_the_length_penalty(length_penalty: float) -> None:
    """A token that is often among the candidates ends the text."""
    rng = random.Random(1)
    num_ended = 0
    for request_id in range(20):
        prompt = random_prompt(rng, rng.randint(1, 6))
        eos = next_tokens(prompt, 4)[3][0]
        runner = Runner(num_blocks=100, eos_token_ids=[eos])
        runner.add(request_id, prompt, beam_width=3, max_tokens=5, length_penalty=length_penalty)
        runner.run()
        expected = expected_beams(prompt, 3, 5, eos=eos, length_penalty=length_penalty)
        check_beams(runner, request_id, expected)
        num_ended += sum(found.is_ended for found in expected)
        ignoring = Runner(num_blocks=100, eos_token_ids=[eos])
        ignoring.add(0, prompt, beam_width=3, max_tokens=5, ignore_eos=True)
        ignoring.run()
        check_beams(ignoring, 0, expected_beams(prompt, 3, 5))
    assert num_ended > 10 or length_penalty == 0.0


def test_a_wide_beam_finds_what_a_search_of_everything_finds() -> None:
    """With a beam for every continuation nothing is ever pruned."""
    vocab_size, length = 4, 3
    prompt = [1, 2]

    def model(context: list[int], count: int) -> list[tuple[int, float]]:
        top: list[tuple[int, float]] = testing.ShadowModel.top_logprobs(context, vocab_size, count)
        return top

    every = []
    for tokens in itertools.product(range(vocab_size), repeat=length):
        logprobs = [
            testing.ShadowModel.logprob([*prompt, *tokens[:i]], tokens[i]) for i in range(length)
        ]
        every.append((sum(logprobs), list(tokens)))
    best = sorted((total for total, _ in every), reverse=True)
    runner = Runner(num_blocks=200)
    runner.model = testing.ShadowModel(200, 4, vocab_size)
    runner.add(0, prompt, beam_width=64, max_tokens=length)
    runner.run()
    outputs = [runner.outputs[0, i] for i in range(64)]
    totals = [sum(entry.logprob for entry in output.events[0].logprobs) for output in outputs]
    assert totals == best
    assert sorted(output.token_ids for output in outputs) == sorted(tokens for _, tokens in every)
    assert [f.tokens for f in search(model, prompt, 64, length)] == [o.token_ids for o in outputs]


def test_beams_share_the_prompt_and_copy_only_what_they_write() -> None:
    prompt = random_prompt(random.Random(3), 40)  # ten blocks of four
    runner = Runner(num_blocks=100)
    runner.add(0, prompt, beam_width=4, max_tokens=8)
    used = []
    while runner.scheduler.has_unfinished():
        runner.step()
        used.append(runner.scheduler.metrics().num_blocks_used)
    assert used[0] == 10
    assert max(used) <= 10 + 4 * 3  # apart they would be 4 * 12
    check_beams(runner, 0, expected_beams(prompt, 4, 8))


@pytest.mark.parametrize("when", range(1, 12))
def test_a_preempted_search_goes_on_as_if_nothing_had_happened(when: int) -> None:
    prompt = random_prompt(random.Random(4), 9)
    runner = Runner(num_blocks=60, max_num_batched_tokens=8)
    runner.add(0, prompt, beam_width=3, max_tokens=8)
    for _ in range(when):
        runner.step()
    runner.scheduler.preempt(0)
    runner.check()
    while runner.scheduler.has_unfinished():
        runner.step()
        runner.check()
    check_beams(runner, 0, expected_beams(prompt, 3, 8))


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 8])
def test_beams_without_room_for_all_of_them_take_turns(max_num_seqs: int, caching: bool) -> None:
    """The pool holds one beam and a half, or there is one seat."""
    prompt = random_prompt(random.Random(5), 10)
    runner = Runner(num_blocks=7, max_num_seqs=max_num_seqs, enable_prefix_caching=caching)
    runner.add(0, prompt, beam_width=4, max_tokens=9)
    kinds = set()
    for _ in range(2000):
        kinds |= {kind for *_, kind, _ in runner.step().decisions}
        runner.check()
        if not runner.scheduler.has_unfinished():
            break
    check_beams(runner, 0, expected_beams(prompt, 4, 9))
    assert {"waits_for_beams", "preempted"} <= kinds


def test_searches_and_samples_share_batches_and_do_not_disturb_each_other() -> None:
    rng = random.Random(6)
    prompts = [random_prompt(rng, rng.randint(1, 20)) for _ in range(6)]
    runner = Runner(num_blocks=24, max_num_seqs=6, max_num_batched_tokens=12)
    for i, prompt in enumerate(prompts):
        if i % 2:
            runner.add(i, prompt, beam_width=3, max_tokens=7)
        else:
            runner.add(i, prompt, n=2, max_tokens=12)
    for _ in range(2000):
        runner.step()
        runner.check()
        if not runner.scheduler.has_unfinished():
            break
    for i, prompt in enumerate(prompts):
        if i % 2:
            check_beams(runner, i, expected_beams(prompt, 3, 7))
        else:
            for sample_index in range(2):
                assert runner.tokens(i, sample_index) == expected_tokens(
                    prompt, 12, sample_index=sample_index
                )


def test_a_search_ends_at_the_end_of_the_context() -> None:
    prompt = random_prompt(random.Random(7), 10)
    runner = Runner(num_blocks=60, max_model_len=14)
    runner.add(0, prompt, beam_width=3, max_tokens=100)
    runner.run()
    check_beams(runner, 0, expected_beams(prompt, 3, 4))


def test_a_search_that_outgrows_the_pool_ends_with_the_arithmetic() -> None:
    prompt = random_prompt(random.Random(8), 10)
    runner = Runner(num_blocks=3)
    runner.add(0, prompt, beam_width=3, max_tokens=10)
    runner.run()
    outputs = [output for (_, _), output in runner.outputs.items()]
    assert {output.finish_reason for output in outputs} == {"error"}
    assert "needs 4 blocks (13 tokens, block_size=4)" in outputs[0].events[0].error
    assert runner.finished_requests == [0]
    runner.check()


@pytest.mark.parametrize("in_step", [True, False])
def test_an_aborted_search_gives_all_its_blocks_back(in_step: bool) -> None:
    prompt = random_prompt(random.Random(9), 10)
    runner = Runner(num_blocks=60)
    runner.add(0, prompt, beam_width=4, max_tokens=10)
    for _ in range(3):
        runner.step()
    if in_step:
        plan = runner.scheduler.schedule()
        runner.scheduler.abort(0)
        runner.take(runner.scheduler.commit(runner.model.execute(plan)))
    else:
        runner.scheduler.abort(0)
        runner.take(runner.scheduler.take_events())
    assert {output.finish_reason for output in runner.outputs.values()} == {"abort"}
    assert runner.finished_requests == [0]
    assert runner.scheduler.metrics().num_blocks_used == 0
    runner.check()


def test_a_beam_whose_logits_are_not_finite_ends_its_search_alone() -> None:
    prompt = random_prompt(random.Random(10), 5)
    runner = Runner(num_blocks=60)
    runner.add(0, prompt, beam_width=3, max_tokens=4)
    runner.add(1, prompt[::-1], beam_width=3, max_tokens=4)
    runner.step()
    sampled = runner.model.execute(runner.scheduler.schedule())
    sampled.invalidate(1)
    runner.take(runner.scheduler.commit(sampled))
    runner.run()
    failed = [output for (id_, _), output in runner.outputs.items() if id_ == 0]
    assert {output.finish_reason for output in failed} == {"error"}
    assert "position 6" in failed[0].events[0].error
    check_beams(runner, 1, expected_beams(prompt[::-1], 3, 4))
    runner.check()


def test_bad_widths_are_refused() -> None:
    runner = Runner(num_blocks=60)
    for width in (65, 1000):
        with pytest.raises(errors.InvalidArgument, match=f"between 1 and 64, got {width}"):
            runner.add(0, [1, 2], beam_width=width)
    with pytest.raises(errors.InvalidArgument, match="n must be 1 for beam search"):
        runner.add(0, [1, 2], beam_width=2, n=2)
