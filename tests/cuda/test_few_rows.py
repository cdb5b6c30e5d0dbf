"""Decoding's kernels on CUDA: products of few rows by tensor cores, and attention by one warp or by
several a span. Their shapes choose kernels; neither may change what a row comes to."""

import numpy as np
import pytest
from llmserve import _core_testing as testing
from parity.op_formulas import as_dtype, run_attention

REASON = testing.unavailable_reason("cuda")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(bool(REASON), reason=f"no CUDA here: {REASON}")]

MAX_ROWS = testing.cuda_launch.MMA_GEMV_MAX_ROWS


@pytest.fixture(scope="module")
def cuda():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMSERVE_CUDA_ATTENTION", "mma")  # by wgmma prompts have bits of their own
        return testing.make_backend("cuda")


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def silu(x):
    return x / (1 + np.exp(-x))


# Sixteen warps on narrow weights, four on others, two tiles of rows from 16384 on; a last block
# that is cut off, steps of K that not every warp has, and an end of K within a step.
SHAPES = [(24, 64), (1000, 1032), (2072, 136), (4096, 1024), (16_408, 40)]


@pytest.mark.parametrize("is_gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("is_normed", [False, True], ids=["as-is", "normed"])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_products_of_few_rows_are_right_and_the_same_in_any_company(
    cuda, rng, n, k, is_normed, is_gated
):
    rows = normal(rng, n, k)
    weight = cuda.pack_linear([as_dtype(rows, "bfloat16")], "bfloat16")
    exact = (as_dtype(rows, "bfloat16").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    x, norm, bias = normal(rng, MAX_ROWS + 1, k) * 3, normal(rng, k), normal(rng, n)
    activation = "silu" if is_gated else None

    def run(part):
        return cuda.fused_linear(
            np.ascontiguousarray(part),
            weight,
            bias,
            norm if is_normed else None,
            1e-5,
            1.0,
            activation,
        )

    product = x.astype(np.float64)
    if is_normed:
        product = product / np.sqrt((product**2).mean(axis=1, keepdims=True) + 1e-5) * (norm + 1.0)
    product = product @ exact.T + bias
    if is_gated:
        product = silu(product[:, : n // 2]) * product[:, n // 2 :]
    together = run(x[:MAX_ROWS])
    error = np.linalg.norm(together - product[:MAX_ROWS]) / np.linalg.norm(product)
    assert error < 0.01
    for begin, end in ((0, 1), (2, 4), (5, 8), (3, 7)):
        np.testing.assert_array_equal(run(x[begin:end]), together[begin:end])
    if not is_gated and not is_normed:
        out = cuda.linear(np.ascontiguousarray(x[3:8]), weight, bias, together[3:8].copy(), True)
        np.testing.assert_array_equal(out, together[3:8] + together[3:8])


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (2, 2, 80), (8, 1, 128)])
@pytest.mark.parametrize("options", [{}, {"window": 100, "soft_cap": 5.0}], ids=["whole", "window"])
def test_one_warp_a_span_and_one_a_unit_give_the_same_bits(
    cuda, rng, dtype, heads, kv_heads, dim, options
):
    """Many sequences take the former, few the latter; prompts take neither."""
    lengths = (1, 40, 64, 65, 200, 256, 257, 600)
    sequences = [tuple(normal(rng, n, kv_heads, dim) for _ in range(2)) for n in lengths]
    queries = [normal(rng, min(n, 16 // (heads // kv_heads)), heads, dim) for n in lengths]
    alone = [
        run_attention(cuda, [sequence], [query], dtype=dtype, **options)
        for sequence, query in zip(sequences, queries, strict=True)
    ]
    # Enough blocks, of three spans each, that a warp has a span for itself.
    crowd = 1 + 2 * 132 // (3 * kv_heads)
    short = (normal(rng, 3, kv_heads, dim), normal(rng, 3, kv_heads, dim))
    many = run_attention(
        cuda,
        [*sequences, *[short] * crowd],
        [*queries, *[normal(rng, 1, heads, dim)] * crowd],
        dtype=dtype,
        **options,
    )
    np.testing.assert_array_equal(many[: sum(map(len, queries))], np.concatenate(alone))
    # The last rows of a prompt, which has more than 16 of them.
    for sequence, query, got in zip(sequences, queries, alone, strict=True):
        if len(sequence[0]) < 40:
            continue
        prompt = np.concatenate([normal(rng, 40 - len(query), heads, dim), query])
        whole = run_attention(cuda, [sequence], [prompt], dtype=dtype, **options)
        np.testing.assert_array_equal(whole[-len(query) :], got)
