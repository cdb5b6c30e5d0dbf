"""H1: a request's tokens and logprobs are the same bits whatever the company.

Every test runs the same twelve requests in another way and compares with each of them run alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from checkpoints import VOCAB_SIZE, checkpoint
from llmserve import LLM, RequestOutput, SamplingParams, _core, _core_testing

MAX_TOKENS = 20

# One request's tokens and, for each, the sampled and the most likely ids with their logprobs.
Result = tuple[list[int], list[dict[int, tuple[float, int | None]]]]


def make_requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 1 to 150 tokens, half of them on a common prefix of 40; greedy and seeded."""
    rng = random.Random(7)
    common = [rng.randrange(3, VOCAB_SIZE) for _ in range(40)]
    prompts, params = [], []
    for i, length in enumerate([1, 2, 15, 16, 17, 31, 33, 64, 65, 100, 127, 150]):
        tail = [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
        prompts.append(common + tail if i % 2 else tail)
        sampling = {"temperature": 0.0} if i % 3 == 0 else {"temperature": 0.9, "seed": 1000 + i}
        filters = {"top_k": 40, "top_p": 0.9, "min_p": 0.01} if i % 3 == 2 else {}
        params.append(
            SamplingParams(
                max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=3, **sampling, **filters
            )
        )
    return prompts, params


PROMPTS, PARAMS = make_requests()


def result(output: RequestOutput, sample: int = 0) -> Result:
    completion = output.outputs[sample]
    assert completion.logprobs is not None
    rows = [{i: (lp.logprob, lp.rank) for i, lp in row.items()} for row in completion.logprobs]
    return list(completion.token_ids), rows


def run(llm: LLM, order: Sequence[int] | None = None) -> list[Result]:
    """All requests in one batch, handed over in this order; results in the order of PROMPTS."""
    order = list(order) if order is not None else list(range(len(PROMPTS)))
    outputs = llm.generate(
        [{"prompt_token_ids": PROMPTS[i]} for i in order],
        [PARAMS[i] for i in order],
        use_tqdm=False,
    )
    by_request = dict(zip(order, outputs, strict=True))
    return [result(by_request[i]) for i in range(len(PROMPTS))]


@pytest.fixture(scope="module", params=["float32", "bfloat16", "int8", "int4-g32", "fp8"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make_llm(dtype: str, **options: object) -> LLM:
    defaults = {"max_model_len": 256, "num_gpu_blocks_override": 512, "num_threads": 1}
    if dtype.startswith("int"):
        wide = checkpoint("llama", hidden_size=64, intermediate_size=96)  # whole groups
        return LLM(str(wide), quantization=dtype, **{**defaults, **options})
    if dtype == "fp8":
        defaults["kv_cache_dtype"], dtype = "fp8", "bfloat16"
    return LLM(str(checkpoint("llama")), dtype=dtype, **{**defaults, **options})


@pytest.fixture(scope="module")
def alone(dtype: str) -> list[Result]:
    """Each request by itself in an engine that caches nothing."""
    with make_llm(dtype, enable_prefix_caching=False) as llm:
        results = []
        for prompt, params in zip(PROMPTS, PARAMS, strict=True):
            results += [
                result(o)
                for o in llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
            ]
        assert llm.get_metrics().prefix_cache_hits == 0
    assert len({tuple(tokens) for tokens, _ in results}) > len(PROMPTS) // 2, "a model of one word"
    return results


def test_in_a_batch(dtype: str, alone: list[Result]) -> None:
    with make_llm(dtype) as llm:
        assert run(llm) == alone


def test_in_any_order_of_arrival(dtype: str, alone: list[Result]) -> None:
    order = list(range(len(PROMPTS)))
    with make_llm(dtype) as llm:
        for seed in range(3):
            random.Random(seed).shuffle(order)
            llm.reset_prefix_cache()
            assert run(llm, order) == alone


@pytest.mark.parametrize("budget", [12, 16, 17, 50])
def test_in_chunks(dtype: str, alone: list[Result], budget: int) -> None:
    with make_llm(dtype, max_num_batched_tokens=budget, max_num_seqs=12) as llm:
        assert run(llm) == alone
        kinds = {d.kind for step in llm.trace() for d in step.decisions}
        assert "chunked" in kinds


def set_scheduler(monkeypatch: pytest.MonkeyPatch, **fields: int) -> None:
    """Of every LLM made after it."""
    real = _core.ConfigRequest

    def request(**settings: object) -> _core.ConfigRequest:
        return real(**{**settings, **fields})

    monkeypatch.setattr(_core, "ConfigRequest", request)


def test_in_chunks_as_time_allows(
    dtype: str, alone: list[Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_scheduler(monkeypatch, max_stall_us=1)  # less than any machine needs
    with make_llm(dtype, max_num_batched_tokens=40, max_num_seqs=12) as llm:
        assert run(llm) == alone
        kinds = {d.kind for step in llm.trace() for d in step.decisions}
        assert {"chunked_for_pace", "waits_for_pace"} <= kinds


def test_spread_over_the_steps_of_the_longest(
    dtype: str, alone: list[Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_scheduler(monkeypatch, min_spread_tokens=7)
    longest = len(PROMPTS) - 1
    params = [replace(p, max_tokens=MAX_TOKENS if p is PARAMS[longest] else 2) for p in PARAMS]
    spread, kinds = {"chunked_to_spread", "waits_to_spread"}, set()
    with make_llm(dtype, max_num_batched_tokens=200) as llm:
        for _ in range(20):  # the longest may have ended before this thread has handed over all
            llm.reset_prefix_cache()
            outputs = llm.generate(
                [{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False
            )
            for output, one, (tokens, rows) in zip(outputs, params, alone, strict=True):
                assert result(output) == (tokens[: one.max_tokens], rows[: one.max_tokens])
            kinds |= {d.kind for step in llm.trace() for d in step.decisions}
            if spread <= kinds:
                break
    assert spread <= kinds


@pytest.mark.parametrize(("fail_at_step", "fault"), [(2, "memory"), (5, "memory"), (9, "device")])
def test_beside_a_step_that_fails(
    dtype: str,
    alone: list[Result],
    fail_at_step: int,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step has written all its keys and values when its batch ends, and its prompts share
    blocks with those of the others."""

    def engine(
        loading: _core.LoadingModel, vocabulary: _core.Vocabulary | None = None
    ) -> _core.Engine:
        faults = _core_testing.FaultOptions(fail_at_step=fail_at_step, fault=fault)
        return _core_testing.faulty_engine(loading.config, faults, vocabulary)

    monkeypatch.setattr(_core, "Engine", engine)
    with make_llm(dtype, max_num_batched_tokens=40, max_num_seqs=5) as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
        failed = [o.outputs[0].finish_reason == "error" for o in outputs]
        assert 0 < sum(failed) <= 5
        for output, has_failed, expected in zip(outputs, failed, alone, strict=True):
            tokens, rows = result(output)
            assert (tokens, rows) == (expected[0][: len(tokens)], expected[1][: len(tokens)])
            assert has_failed or len(tokens) == MAX_TOKENS
        assert run(llm) == alone
        assert llm.get_metrics().num_blocks_used == 0


def test_without_chunks(dtype: str, alone: list[Result]) -> None:
    with make_llm(dtype, enable_chunked_prefill=False) as llm:
        assert run(llm) == alone


def test_with_a_cached_prefix(dtype: str, alone: list[Result]) -> None:
    with make_llm(dtype) as llm:
        assert run(llm) == alone
        before = llm.get_metrics().prefix_cache_hits
        assert run(llm) == alone
        assert llm.get_metrics().prefix_cache_hits - before > 500


def test_preempted(dtype: str, alone: list[Result]) -> None:
    """A pool of 30 blocks for requests that need 80."""
    with make_llm(dtype, num_gpu_blocks_override=30) as llm:
        assert run(llm) == alone
        assert llm.get_metrics().num_preemptions > 0


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_in_blocks_of_any_size(dtype: str, alone: list[Result], block_size: int) -> None:
    with make_llm(dtype, block_size=block_size) as llm:
        assert run(llm) == alone


def test_on_any_number_of_threads(dtype: str, alone: list[Result]) -> None:
    for num_threads in (2, 3):
        with make_llm(dtype, num_threads=num_threads) as llm:
            assert run(llm) == alone


def test_a_few_at_a_time(dtype: str, alone: list[Result]) -> None:
    with make_llm(dtype, max_num_seqs=3) as llm:
        assert run(llm) == alone


@pytest.mark.parametrize("policy", [name for name, _ in _core.supported_policies()])
def test_under_any_policy(dtype: str, alone: list[Result], policy: str) -> None:
    with make_llm(dtype, scheduling_policy=policy, max_num_seqs=5) as llm:
        assert run(llm) == alone


def test_the_first_of_n_samples_is_the_only_sample(dtype: str, alone: list[Result]) -> None:
    """n > 1 shares the prompt's blocks and must not change sample 0; the others differ from it."""
    sampled = [i for i, p in enumerate(PARAMS) if p.temperature > 0]
    with make_llm(dtype) as llm:
        for i in sampled[:4]:
            params = SamplingParams(
                n=3,
                max_tokens=MAX_TOKENS,
                ignore_eos=True,
                logprobs=3,
                temperature=PARAMS[i].temperature,
                seed=PARAMS[i].seed,
                top_k=PARAMS[i].top_k,
                top_p=PARAMS[i].top_p,
                min_p=PARAMS[i].min_p,
            )
            (output,) = llm.generate([{"prompt_token_ids": PROMPTS[i]}], params, use_tqdm=False)
            samples = [result(output, s) for s in range(3)]
            assert samples[0] == alone[i]
            assert samples[1][0] != samples[0][0]
            assert samples[2][0] != samples[1][0]
