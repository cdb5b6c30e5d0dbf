"""Adapters of requests: what they compute is found by nobody else, and steps say which they run."""

from __future__ import annotations

import pytest
from llmserve import errors
from scripted import Runner, expected_tokens

PROMPT = list(range(40))
FIRST = ("first", 0, "weights of the first")
SECOND = ("second", 1, "weights of the second")


def num_cached_tokens(runner: Runner, request_id: int, adapter: object) -> int:
    runner.add(request_id, PROMPT, max_tokens=2, adapter=adapter)
    runner.run()
    assert runner.tokens(request_id) == expected_tokens(PROMPT, 2)
    return runner.outputs[request_id, 0].events[-1].num_cached_tokens


@pytest.mark.parametrize(
    "other",
    [None, SECOND, ("first", 0, "other weights by the same name")],
    ids=["none", "another", "the name given to others"],
)
def test_a_prompt_is_found_under_its_own_adapter_alone(other: object) -> None:
    runner = Runner(num_blocks=64)
    assert num_cached_tokens(runner, 0, FIRST) == 0
    assert num_cached_tokens(runner, 1, other) == 0
    assert num_cached_tokens(runner, 2, FIRST) == 36
    assert num_cached_tokens(runner, 3, other) == 36


def test_a_salt_and_an_adapter_keep_prompts_apart_together() -> None:
    runner = Runner(num_blocks=64)
    for request_id, (salt, adapter) in enumerate(
        [("", None), ("x", None), ("", FIRST), ("x", FIRST)]
    ):
        runner.add(request_id, PROMPT, max_tokens=1, cache_salt=salt, adapter=adapter)
        runner.run()
        assert runner.outputs[request_id, 0].events[-1].num_cached_tokens == 0


def test_a_plan_names_the_adapter_of_each_sequence() -> None:
    runner = Runner(num_blocks=64)
    for request_id, adapter in enumerate([None, FIRST, SECOND]):
        runner.add(request_id, [1, 2, request_id], n=2, max_tokens=3, adapter=adapter)
    runner.step()
    plan = runner.scheduler.schedule()  # prompts have forked
    assert {(s.request_id, s.sample_index, s.adapter) for s in plan.sequences} == {
        (request_id, sample, request_id - 1) for request_id in range(3) for sample in range(2)
    }


def test_an_adapter_that_is_not_loaded_is_refused_by_name() -> None:
    with pytest.raises(errors.InvalidArgument, match="adapter 'third' is not loaded"):
        Runner(num_blocks=8).add(0, PROMPT, max_tokens=1, adapter=("third", -1, ""))
