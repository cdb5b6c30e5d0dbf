"""The rejection rule: equal in distribution to plain draws, with noise of its own."""

from __future__ import annotations

import functools
import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from checkpoints import checkpoint
from llmserve import LLM, SamplingParams, _core
from llmserve import _core_testing as testing

NUM_DRAWS = 100_000
# One in 10^6 of right samplers are beyond it.
Z = 4.75


def chi_square_bound(num_free: int) -> float:
    """What chi-square of so many degrees exceeds once in 10^6 (Wilson and Hilferty 1931)."""
    scale = 2 / (9 * num_free)
    return float(num_free * (1 - scale + Z * math.sqrt(scale)) ** 3)


def check_counts(counts: list[int], probabilities: list[float]) -> None:
    """Those that are expected less than five times count together."""
    total = sum(counts)
    observed, expected = [], []
    rest_observed, rest_expected = 0.0, 0.0
    for count, probability in zip(counts, probabilities, strict=True):
        if probability == 0:
            assert count == 0
        elif probability * total < 5:
            rest_observed, rest_expected = (
                rest_observed + count,
                rest_expected + probability * total,
            )
        else:
            observed.append(float(count))
            expected.append(probability * total)
    if rest_expected > 0:
        observed.append(rest_observed)
        expected.append(rest_expected)
    chi = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    assert chi < chi_square_bound(max(1, len(expected) - 1)) or len(expected) == 1


def distribution(rng: random.Random, size: int, share_of_zeros: float) -> list[float]:
    weights = [
        0.0 if rng.random() < share_of_zeros else rng.random() ** 3 + 1e-4 for _ in range(size)
    ]
    weights[rng.randrange(size)] = 1.0
    return [float(np.float32(weight / sum(weights))) for weight in weights]


@pytest.mark.parametrize("seed", range(8))
def test_tokens_after_guesses_are_of_the_targets_distribution(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([2, 5, 16])
    target, draft = (distribution(rng, size, rng.choice([0, 0.4])) for _ in range(2))
    counts, num_accepted = testing.count_draws(
        target, draft, seed=rng.getrandbits(64), num_draws=NUM_DRAWS
    )
    check_counts(counts, target)
    overlap = sum(map(min, target, draft))  # 1 - TV: no rule that is exact accepts more
    assert num_accepted / NUM_DRAWS == pytest.approx(overlap, abs=5 * 0.5 / NUM_DRAWS**0.5)


@pytest.mark.parametrize("guess", range(5))
def test_a_certain_guess_is_right_as_often_as_the_target_draws_it(guess: int) -> None:
    target = distribution(random.Random(3), 5, 0.2)
    counts, num_accepted = testing.count_draws(target, guess=guess, seed=9, num_draws=NUM_DRAWS)
    check_counts(counts, target)
    assert num_accepted == counts[guess]


def test_the_same_distribution_accepts_all() -> None:
    target = distribution(random.Random(5), 16, 0.0)
    assert testing.count_draws(target, target, seed=1, num_draws=1000)[1] == 1000


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 3},
        {"temperature": 0.9, "top_p": 0.6},
        {"temperature": 1.0, "min_p": 0.3},
        {"temperature": 0.8, "top_k": 6, "top_p": 0.8, "min_p": 0.05},
    ],
    ids=str,
)
def test_what_is_drawn_from_is_what_the_filters_leave(params: dict[str, float]) -> None:
    rng = np.random.default_rng(1)
    logits = (3 * rng.standard_normal(12)).astype(np.float32)
    z = (logits - logits.max()).astype(np.float64) / params.get("temperature", 1.0)
    weights = np.exp(z)
    weights[weights < params.get("min_p", 0)] = 0
    if "top_k" in params:
        weights[np.argsort(-weights)[int(params["top_k"]) :]] = 0
    if "top_p" in params:
        order = np.argsort(-weights)
        mass = np.cumsum(weights[order])
        num_kept = int(np.searchsorted(mass, params["top_p"] * mass[-1])) + 1
        weights[order[num_kept:]] = 0
    found = testing.probabilities_of(logits.tolist(), _core.SamplingParams(**params))
    np.testing.assert_allclose(found, weights / weights.sum(), rtol=2e-6)


def test_nothing_is_drawn_from_what_is_not_finite() -> None:
    assert testing.probabilities_of([0.0, math.nan], _core.SamplingParams()) is None
    assert testing.probabilities_of([0.0, math.inf], _core.SamplingParams()) is None


VOCAB_SIZE = 16
PROMPT = [5, 9, 3, 7, 7, 11]
TEMPERATURE = 2.0
TOP_P = 0.97
MODEL_OPTIONS: dict[str, Any] = {
    "max_model_len": 64,
    "num_gpu_blocks_override": 600,
    "num_threads": 1,
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_num_seqs": 128,
    "max_num_batched_tokens": 1024,
}


@functools.cache
def target() -> str:
    return str(checkpoint("llama", vocab_size=VOCAB_SIZE))


@functools.cache
def draft() -> str:
    return str(checkpoint("llama", vocab_size=VOCAB_SIZE, seed=5, num_hidden_layers=1))


def pairs_of(logprobs: list[list[float]]) -> np.ndarray:
    """[.., V] what is drawn from, of raw log-probabilities, at the temperature and top-p."""
    params = _core.SamplingParams(temperature=TEMPERATURE, top_p=TOP_P)
    return np.array([testing.probabilities_of(row, params) for row in logprobs])


@functools.cache
def pair_probabilities() -> list[float]:
    """Of the second and third token together, by 273 contexts of plain steps."""
    contexts = [
        [],
        *[[a] for a in range(VOCAB_SIZE)],
        *[[a, b] for a in range(VOCAB_SIZE) for b in range(VOCAB_SIZE)],
    ]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=VOCAB_SIZE, detokenize=False)
    prompts = [{"prompt_token_ids": PROMPT + context} for context in contexts]
    with LLM(target(), **MODEL_OPTIONS) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    rows = []
    for output in outputs:
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        rows.append([logprobs[0][token].logprob for token in range(VOCAB_SIZE)])
    p = pairs_of(rows)
    first, second = p[0], p[1 : 1 + VOCAB_SIZE]
    third = p[1 + VOCAB_SIZE :].reshape(VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE)
    return [float(x) for x in np.einsum("a,ab,abc->bc", first, second, third).ravel()]


def check_pairs(config: dict[str, Any], num_draws: int) -> None:
    config = {
        "num_speculative_tokens": 2,
        "adaptive": False,
        "rejection_sample_method": "rejection",
        **config,
    }
    num_samples = 100
    params = [
        SamplingParams(
            temperature=TEMPERATURE,
            top_p=TOP_P,
            max_tokens=4,
            n=num_samples,
            seed=seed,
            ignore_eos=True,
            detokenize=False,
        )
        for seed in range(num_draws // num_samples)
    ]
    prompts = [{"prompt_token_ids": PROMPT} for _ in params]
    with LLM(target(), speculative_config=config, **MODEL_OPTIONS) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        metrics = llm.get_metrics()
    pairs = Counter(
        tuple(completion.token_ids[1:3]) for output in outputs for completion in output.outputs
    )
    counts = [pairs[a, b] for a in range(VOCAB_SIZE) for b in range(VOCAB_SIZE)]
    assert sum(counts) == num_draws
    check_counts(counts, pair_probabilities())
    # Guesses are checked at all, and some are wrong.
    assert 0 < metrics.num_accepted_tokens <= metrics.num_draft_tokens
    if config.get("model") == draft():
        assert metrics.num_accepted_tokens < 0.95 * metrics.num_draft_tokens


CONFIGS: dict[str, dict[str, Any]] = {
    "stranger": {"method": "draft_model", "model": "draft"},
    "itself": {"method": "draft_model", "model": "target"},
    "greedy": {"method": "draft_model", "model": "draft", "draft_sample_method": "greedy"},
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2},
}


def config_of(name: str) -> dict[str, Any]:
    config = dict(CONFIGS[name])
    if "model" in config:
        config["model"] = {"target": target, "draft": draft}[config["model"]]()
    return config


@pytest.mark.parametrize("name", CONFIGS)
def test_pairs_of_tokens_of_a_model_are_of_the_targets_distribution(name: str) -> None:
    check_pairs(config_of(name), 5_000)


@pytest.mark.long
@pytest.mark.parametrize("name", CONFIGS)
def test_many_pairs_of_tokens_are_of_the_targets_distribution(name: str) -> None:
    check_pairs(config_of(name), NUM_DRAWS)


def test_a_draft_that_is_the_target_is_always_right() -> None:
    config = {
        "model": target(),
        "num_speculative_tokens": 3,
        "adaptive": False,
        "rejection_sample_method": "rejection",
    }
    params = SamplingParams(
        temperature=0.9, seed=1, max_tokens=21, ignore_eos=True, detokenize=False
    )
    with LLM(target(), speculative_config=config, **MODEL_OPTIONS) as llm:
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    assert output.metrics.num_accepted_tokens == output.metrics.num_draft_tokens > 0


def test_engines_under_the_rule_do_not_go_on_with_each_others_answers() -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 2}
    rule = {**ngram, "rejection_sample_method": "rejection"}
    classes = []
    for config in (None, ngram, rule, rule):
        with LLM(target(), speculative_config=config, **MODEL_OPTIONS) as llm:
            classes.append(llm.numerics_class)
    assert classes[0] == classes[1]
    assert len(set(classes)) == 3


def test_greedy_draws_are_those_of_plain_steps() -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": PROMPT[:n]} for n in range(1, 7)]
    results = []
    for config in (None, {**config_of("stranger"), "rejection_sample_method": "rejection"}):
        with LLM(target(), speculative_config=config, **MODEL_OPTIONS) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            results.append([output.outputs[0].token_ids for output in outputs])
    assert results[0] == results[1]
