"""Log-probabilities of the prompt's tokens: which rows a step plans for them, when they leave."""

from __future__ import annotations

import random

import pytest
from llmserve import _core_testing as testing
from scripted import Runner, expected_tokens, random_prompt, tuples


def expected_logprobs(prompt: list[int]) -> list[tuple[int, float, int]]:
    """What the shadow model says of each prompt token after the first."""
    return [
        (prompt[i], testing.ShadowModel.logprob(prompt[:i], prompt[i]), 0)
        for i in range(1, len(prompt))
    ]


def make_runner(**config: object) -> tuple[Runner, list[int]]:
    return Runner(num_blocks=40, **config), random_prompt(random.Random(0), 23)


@pytest.mark.parametrize("budget", [1, 3, 4, 7, 22, 23, 64])
def test_each_prompt_token_is_scored_once_whatever_the_chunks(budget: int) -> None:
    runner, prompt = make_runner(max_num_batched_tokens=budget, max_num_seqs=1)
    runner.add(0, prompt, max_tokens=3, prompt_logprobs=0)
    steps = runner.run()
    assert sum(step.num_logit_rows for step in steps) == len(prompt) - 1 + 3
    events = runner.outputs[0, 0].events
    assert tuples(events[0].prompt_logprobs) == expected_logprobs(prompt)
    assert all(not event.prompt_logprobs for event in events[1:])
    assert runner.tokens(0) == expected_tokens(prompt, 3)


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    runner, prompt = make_runner()
    runner.add(0, prompt[:1], max_tokens=2, prompt_logprobs=0)
    assert [step.num_logit_rows for step in runner.run()] == [1, 1]
    assert runner.outputs[0, 0].events[0].prompt_logprobs == []


@pytest.mark.parametrize("num_steps", [1, 2, 4, 6])
def test_what_was_scored_before_a_preemption_is_not_scored_again(num_steps: int) -> None:
    runner, prompt = make_runner(max_num_batched_tokens=5, max_num_seqs=1)
    runner.add(0, prompt, max_tokens=4, prompt_logprobs=0)
    steps = [runner.step() for _ in range(num_steps)]
    runner.scheduler.preempt(0)
    runner.check()
    steps += runner.run()
    assert sum(step.num_logit_rows for step in steps) == len(prompt) - 1 + 4
    assert tuples(runner.outputs[0, 0].events[0].prompt_logprobs) == expected_logprobs(prompt)
    assert runner.tokens(0) == expected_tokens(prompt, 4)


def test_the_first_of_n_samples_brings_them() -> None:
    runner, prompt = make_runner(max_num_batched_tokens=8)
    runner.add(0, prompt, n=3, max_tokens=2, prompt_logprobs=0)
    runner.run()
    assert tuples(runner.outputs[0, 0].events[0].prompt_logprobs) == expected_logprobs(prompt)
    for sample_index in (1, 2):
        assert not any(e.prompt_logprobs for e in runner.outputs[0, sample_index].events)
        assert runner.tokens(0, sample_index) == expected_tokens(
            prompt, 2, sample_index=sample_index
        )


def test_a_cached_prompt_is_run_again_and_cached_for_others() -> None:
    runner, prompt = make_runner()
    runner.add(0, prompt, max_tokens=1)
    runner.run()
    queries = runner.scheduler.metrics().prefix_cache_queries
    runner.add(1, prompt, max_tokens=1, prompt_logprobs=0)
    assert runner.step().num_prefill_tokens == len(prompt)
    assert tuples(runner.outputs[1, 0].events[0].prompt_logprobs) == expected_logprobs(prompt)
    assert runner.outputs[1, 0].events[0].num_cached_tokens == 0
    assert runner.scheduler.metrics().prefix_cache_queries == queries
    runner.scheduler.reset_prefix_cache()
    runner.add(2, prompt, max_tokens=1, prompt_logprobs=0)
    runner.run()
    runner.add(3, prompt, max_tokens=1)
    runner.run()
    assert runner.outputs[3, 0].events[0].num_cached_tokens == 20
    runner.check()


def test_a_prompt_token_whose_logits_are_not_finite_ends_its_request_alone() -> None:
    runner, prompt = make_runner()
    runner.add(0, prompt, n=2, max_tokens=2, prompt_logprobs=0)
    runner.add(1, prompt[::-1], max_tokens=2, prompt_logprobs=0)
    sampled = runner.model.execute(runner.scheduler.schedule())
    sampled.invalidate(4)
    runner.take(runner.scheduler.commit(sampled))
    runner.run()
    for sample_index in (0, 1):
        output = runner.outputs[0, sample_index]
        assert output.finish_reason == "error"
        assert "position 5" in output.events[-1].error
    assert runner.tokens(1) == expected_tokens(prompt[::-1], 2)
    runner.check()


def test_an_abort_in_the_middle_of_the_prompt_leaves_nothing() -> None:
    runner, prompt = make_runner(max_num_batched_tokens=5, max_num_seqs=1)
    runner.add(0, prompt, max_tokens=2, prompt_logprobs=0)
    runner.step()
    runner.scheduler.abort(0)
    (event,) = runner.scheduler.take_events()
    assert event.prompt_logprobs == []
    runner.check()
