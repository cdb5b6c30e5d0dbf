"""grouped_linear: rows that multiply with weights of their own have the bits of linear alone."""

import numpy as np
import op_formulas as formulas
import pytest
from gguf_files import in_format
from llmserve import _core, _core_testing
from llmserve.errors import InvalidArgument

CPU_ISAS = [name for name, _ in _core_testing.cpu_isas()]
BLOCKS = [name for name, *_ in _core_testing.kept_formats()]
FORMATS = ["float32", "bfloat16", *(name for name, _ in _core.supported_quantizations()), *BLOCKS]
NUM_WEIGHTS = 5


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def pack(backend, rows, name):
    if name in ("float32", "bfloat16"):
        return backend.pack_linear([formulas.as_dtype(rows, name)], name)
    if name in BLOCKS:
        return backend.pack_blocks(in_format(name)("rows", rows)[0], name)
    return backend.pack_quantized(rows, name)


def ids_of(rng, rows_each):
    """Weight ids, shuffled: `rows_each` of the first weight, a few of the others, none of one."""
    counts = {0: rows_each, 1: 3, 2: 1, 4: 17}
    ids = np.repeat(list(counts), list(counts.values())).astype(np.int32)
    return rng.permutation(ids)


def check(backend, one_thread, weights, x, ids):
    """Every row has the bits of linear over that row alone, in any batch and on one thread. On CUDA
    where linear has one order whatever the rows; else it is near."""
    out = backend.grouped_linear(x, weights, ids)
    has_other_order = "gemv" in backend.description or "cuBLASLt" in backend.description

    def check_same(got, expected):
        if backend.name == "cuda" and has_other_order:
            np.testing.assert_allclose(got, expected, rtol=0, atol=0.01 * np.abs(expected).max())
        else:
            np.testing.assert_array_equal(got, expected)

    rows = np.arange(len(ids)) // (len(ids) // len(x))
    for r in {0, len(ids) // 2, len(ids) - 1, *np.flatnonzero(ids != 0)[:6].tolist()}:
        alone = backend.linear(x[rows[r]][None], weights[ids[r]])
        check_same(out[r : r + 1], alone)
    for w in set(ids.tolist()):
        check_same(out[ids == w], backend.linear(x[rows[ids == w]], weights[w]))
    half = np.arange(0, len(ids), 2)
    part = backend.grouped_linear(x[rows[half]], weights, ids[half])
    np.testing.assert_array_equal(part, out[half])
    np.testing.assert_array_equal(one_thread.grouped_linear(x, weights, ids), out)
    return out


@pytest.mark.parametrize("fast", CPU_ISAS, indirect=True)
@pytest.mark.parametrize("rows_each", [1, 64, 513])
@pytest.mark.parametrize("name", FORMATS)
def test_rows_have_the_bits_of_linear_with_their_own_weight(
    fast, fast_one_thread, rng, name, rows_each
):
    n, k = 70, 256
    weights = [pack(fast, normal(rng, n, k), name) for _ in range(NUM_WEIGHTS)]
    ids = ids_of(rng, rows_each)  # 22, 85 and 534 of them: 2, 5 and 3 a row of x
    x = normal(rng, len(ids) // {1: 2, 64: 5, 513: 3}[rows_each], k + 3)[:, :k]
    check(fast, fast_one_thread, weights, x, ids)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_agree_with_ref(ref_of_fast, fast, rng, name):
    n, k = 33, 256
    matrices = [normal(rng, n, k) for _ in range(NUM_WEIGHTS)]
    ids = ids_of(rng, 9)
    ids[4] = -1
    x, bias = normal(rng, len(ids) // 2, k), normal(rng, NUM_WEIGHTS, n)
    before = normal(rng, len(ids), n)
    got, expected = (
        backend.grouped_linear(
            x, [pack(backend, m, name) for m in matrices], ids, bias, before.copy()
        )
        for backend in (fast, ref_of_fast)
    )
    np.testing.assert_array_equal(got[4], before[4])
    tolerance = 0 if name not in ("float32", "bfloat16") else formulas.sum_tolerance(k)
    atol = tolerance * k**0.5 * 8
    if fast.name == "cuda":  # x is rounded to bf16 beside such weights, and integers are in parts
        atol = max(atol, (0.02 if name == "bfloat16" else 3e-6) * np.abs(expected).max())
    np.testing.assert_allclose(got, expected, atol=atol, rtol=0)


def test_odd_depths_and_weights_in_rows(fast, fast_one_thread, rng):
    n, k = 41, 301
    for dtype in ("float32", "bfloat16"):
        parts = [formulas.as_dtype(normal(rng, n, k), dtype) for _ in range(NUM_WEIGHTS)]
        ids = ids_of(rng, 39)
        x = normal(rng, len(ids), k)
        packed = [fast.pack_linear([part], dtype) for part in parts]
        out = check(fast, fast_one_thread, packed, x, ids)
        deferred = [fast.defer_linear([part], dtype) for part in parts]
        np.testing.assert_array_equal(fast.grouped_linear(x, deferred, ids), out)


def test_an_idle_weight_is_not_read(fast, rng):
    weights = [fast.pack_linear([normal(rng, 20, 32)], "float32") for _ in range(2)]
    poisoned = fast.defer_linear([np.full((20, 32), np.nan, np.float32)], "float32")
    x, ids = normal(rng, 4, 32), np.array([0, 2, 0, 2], np.int32)
    out = fast.grouped_linear(x, [weights[0], poisoned, weights[1]], ids)
    assert np.isfinite(out).all()


def test_what_is_wrong_is_named(fast, rng):
    x = normal(rng, 2, 32)
    weights = [fast.pack_linear([normal(rng, n, 32)], "float32") for n in (20, 20, 21)]
    ids = np.array([0, 1], np.int32)
    with pytest.raises(InvalidArgument, match=r"grouped_linear\.weights: .* one shape"):
        fast.grouped_linear(x, weights, ids)
    with pytest.raises(InvalidArgument, match=r"grouped_linear\.weight_ids: .* rows of x, got 3"):
        fast.grouped_linear(x, weights[:2], np.zeros(3, np.int32))
    with pytest.raises(InvalidArgument, match=r"grouped_linear\.weight_ids: expected int32"):
        fast.grouped_linear(x, weights[:2], np.zeros(2, np.float32))
    with pytest.raises(InvalidArgument, match=r"grouped_linear\.bias: "):
        fast.grouped_linear(x, weights[:2], ids, normal(rng, 3, 20))
    if fast.name == "cuda":
        return  # ids lie on the device
    with pytest.raises(InvalidArgument, match=r"grouped_linear\.weight_ids: .* got 2 at 1"):
        fast.grouped_linear(x, weights[:2], ids * 2)
