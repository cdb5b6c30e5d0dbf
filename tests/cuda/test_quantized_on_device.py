"""Weights of integers on a GPU, beside what tests/parity compares op by op: models, and products of
any number of rows."""

import numpy as np
import pytest
from checkpoints import checkpoint
from gguf_files import in_format
from llmserve import LLM, SamplingParams
from llmserve import _core_testing as testing

REASON = testing.unavailable_reason("cuda")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(bool(REASON), reason=f"no CUDA here: {REASON}")]

PROMPTS = [list(range(5, 5 + n)) for n in (3, 17, 1, 40)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def generate(llm, prompts):
    """Each prompt's tokens and their log-probabilities."""
    outputs = [output.outputs[0] for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    return [
        (
            list(output.token_ids),
            [
                step[token].logprob
                for token, step in zip(output.token_ids, output.logprobs, strict=True)
            ],
        )
        for output in outputs
    ]


@pytest.mark.parametrize("quantization", ["int8", "int4-g32-asym"])
def test_a_quantized_model_gives_the_tokens_of_ref_and_the_same_in_company(quantization):
    """Decoding is bound to few rows and prompts to many: two kernels. Attention, in a cache of
    floats, and all else have one order, so that company may not change a bit."""
    path = checkpoint("qwen3", hidden_size=64, intermediate_size=96)
    results = {}
    for device in ("cuda", "ref"):
        with LLM(path, device=device, quantization=quantization, dtype="float32") as llm:
            results[device] = generate(llm, PROMPTS)
            if device == "cuda":
                alone = [generate(llm, [prompt])[0] for prompt in PROMPTS]
    assert alone == results["cuda"]
    for (got, got_logprobs), (tokens, logprobs) in zip(
        results["cuda"], results["ref"], strict=True
    ):
        assert got == tokens
        np.testing.assert_allclose(got_logprobs, logprobs, atol=1e-3)


@pytest.mark.parametrize("name", ["int8", "int4", "Q4_K", "Q6_K", "MXFP4"])
@pytest.mark.parametrize(("n", "k"), [(4096, 1024), (1000, 3072)])
def test_products_of_every_number_of_rows_have_the_same_bits_and_are_right(rng, name, n, k):
    cuda = testing.make_backend("cuda")
    rows = rng.standard_normal((n, k), dtype=np.float32)
    if name.startswith("int"):
        weight, plain = (b.pack_quantized(rows, name) for b in (cuda, testing.make_backend("ref")))
    else:
        blocks = in_format(name)("rows", rows)[0]
        weight, plain = (b.pack_blocks(blocks, name) for b in (cuda, testing.make_backend("ref")))
    x = rng.standard_normal((70, k), dtype=np.float32) * 3
    whole = cuda.linear(x, weight)
    for m in (1, 2, 7, 8, 9, 31, 33):
        np.testing.assert_array_equal(cuda.linear(x[:m], weight), whole[:m])
        np.testing.assert_array_equal(cuda.linear(x[70 - m :], weight), whole[70 - m :])
    expected = testing.make_backend("ref").linear(x[:2], plain)
    np.testing.assert_allclose(whole[:2], expected, rtol=0, atol=3e-6 * np.abs(expected).max())
