"""What went wrong in other engines that guess tokens, each with its test: rejected guesses in the
prefix cache, windows, hit rates, histograms, many rows, aborts, mixed batches. Others stand beside
what they are about: stops, ends of the context and preemption in test_engine_with_drafts.py, masks
and penalties in test_equality.py and tests/unit/sampling/test_drafted_rows.py."""

from __future__ import annotations

import time
from typing import Any

import pytest
from checkpoints import VOCAB_SIZE, checkpoint
from engine_requests import add_request
from llmserve import LLM, SamplingParams, _core, _core_testing
from scripted import Runner

VOCAB = 64
DEADLINE_S = 60.0
K = 6


def make_engine(
    accuracy: float | None,
    *,
    windows: tuple[int, ...] = (0,),
    max_in_flight: int = 1,
    **oracle: Any,
) -> _core.Engine:
    """accuracy: of guesses, six a step; None: none."""
    groups = [_core.CacheGroupSpec(window=window) for window in windows]
    fields: dict[str, Any] = {
        "cache": _core.CacheConfig(num_blocks=200, block_size=4, groups=groups),
        "scheduler": _core.SchedulerConfig(
            max_model_len=256, max_num_batched_tokens=64, max_num_seqs=8
        ),
    }
    if accuracy is not None:
        fields["speculation"] = _core.SpeculationConfig(
            method="draft_model", num_speculative_tokens=K, adaptive=False
        )
    return _core_testing.oracle_engine(
        _core.EngineConfig(**fields),
        _core_testing.OracleOptions(
            vocab_size=VOCAB, reads_blocks=True, max_in_flight=max_in_flight, **oracle
        ),
        drafter=None
        if accuracy is None
        else _core_testing.RecordedDrafter(
            vocab_size=VOCAB, accuracy=accuracy, follows_context=True
        ),
    )


def run(engine: _core.Engine, prompt: list[int], **params: Any) -> tuple[list[int], int]:
    """(tokens, those of the prompt that were found in the prefix cache)"""
    fields = {"detokenize": False, "max_tokens": 30, "seed": 5, "ignore_eos": True, **params}
    request_id = add_request(engine, prompt, _core.SamplingParams(**fields))
    tokens: list[int] = []
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        for event in engine.wait_events(0.1):
            assert event.request_id == request_id
            tokens += event.token_ids
            if event.is_request_finished:
                return tokens, event.num_cached_tokens
    raise AssertionError("the request never ended")


PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def test_guesses_of_a_request_that_was_aborted_are_nobodys() -> None:
    """It ends in a step that runs its guesses; what the others draw is what they draw alone."""
    plain, drafted = make_engine(None), make_engine(0.8, step_us=300)
    fields = {"detokenize": False, "max_tokens": 60, "ignore_eos": True}
    expected = [run(plain, [*PROMPT, seed], seed=seed, max_tokens=60)[0] for seed in range(3)]
    for num_seen in (1, 9, 25):
        doomed = add_request(
            drafted, PROMPT, _core.SamplingParams(**{**fields, "seed": 9, "max_tokens": 200})
        )
        ids = [
            add_request(drafted, [*PROMPT, seed], _core.SamplingParams(seed=seed, **fields))
            for seed in range(3)
        ]
        tokens: dict[int, list[int]] = {}
        left = {doomed, *ids}
        deadline = time.monotonic() + DEADLINE_S
        while left:
            assert time.monotonic() < deadline
            for event in drafted.wait_events(0.1):
                tokens.setdefault(event.request_id, []).extend(event.token_ids)
                if event.is_request_finished:
                    left.discard(event.request_id)
            if len(tokens.get(doomed, [])) >= num_seen:
                drafted.abort(doomed)
        assert [tokens[request_id] for request_id in ids] == expected
        assert len(tokens[doomed]) < 200
        assert drafted.metrics().num_blocks_used == 0
    plain.close()
    drafted.close()


def test_rows_without_guesses_draw_beside_rows_with_some_what_they_draw_alone(model: str) -> None:
    """n-grams know of one text what follows, and of the other nothing."""
    asked = [
        {"prompt_token_ids": [7, 8, 9, 10] * 6},
        {"prompt_token_ids": list(range(20, 44))},
    ]
    params = [SamplingParams(temperature=0.3, seed=i, max_tokens=24, logprobs=2) for i in range(2)]
    with make_llm(model) as plain:
        alone = [
            plain.generate([a], p, use_tqdm=False)[0] for a, p in zip(asked, params, strict=True)
        ]
    with make_llm(model, {"method": "ngram", "num_speculative_tokens": 4}) as drafted:
        mixed = drafted.generate(asked, params, use_tqdm=False)
        steps = [step for step in drafted.trace() if step.num_draft_tokens > 0]
        assert any(step.num_tokens < 2 * 5 and step.num_sequences == 2 for step in steps)
    for one, other in zip(alone, mixed, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert repr(one.outputs[0].logprobs) == repr(other.outputs[0].logprobs)


@pytest.mark.parametrize("accuracy", [0.0, 0.5, 1.0])
def test_rejected_guesses_are_not_found_in_the_prefix_cache(accuracy: float) -> None:
    """A follow-up of the whole text finds as much as without guesses, and one that goes on with the
    guesses that were wrong finds no more of it than without."""
    plain, drafted = make_engine(None), make_engine(accuracy)
    tokens, _ = run(plain, PROMPT)
    assert run(drafted, PROMPT)[0] == tokens
    wrong = [(token + 1) % VOCAB for token in tokens]
    for place in (0, 1, 3, 5, 6, 7, 12, 29):
        for prompt in (
            PROMPT + tokens[:place] + wrong[place : place + K],
            PROMPT + tokens[: place + 1],
        ):
            assert run(drafted, prompt) == run(plain, prompt)
    plain.close()
    drafted.close()


@pytest.mark.parametrize("window", [3, 4, 5, 9])
@pytest.mark.parametrize("accuracy", [0.0, 0.7, 1.0])
def test_a_window_keeps_what_rows_behind_rejected_guesses_look_at(
    window: int, accuracy: float
) -> None:
    """Guesses reach over the edges of blocks; those that leave the window with them are needed
    again where the guesses were wrong."""
    plain = make_engine(None, windows=(0, window))
    drafted = make_engine(accuracy, windows=(0, window))
    for length in range(1, 14):
        prompt = [(7 * i + length) % VOCAB for i in range(length)]
        assert run(drafted, prompt, max_tokens=40)[0] == run(plain, prompt, max_tokens=40)[0]
    plain.close()
    drafted.close()


def test_a_step_ahead_waits_for_what_was_drawn_before_it_is_guessed_from() -> None:
    """No guess stands behind a token that is not known yet."""
    plain = make_engine(None)
    drafted = make_engine(1.0, max_in_flight=2, step_us=200)
    for seed in range(3):
        assert run(drafted, PROMPT, seed=seed)[0] == run(plain, PROMPT, seed=seed)[0]
    assert drafted.metrics().num_accepted_tokens > 0
    plain.close()
    drafted.close()


def test_steps_are_recorded_with_guesses_and_without() -> None:
    """Where guessing is off it costs nothing, and a verifying step is one launch, too."""
    recorded_shape = _core_testing.cuda_launch.recorded_shape
    runner = Runner(num_blocks=64)
    runner.add(0, [1, 2, 3], max_tokens=12, has_drafter=True)
    runner.step()
    plan = runner.scheduler.schedule()
    assert recorded_shape(plan, 8, 1024, 4) == (1, 64, 0, True)
    sampled = runner.model.execute(plan)
    runner.scheduler.commit(sampled)
    _core_testing.draft_ready(runner.scheduler, 0, 0, 5, [1, 2])
    shape = recorded_shape(runner.scheduler.schedule(), 8, 1024, 4)
    assert shape is not None
    assert shape[:2] == (3, 64)


def histogram(engine: _core.Engine, name: str) -> tuple[int, float]:
    found = engine.histograms().by_name[name]
    return sum(found.counts), found.sum


def test_bursts_of_tokens_count_one_by_one_in_the_times_between_tokens() -> None:
    """As many observations as without guesses, and in sum the time from the first token to the
    last."""
    counts = []
    for accuracy in (None, 1.0):
        engine = make_engine(accuracy, step_us=500)
        run(engine, PROMPT, max_tokens=50)
        (record,) = engine.request_records()
        count, total = histogram(engine, "inter_token_latency_seconds")
        elapsed = (record.last_token_us - record.first_token_us) / 1e6
        assert total == pytest.approx(elapsed, abs=1e-5)
        counts.append(count)
        assert histogram(engine, "request_generation_tokens") == (1, 50)
        engine.close()
    assert counts == [49, 49]


@pytest.fixture(scope="module")
def model() -> str:
    return str(checkpoint("llama", eos_token_id=2))


def make_llm(model: str, config: dict[str, Any] | None = None, **options: Any) -> LLM:
    fields: dict[str, Any] = {
        "max_model_len": 128,
        "num_gpu_blocks_override": 200,
        "num_threads": 1,
        "dtype": "float32",
        "block_size": 8,
        **options,
    }
    if config is not None:
        fields["speculative_config"] = {"adaptive": False, **config}
    return LLM(model, **fields)


def test_more_rows_of_logits_than_are_computed_at_once(model: str) -> None:
    """16 sequences with seven guesses each: 128 rows, in parts of 64."""
    prompts = [
        {"prompt_token_ids": [(13 * i + 5 * j) % (VOCAB_SIZE - 3) + 3 for j in range(6)]}
        for i in range(16)
    ]
    params = [
        SamplingParams(temperature=0.9, seed=i, max_tokens=17, ignore_eos=True, logprobs=1 + i % 2)
        for i in range(16)
    ]
    results = []
    for config in (None, {"model": model, "num_speculative_tokens": 7}):
        with make_llm(model, config, max_num_batched_tokens=256) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            results.append([(o.outputs[0].token_ids, repr(o.outputs[0].logprobs)) for o in outputs])
            if config:  # the draft is the target: two steps of 16 x 8 rows
                assert llm.get_metrics().num_drafts <= 2 * 16
    assert results[0] == results[1]


def test_a_prefix_hit_is_as_long_as_without_guesses_and_guesses_stay_right(model: str) -> None:
    """The draft model has not seen what the target found in its cache, and computes it then."""
    shared = {"prompt_token_ids": [(11 * j) % (VOCAB_SIZE - 3) + 3 for j in range(40)]}
    longer = {"prompt_token_ids": [*shared["prompt_token_ids"], 17, 18, 19]}
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=21, ignore_eos=True)
    found = []
    for config in (None, {"model": model, "num_speculative_tokens": 4}):
        with make_llm(model, config) as llm:
            first = llm.generate([shared], params, use_tqdm=False)
            if config:  # what the draft has of it goes, and not what the target has
                llm.generate([{"prompt_token_ids": [4, 5]}], params, use_tqdm=False)
            before = llm.get_metrics()
            again = llm.generate([shared, longer], params, use_tqdm=False)
            found.append([(o.num_cached_tokens, o.outputs[0].token_ids) for o in (*first, *again)])
            assert again[0].num_cached_tokens == 32
            if config:
                after = llm.get_metrics()
                drafted = after.num_draft_tokens - before.num_draft_tokens
                assert after.num_accepted_tokens - before.num_accepted_tokens == drafted > 0
    assert found[0] == found[1]


@pytest.mark.parametrize("num_sequences", [1, 3, 8, 12])
def test_no_step_has_more_rows_than_those_whose_bits_do_not_depend_on_their_number(
    num_sequences: int,
) -> None:
    """On a GPU products of more than eight rows may sum in another order, unless asked not to."""
    fields: dict[str, Any] = {
        "cache": _core.CacheConfig(num_blocks=400, block_size=4),
        "scheduler": _core.SchedulerConfig(
            max_model_len=64, max_num_batched_tokens=64, max_num_seqs=16
        ),
        "speculation": _core.SpeculationConfig(
            method="draft_model", num_speculative_tokens=K, adaptive=False
        ),
    }
    engine = _core_testing.oracle_engine(
        _core.EngineConfig(**fields),
        _core_testing.OracleOptions(vocab_size=VOCAB, max_exact_rows=8),
        drafter=_core_testing.RecordedDrafter(vocab_size=VOCAB),
    )
    params = _core.SamplingParams(detokenize=False, max_tokens=30, seed=1, ignore_eos=True)
    left = {add_request(engine, [1, 2, i], params) for i in range(num_sequences)}
    deadline = time.monotonic() + DEADLINE_S
    while left:
        assert time.monotonic() < deadline
        left -= {e.request_id for e in engine.wait_events(0.1) if e.is_request_finished}
    drafted = [step for step in engine.trace() if step.num_draft_tokens > 0]
    num_rows = [step.num_tokens - step.num_prefill_tokens for step in drafted]
    assert all(num <= 8 for num in num_rows)
    if num_sequences < 8:
        assert max(num_rows) == min(8, num_sequences * (K + 1))
    engine.close()
