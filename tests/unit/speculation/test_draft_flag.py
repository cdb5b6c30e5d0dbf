"""`--draft` and `--speculative-config`: the demo pair from the command line, and what is said."""

from __future__ import annotations

import pytest
from llmserve import LLM, SamplingParams, demo_model_path
from llmserve.checkpoint.model_files import demo_draft_path
from llmserve.cli import main
from llmserve.insight.doctor import examine
from llmserve.insight.live_metrics import LiveMetrics
from llmserve.insight.timeline import describe_request

PROMPT = "Once upon a time"
FLAGS = ("--seed", "3", "--max-tokens", "40", "--num-threads", "1")


def generate(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[str, str]:
    assert main(["generate", PROMPT, *FLAGS, *flags]) == 0
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_the_demos_draft_says_the_same_sooner(capsys: pytest.CaptureFixture[str]) -> None:
    plain, _ = generate(capsys)
    drafted, figures = generate(capsys, "--draft", "demo")
    assert drafted == plain
    assert " guesses right" in figures
    assert generate(capsys, "--draft", "ngram")[0] == plain
    trees = '{"model": "demo", "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}'
    for config in ('{"method": "suffix", "num_speculative_tokens": 3}', trees):
        assert generate(capsys, "--speculative-config", config)[0] == plain


def test_a_draft_is_given_once(capsys: pytest.CaptureFixture[str]) -> None:
    config = '{"method": "ngram"}'
    flags = ["--draft", "demo", "--speculative-config", config]
    assert main(["generate", PROMPT, *flags]) == 2
    assert "--draft is a short form of --speculative-config" in capsys.readouterr().err


def test_the_demo_pair_agrees_in_three_of_four_guesses() -> None:
    """The figures of the page: at least 3 tokens a step of 5 rows, sampled or not."""
    config = {
        "model": str(demo_draft_path()),
        "num_speculative_tokens": 4,
        "adaptive": False,
    }
    prompts = ["Once upon a time", "The old fox", "In the town of", "A small boat"]
    with LLM(demo_model_path(), num_threads=1, speculative_config=config) as llm:
        for temperature in (0.0, 0.7):
            before = llm.get_metrics()
            params = SamplingParams(
                temperature=temperature, seed=1, max_tokens=100, ignore_eos=True
            )
            outputs = llm.generate(prompts, params, use_tqdm=False)
            now = llm.get_metrics()
            accepted = now.num_accepted_tokens - before.num_accepted_tokens
            assert 1 + accepted / (now.num_drafts - before.num_drafts) > 2.7
            metrics = outputs[0].metrics
            assert 0 < metrics.num_accepted_tokens <= metrics.num_draft_tokens
        record = llm.trace().requests[0]
        assert " guesses right" in describe_request(record)


def test_the_doctor_knows_a_draft_that_does_not_match() -> None:
    text = (
        "llmserve:engine_up 1\n"
        'llmserve:spec_decode_num_draft_tokens_total{model_name="m"} 5000\n'
        'llmserve:spec_decode_num_accepted_tokens_total{model_name="m"} 400\n'
    )
    (finding,) = examine(LiveMetrics.parse(text))
    assert "8% of the guessed tokens are right" in finding.symptom
