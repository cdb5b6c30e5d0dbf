"""Drafted tokens on a model give the bits of plain steps, whatever was guessed, however drawn."""

from __future__ import annotations

import random
from typing import Any

import pytest
from checkpoints import checkpoint
from llmserve import _core
from llmserve import _core_testing as testing
from ranks import engine_config

PROMPTS = [[5, 6, 7], list(range(3, 43)), [9] * 17]
NUM_TOKENS = 16

PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "seed": 3},
    "penalties": {
        "temperature": 0.7,
        "seed": 4,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.2,
    },
    "logprobs": {"temperature": 0.9, "seed": 5, "logprobs": 3},
    "bias": {"temperature": 1.0, "seed": 6, "logit_bias": [(7, 2.0), (9, -100.0)], "min_tokens": 8},
    "allowed": {"temperature": 1.0, "seed": 7, "allowed_token_ids": list(range(0, 60, 3))},
}


def run(params: dict[str, Any], accuracy: float | None) -> tuple[Any, int]:
    """(tokens and logprobs by request, steps); None: without a drafter."""
    config = engine_config(checkpoint("llama"))
    scheduler = _core.Scheduler(config.scheduler, config.cache)
    runner = testing.StepRunner(config)
    draw = random.Random(1)
    plain = plain_tokens(params) if accuracy is not None else {}
    for i, prompt in enumerate(PROMPTS):
        core = _core.SamplingParams(
            max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False, **params
        )
        testing.add_request(scheduler, i, prompt, core, has_drafter=accuracy is not None)
    tokens: dict[int, list[int]] = {i: [] for i in range(len(PROMPTS))}
    logprobs: dict[int, list[Any]] = {i: [] for i in range(len(PROMPTS))}
    num_steps = 0
    while scheduler.has_unfinished():
        for record in scheduler.sequences():
            if accuracy is None:
                break
            begin = len(record.token_ids) - record.num_prompt_tokens
            guess = [
                token if draw.random() < accuracy else draw.randrange(60)
                for token in plain[record.request_id][begin : begin + 4]
            ]
            testing.draft_ready(scheduler, record.request_id, 0, len(record.token_ids), guess)
        runner.launch(scheduler.schedule())
        num_steps += 1
        for event in scheduler.commit(runner.wait()):
            tokens[event.request_id] += event.token_ids
            logprobs[event.request_id] += [
                (entry.token_id, entry.logprob, entry.rank) for entry in event.logprobs
            ]
            if event.finish_reason:
                runner.forget(event.request_id)
        scheduler.check_integrity()
    runner.check_idle()
    return (tokens, logprobs), num_steps


def plain_tokens(params: dict[str, Any]) -> dict[int, list[int]]:
    (tokens, _), _ = run(params, None)
    return tokens


@pytest.mark.parametrize("name", PARAMS)
def test_guesses_change_the_number_of_steps_and_nothing_else(name: str) -> None:
    expected, num_plain = run(PARAMS[name], None)
    for accuracy in (1.0, 0.6, 0.0):
        found, num_steps = run(PARAMS[name], accuracy)
        assert found == expected
        assert num_steps <= num_plain
        if accuracy == 1.0:
            assert num_steps < num_plain / 2
