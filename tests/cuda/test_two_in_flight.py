"""Steps in flight on the device: what they draw is what one step after another draws."""

import pytest
from checkpoints import checkpoint
from llmserve import LLM, SamplingParams, _core_testing

REASON = _core_testing.unavailable_reason("cuda")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(bool(REASON), reason=f"no CUDA here: {REASON}")]

# Of every kind that the engine tells apart: drawn with or without edits, a step ahead or not, and
# both in turn.
PARAMS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 1, "top_k": 40, "top_p": 0.9},
    {"temperature": 0.8, "seed": 2, "min_p": 0.05, "logprobs": 2},
    {"temperature": 1.2, "seed": 3, "repetition_penalty": 1.2},
    {"temperature": 0.7, "seed": 4, "n": 2},
    {"temperature": 1.0, "seed": 5, "min_tokens": 4, "stop_token_ids": list(range(0, 300, 7))},
    {"temperature": 1.0, "seed": 6, "stop_token_ids": list(range(0, 300, 11))},
    {"temperature": 0.0, "repetition_penalty": 0.6, "logprob_token_ids": [3, 200]},
    # The newest token decides the next one, even if it is not counted yet.
    {"temperature": 0.0, "logit_bias": {7: 50.0, 9: 50.0}, "frequency_penalty": 2.0},
    {"temperature": 1.0, "seed": 9, "allowed_token_ids": [3, 4, 5], "presence_penalty": 2.0},
    {"temperature": 1.0, "seed": 10, "bad_words": ["a", "b c"], "repetition_penalty": 1.5},
    {"temperature": 1.0, "seed": 11, "prompt_logprobs": 1, "logprobs": 0},
]
PROMPTS = [list(range(5 + i, 5 + i + 4 + 5 * i)) for i in range(len(PARAMS))]


@pytest.fixture(scope="module", autouse=True)
def plain_products():
    """With the same bits whatever the batch is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMSERVE_CUDA_GEMM", "plain")
        yield


def generate(**options):
    """Token ids, ends and log-probabilities of each sample; whether any row waited for a step.

    The pool is so small that some have to leave it.
    """
    params = [SamplingParams(max_tokens=12, ignore_eos=True, **fields) for fields in PARAMS]
    with LLM(
        checkpoint("qwen3"),
        max_model_len=96,
        max_num_batched_tokens=32,
        num_gpu_blocks_override=14,
        block_size=8,
        **options,
    ) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        decisions = [d.kind for step in llm._engine.trace() for d in step.decisions]
    samples = [
        (sample.token_ids, sample.finish_reason, sample.logprobs)
        for output in outputs
        for sample in output.outputs
    ]
    return samples, "waits_for_step" in decisions


@pytest.fixture(scope="module")
def one_after_another():
    return generate(device="cuda", async_scheduling=False)


def test_a_step_ahead_draws_the_same_tokens(one_after_another):
    samples, has_waited = generate(device="cuda")
    assert samples == one_after_another[0]
    # Only while a step is in flight is there something to wait for.
    assert (has_waited, one_after_another[1]) == (True, False)


def test_the_device_draws_the_tokens_of_the_reference(one_after_another):
    expected, _ = generate(device="ref")
    assert [tokens for tokens, *_ in one_after_another[0]] == [tokens for tokens, *_ in expected]


def test_counts_that_stay_on_the_device_are_those_of_the_text():
    """Lists grow beyond the memory that they begin with, leave it to other requests, and outlive
    a sequence's leaving the pool."""

    def tokens(device):
        params = [
            SamplingParams(
                max_tokens=20 + 4 * i,
                ignore_eos=True,
                temperature=1.0,
                seed=i,
                repetition_penalty=1.5 - 0.2 * i,
                frequency_penalty=0.3 * i,
            )
            for i in range(4)
        ]
        prompts = [list(range(3, 10)), list(range(3, 63)), [7] * 9, list(range(100, 170))]
        with LLM(
            checkpoint("qwen3"),
            device=device,
            max_model_len=96,
            max_num_batched_tokens=96,
            num_gpu_blocks_override=24,
            block_size=8,
        ) as llm:
            rounds = [llm.generate(p, params, use_tqdm=False) for p in (prompts, prompts[::-1])]
            preempted = llm.get_metrics().num_preemptions
        return [output.outputs[0].token_ids for outputs in rounds for output in outputs], preempted

    got, num_preempted = tokens("cuda")
    assert got == tokens("ref")[0]
    assert num_preempted > 0
