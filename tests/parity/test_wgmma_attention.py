"""Attention of prompts by wgmma, on sm_90, beside the reference and the kernel that is taken
elsewhere."""

import numpy as np
import op_formulas as formulas
import pytest
from checkpoints import checkpoint
from llmserve import LLM, InvalidArgument, NotSupported, SamplingParams
from llmserve import _core_testing as testing

REASON = testing.unavailable_reason("cuda")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(bool(REASON), reason=f"no CUDA here: {REASON}")]


def make(attention, gemm="auto"):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMSERVE_CUDA_GEMM", gemm)
        patch.setenv("LLMSERVE_CUDA_ATTENTION", attention)
        return testing.make_backend("cuda", 2)


@pytest.fixture(scope="module")
def wgmma():
    try:
        return make("wgmma")
    except NotSupported as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def mma():
    return make("mma")


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def pairs_and_queries(rng, lengths, heads, kv_heads, dim):
    pairs = [(normal(rng, n, kv_heads, dim), normal(rng, n, kv_heads, dim)) for n, _ in lengths]
    return pairs, [normal(rng, t, heads, dim) for _, t in lengths]


# Contexts and tokens, whole prompts and chunks: tiles of 128 positions and of 128 rows that end
# within, at and behind a boundary, beside sequences that other kernels take.
WIDE = [(1, 1), (70, 70), (300, 45), (40, 3)]
NARROW = [(129, 129), (200, 130), (50, 20), (384, 128)]


@pytest.mark.parametrize("options", [{}, {"window": 70, "soft_cap": 5.0}], ids=["plain", "window"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "lengths"),
    [
        *((8, 2, 64, WIDE), (2, 2, 64, NARROW), (10, 2, 128, WIDE), (1, 1, 128, NARROW)),
        (16, 1, 64, [(33, 9), (30, 30)]),
    ],
)
def test_prompts_match_the_reference_and_the_other_kernel(
    wgmma, mma, ref, rng, options, heads, kv_heads, dim, lengths
):
    batch = pairs_and_queries(rng, lengths, heads, kv_heads, dim)
    got, other, expected = (
        formulas.run_attention(backend, *batch, 16, "bfloat16", **options)
        for backend in (wgmma, mma, ref)
    )
    tolerance = formulas.ROUNDED_ATTENTION_TOLERANCE
    np.testing.assert_allclose(got, expected, atol=tolerance)
    np.testing.assert_allclose(got, other, atol=tolerance)
    assert not np.array_equal(got, other)  # it was another kernel
    starts = np.cumsum([0, *(t for _, t in lengths)])
    group = heads // kv_heads
    for (_, tokens), begin in zip(lengths, starts, strict=False):
        if tokens * group < max(128, 9 * group):  # decoding, guesses, short prompts
            rows = slice(begin, begin + tokens)
            np.testing.assert_array_equal(got[rows], other[rows])


@pytest.mark.parametrize("window", [0, 200])
def test_a_prompt_has_the_same_bits_in_any_chunks_blocks_and_company(wgmma, rng, window):
    n, heads, kv_heads, dim = 300, 4, 2, 64
    (pair, other), (q, other_q) = pairs_and_queries(rng, [(n, n), (90, 80)], heads, kv_heads, dim)
    options = {"window": window, "sinks": normal(rng, heads)}
    whole = formulas.run_attention(wgmma, [pair], [q], 16, "bfloat16", **options)
    assert np.isfinite(whole).all()  # what lies in unused slots is NaN
    for begin, end in ((0, 65), (65, 194), (194, 300)):
        prefix = tuple(part[:end] for part in pair)
        batch = [other, prefix], [other_q, q[begin:end]]
        for block_size in (4, 32):
            chunk = formulas.run_attention(wgmma, *batch, block_size, "bfloat16", **options)
            np.testing.assert_array_equal(chunk[80:], whole[begin:end])


@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
def test_a_row_of_nan_reaches_those_who_see_it_and_rows_of_the_same_prompt_and_head(
    wgmma, rng, part
):
    n, dim, window = 200, 64, 40
    (pair, other), (q, other_q) = pairs_and_queries(rng, [(n, n)] * 2, 4, 2, dim)
    run = [pair, other], [q, other_q], 16, "bfloat16"
    clean = formulas.run_attention(wgmma, *run, window=window)
    pair[part][50, 0, 3] = np.nan
    got = formulas.run_attention(wgmma, *run, window=window)
    assert np.isnan(got[50 : 50 + window, :2]).any(-1).all()
    np.testing.assert_array_equal(got[n:], clean[n:])  # the other sequence
    np.testing.assert_array_equal(got[:, 2:], clean[:, 2:])  # the other KV head
    np.testing.assert_array_equal(got[:50, 2:], clean[:50, 2:])
    # A tile of rows that cannot see it: the last ones, from the position 192 on.
    np.testing.assert_array_equal(got[192:n], clean[192:n])


def test_products_that_promise_bits_go_with_mma_and_the_rest_is_refused_by_name():
    assert "wgmma for prompts" not in make("fastest", "invariant").description
    for gemm in ("invariant", "plain"):
        with pytest.raises(InvalidArgument, match="use mma"):
            make("wgmma", gemm)
    with pytest.raises(InvalidArgument, match="expected mma, fastest, wgmma or plain, got other"):
        make("other")


def test_a_gpu_whose_wgmma_is_wrong_computes_by_mma(mma, rng, monkeypatch):
    if "emulated" not in mma.description:
        pytest.skip("a GPU's products are as they are")
    monkeypatch.setenv("LLMSERVE_EMULATOR_WGMMA", "wrong")
    batch = pairs_and_queries(rng, [(150, 150)], 2, 1, 64)
    backend = make("fastest")
    assert "wgmma for prompts" in backend.description
    got = formulas.run_attention(backend, *batch, 16, "bfloat16")
    assert "wgmma differs from mma by" in backend.description
    expected = formulas.run_attention(mma, *batch, 16, "bfloat16")
    np.testing.assert_array_equal(got, expected)
    with pytest.raises(NotSupported, match="ATTENTION=wgmma: wgmma differs from mma by"):
        formulas.run_attention(make("wgmma"), *batch, 16, "bfloat16")


def test_an_engine_says_at_load_by_what_prompts_attend(wgmma, monkeypatch):
    def run(attention):
        monkeypatch.setenv("LLMSERVE_CUDA_ATTENTION", attention)
        path = checkpoint("qwen3", head_dim=64)
        with LLM(path, device="cuda", dtype="bfloat16", max_model_len=160) as llm:
            description = llm.description
            outputs = llm.generate(
                [list(range(5, 105))], SamplingParams(max_tokens=3, temperature=0)
            )
        return description, outputs[0].outputs[0].token_ids

    description, _ = run("wgmma")
    assert "wgmma for prompts" in description
    assert "differs" not in description
    if "emulated" not in description:
        return
    by_mma, tokens = run("mma")
    assert "wgmma for prompts" not in by_mma
    monkeypatch.setenv("LLMSERVE_EMULATOR_WGMMA", "wrong")
    description, fallen_back = run("fastest")
    assert "wgmma differs from mma by" in description
    assert fallen_back == tokens
