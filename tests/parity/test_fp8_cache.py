"""Caches of 8-bit floats: what is stored, what is read, and that no bit depends on company."""

import numpy as np
import op_formulas as formulas
import pytest
import torch
from llmserve import ops
from llmserve.errors import InvalidArgument
from test_ops import normal

SMALLEST_NORMAL = np.float32(2.0**-126)
SHAPES = [(4, 4, 64), (8, 1, 128), (6, 2, 80), (3, 3, 36), (5, 1, 72), (2, 1, 256), (16, 1, 96)]


def empty_cache(num_blocks, heads, block_size, dim):
    """Bytes of no meaning: what is not written must stay so."""
    return np.full((num_blocks, heads, block_size, dim + 4), 0xA5, np.uint8)


def store(backend, rows, block_size=16):
    """The bytes of rows [T, K, D] stored as keys, and as values, in blocks one after another."""
    count, heads, dim = rows.shape
    caches = [empty_cache(-(-count // block_size), heads, block_size, dim) for _ in range(2)]
    backend.store_kv(rows, rows, np.arange(count), *caches)
    np.testing.assert_array_equal(*caches)
    return caches[0]


def expected_bytes(rows, block_size=16):
    """The same, by the formulas."""
    count, heads, dim = rows.shape
    blocks = -(-count // block_size)
    padded = np.full((blocks * block_size, heads, dim), 1.0, np.float32)
    padded[:count] = rows
    by_head = padded.reshape(blocks, block_size, heads, dim).swapaxes(1, 2)
    return formulas.to_fp8_cache(np.ascontiguousarray(by_head))


def parts_of(cache):
    """Codes [K, N * P, D] and scales [K, N * P] of a cache."""
    n, heads, block_size, row = cache.shape
    flat = cache.reshape(n, heads, -1)
    codes = flat[:, :, : block_size * (row - 4)].reshape(n, heads, block_size, row - 4)
    scales = flat[:, :, block_size * (row - 4) :].copy().view(np.float32)
    return codes.swapaxes(0, 1).reshape(heads, -1, row - 4), scales.swapaxes(0, 1).reshape(
        heads, -1
    )


def test_every_code_is_read_as_its_number(any_backend):
    codes = np.arange(256, dtype=np.uint8).reshape(4, 1, 1, 64)  # 4 blocks of one token
    numbers = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy().reshape(4, 1, 64)
    for scale in (1.0, 2.0**-126, 2.0**100):
        scales = np.full((4, 1, 1, 1), scale, np.float32).view(np.uint8)
        cache = np.concatenate([codes, scales], axis=3)
        queries = np.zeros((4, 1, 64), np.float32)
        keys = formulas.to_fp8_cache(np.zeros((4, 1, 1, 64), np.float32))
        got = any_backend.paged_attention(
            queries, keys, cache, np.arange(5), np.ones(4), np.arange(4).reshape(4, 1), 1.0
        )
        expected = numbers * np.float32(scale)
        if formulas.multiplies_bf16(any_backend):  # and takes subnormals as zero
            expected[np.abs(expected) < SMALLEST_NORMAL] = 0
        is_number = ~np.isnan(expected)  # no row that was stored has codes of NaN
        np.testing.assert_array_equal(got[is_number], expected[is_number])


def test_codes_are_rounded_as_torch_rounds_them(any_backend, rng):
    numbers = formulas.E4M3
    middles = (numbers[1:] + numbers[:-1]) / 2  # ties
    near = np.float32(middles)
    x = np.concatenate(
        [
            numbers,
            middles,
            np.nextafter(near, 0.0),
            np.nextafter(near, 1e9),
            rng.uniform(0, 448, 500),
        ]
    ).astype(np.float32)
    x = np.concatenate([x, -x, np.exp2(rng.uniform(-30, 8, 1004)).astype(np.float32)])
    rows = np.resize(x, (-(-x.size // 63), 1, 64))
    rows[:, 0, :63] = np.resize(x, rows[:, 0, :63].shape)
    rows[:, :, 63] = 448.0  # so that the scale is 1
    stored = store(any_backend, rows, block_size=1)
    codes = torch.from_numpy(rows).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(stored[:, 0, 0, :64], codes[:, 0])
    np.testing.assert_array_equal(stored[:, 0, 0, 64:].copy().view(np.float32), 1.0)


@pytest.mark.parametrize("block_size", [16, 7])
@pytest.mark.parametrize("dim", [64, 20])
def test_rows_are_stored_with_their_scales(any_backend, rng, block_size, dim):
    rows = normal(rng, 40, 3, dim) * np.exp2(rng.uniform(-140, 120, (40, 3, 1))).astype(np.float32)
    rows[1, 1] = 0
    rows[2, 0] = np.float32(1e-45)
    rows[3, 2, 5:] = -0.0
    rows[4, 1, 3] = np.finfo(np.float32).max
    rows[5, 0, :2] = [448.0, np.nextafter(np.float32(448), np.float32(500))]
    codes, scales = parts_of(store(any_backend, rows, block_size))
    expected_codes, expected_scales = parts_of(expected_bytes(rows, block_size))
    np.testing.assert_array_equal(codes[:, :40], expected_codes[:, :40])
    np.testing.assert_array_equal(scales[:, :40], expected_scales[:, :40])


def test_a_token_is_written_to_its_slot_and_nowhere_else(any_backend, rng):
    caches = [empty_cache(3, 2, 8, 16) for _ in range(2)]
    before = caches[0].copy()
    rows = normal(rng, 3, 2, 16)
    any_backend.store_kv(rows, rows, [13, -1, 7], *caches)
    changed = (caches[0] != before).reshape(3, 2, -1)
    expected = np.zeros_like(changed)
    for block, offset in ((1, 5), (0, 7)):
        expected[block, :, offset * 16 : offset * 16 + 16] = True
        expected[block, :, 8 * 16 + offset * 4 : 8 * 16 + offset * 4 + 4] = True
    assert not (changed & ~expected).any()
    scales = caches[0].reshape(3, 2, -1)[1, :, 8 * 16 + 20 : 8 * 16 + 24].copy().view(np.float32)
    assert (np.abs(rows[0]).max(-1, keepdims=True) <= 448 * scales).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_nan_and_its_neighbours_are_not(any_backend, rng, bad):
    rows = normal(rng, 20, 1, 32)
    rows[3, 0, 17] = bad
    cache = store(any_backend, rows)
    for got, expected in zip(parts_of(cache), parts_of(expected_bytes(rows)), strict=True):
        np.testing.assert_array_equal(got[:, :20], expected[:, :20])
    zeros = formulas.to_fp8_cache(np.zeros((2, 1, 16, 32), np.float32))
    outs, before = (
        any_backend.paged_attention(
            np.zeros((n, 1, 32), np.float32), zeros, cache, [0, n], [n], np.array([[0, 1]]), 1.0
        )
        for n in (20, 3)
    )
    assert np.isfinite(before).all()
    assert np.isnan(outs[3:]).all()  # those that see it
    if "tiled attention" not in any_backend.description:  # where rows of a prompt share tiles
        np.testing.assert_array_equal(outs[:3], before)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
def test_attention_over_codes_matches_ref(
    fast, ref_of_fast, attention_tolerance, rng, heads, kv_heads, dim
):
    lengths = [(1, 1), (90, 20), (64, 1), (65, 3), (300, 1)]
    sequences = [(normal(rng, n, kv_heads, dim), normal(rng, n, kv_heads, dim)) for n, _ in lengths]
    queries = [normal(rng, t, heads, dim) for _, t in lengths]
    tolerance = attention_tolerance("fp8")
    layout = fast.key_layout(16, dim, dim, "fp8")
    for options in ({}, {"window": 70, "soft_cap": 5.0}):
        got, expected = (
            formulas.run_attention(backend, sequences, queries, 16, "fp8", layout, **options)
            for backend in (fast, ref_of_fast)
        )
        np.testing.assert_allclose(got, expected, atol=tolerance)


@pytest.mark.parametrize("exponent", [-149, -120, 100])
def test_rows_at_the_ends_of_the_range_match_ref(
    fast, ref_of_fast, attention_tolerance, rng, exponent
):
    """Rows of which no two have the same magnitude, and some are zeros. Queries that are bfloat16:
    where keys are large one position takes all, which their rounding would choose."""
    n, heads, dim = 150, 2, 64
    spread = np.exp2(rng.integers(0, 20, (2, n, heads, 1))).astype(np.float32)
    spread[:, ::7] = 0
    keys, values = normal(rng, 2, n, heads, dim) * spread
    keys *= np.float32(2.0**-20)
    values = np.ldexp(values, exponent)
    q = formulas.from_bf16(formulas.to_bf16(normal(rng, 40, 2 * heads, dim)))
    layout = fast.key_layout(16, dim, dim, "fp8")
    for pair in ((keys, values), (np.ldexp(keys, exponent), values)):
        got, expected = (
            formulas.run_attention(backend, [pair], [q], 16, "fp8", layout)
            for backend in (fast, ref_of_fast)
        )
        largest = np.abs(values).max() + 2**4 * SMALLEST_NORMAL  # by which sums may be cut off
        np.testing.assert_allclose(
            got / largest, expected / largest, atol=attention_tolerance("fp8")
        )


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
def test_codes_give_the_bits_of_their_numbers_in_a_wider_cache(fast, rng, heads, kv_heads, dim):
    """A code times a power of two is a bfloat16 exactly."""
    lengths = [(150, 40), (64, 1), (300, 1)]
    rounded = [
        tuple(formulas.through_fp8(normal(rng, n, kv_heads, dim)) for _ in range(2))
        for n, _ in lengths
    ]
    queries = [normal(rng, t, heads, dim) for _, t in lengths]
    layout = fast.key_layout(16, dim, dim, "fp8")
    for options in ({}, {"window": 70, "soft_cap": 5.0}):
        narrow, in_rows, wide = (
            formulas.run_attention(fast, rounded, queries, 16, *kind, **options)
            for kind in (("fp8", layout), ("fp8",), ("bfloat16",))
        )
        np.testing.assert_array_equal(narrow, in_rows)
        if fast.name == "cpu" or dim % 16 == 0:  # or rows of codes are not aligned
            np.testing.assert_array_equal(in_rows, wide)


@pytest.mark.parametrize("dim", [16, 48, 64, 144])
def test_any_number_of_query_heads_takes_codes_to_the_bits_of_a_wider_cache(fast, rng, dim):
    """Few rows may take codes as they are, more a tile that is widened first; columns of values in
    runs of 16, 32 and 64."""
    lengths = [150, 64, 33]
    sequences = [tuple(formulas.through_fp8(normal(rng, n, 1, dim)) for _ in "kv") for n in lengths]
    layout = fast.key_layout(16, dim, dim, "fp8")
    for heads in range(1, 14):
        queries = [normal(rng, 1, heads, dim) for _ in lengths]
        for options in ({}, {"window": 70, "soft_cap": 5.0}, {"window": 69}):
            narrow, wide = (
                formulas.run_attention(fast, sequences, queries, 16, *kind, **options)
                for kind in (("fp8", layout), ("bfloat16",))
            )
            np.testing.assert_array_equal(narrow, wide)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 64), (3, 3, 36)])
@pytest.mark.parametrize("options", [{}, {"window": 70, "soft_cap": 5.0}], ids=["plain", "window"])
def test_chunks_and_batches_over_codes_equal_the_whole(
    fast, fast_one_thread, rng, options, heads, kv_heads, dim
):
    n = 200
    pair = normal(rng, n, kv_heads, dim), normal(rng, n, kv_heads, dim)
    other = normal(rng, 90, kv_heads, dim), normal(rng, 90, kv_heads, dim)
    q, other_q = normal(rng, n, heads, dim), normal(rng, 30, heads, dim)
    whole = formulas.run_attention(fast, [pair], [q], 16, "fp8", **options)
    assert np.isfinite(whole).all()  # what lies in unused slots is NaN
    # On CUDA rows that are not aligned, as in blocks of 7, take another kernel, of other bits.
    for block_size in (4, 7 if fast.name == "cpu" else 8, 32):
        again = formulas.run_attention(fast, [pair], [q], block_size, "fp8", **options)
        np.testing.assert_array_equal(again, whole)
    for block_size in (16, 32, 48, 128):
        layout = fast.key_layout(block_size, dim, dim, "fp8")
        again = formulas.run_attention(fast, [pair], [q], block_size, "fp8", layout, **options)
        np.testing.assert_array_equal(again, whole)
    one_thread = formulas.run_attention(fast_one_thread, [pair], [q], 16, "fp8", **options)
    np.testing.assert_array_equal(one_thread, whole)
    layout = fast.key_layout(16, dim, dim, "fp8")
    for begin, end in ((0, 50), (50, 130), (130, 199), (199, 200), (99, 100)):
        prefix = tuple(part[:end] for part in pair)
        chunk = formulas.run_attention(
            fast, [other, prefix], [other_q, q[begin:end]], 16, "fp8", layout, **options
        )
        np.testing.assert_array_equal(chunk[30:], whole[begin:end])


@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
def test_a_row_of_nan_is_seen_by_those_that_see_it_alone(fast, rng, part):
    n, dim = 130, 64
    pair, other = ((normal(rng, n, 2, dim), normal(rng, n, 2, dim)) for _ in range(2))
    q = normal(rng, n, 4, dim)
    layout = fast.key_layout(16, dim, dim, "fp8")
    kind = 16, "fp8", layout
    clean = formulas.run_attention(fast, [pair, other], [q, q], *kind, window=40)
    for position in (0, 69, 70):
        pair[part][position, 0, 3] = np.nan
    got = formulas.run_attention(fast, [pair, other], [q, q], *kind, window=40)
    sees = np.zeros((2 * n, 4), bool)
    for position in (0, 69, 70):
        sees[position : position + 40, :2] = True
    assert np.isnan(got[sees]).all()
    keeps_bits = ~sees
    if "tiled attention" in fast.description:
        # Rows of one prompt share tiles, and a weight of 0 times a value that is NaN is NaN.
        keeps_bits[:n, :2] &= ~np.isnan(got[:n, :2]).all(-1)
    np.testing.assert_array_equal(got[keeps_bits], clean[keeps_bits])
    for row in (68, 69, 70, 109, 110, 129):  # alone
        seen = tuple(x[: row + 1] for x in pair)
        alone = formulas.run_attention(fast, [seen], [q[row : row + 1]], *kind, window=40)
        np.testing.assert_array_equal(alone[0], np.where(sees[row, :, None], np.nan, clean[row]))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (3, 1, 128), (2, 1, 256)])
def test_prepared_keys_and_values_are_stored_as_codes_by_the_ops(
    any_backend, rng, heads, kv_heads, dim
):
    layout = any_backend.key_layout(16, dim, dim, "fp8")
    for num_tokens in (1, 37):
        qkv = normal(rng, num_tokens, (heads + 2 * kv_heads) * dim)
        qkv[0, heads * dim : (heads + 1) * dim] = 0
        slots = rng.permutation(96)[:num_tokens]
        table = normal(rng, num_tokens, dim)
        norms = normal(rng, dim), normal(rng, dim)
        got, expected = ([empty_cache(6, kv_heads, 16, dim) for _ in range(2)] for _ in range(2))
        any_backend.prepare_qkv(
            qkv.copy(), heads, *got, slots, norms, (table, table), 1e-5, 1.0, False, layout
        )
        parts = np.split(qkv, [heads * dim, (heads + kv_heads) * dim], axis=1)
        _, k, v = (part.reshape(num_tokens, -1, dim).copy() for part in parts)
        k = any_backend.rms_norm(k, norms[1], 1e-5, 1.0)
        any_backend.rotary(k, table, False)
        any_backend.store_kv(k, v, slots, *expected, layout)
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_array_equal(a, b)


def test_blocks_of_codes_are_copied_with_their_scales(any_backend, rng):
    caches = [empty_cache(6, 2, 8, 16) for _ in range(2)]
    any_backend.store_kv(normal(rng, 48, 2, 16), normal(rng, 48, 2, 16), np.arange(48), *caches)
    before = [cache.copy() for cache in caches]
    any_backend.copy_blocks([(0, 3), (3, 4), (5, 5)], *caches)
    for cache, old in zip(caches, before, strict=True):
        np.testing.assert_array_equal(cache, old[[0, 1, 2, 0, 0, 5]])


def test_bad_caches_of_codes_are_named(any_backend, rng):
    queries, table = normal(rng, 1, 1, 6), np.zeros((1, 1))
    narrow = np.zeros((1, 1, 16, 6 + 4), np.uint8)
    with pytest.raises(InvalidArgument, match=r"8-bit floats take .* a multiple of 4 elements"):
        any_backend.paged_attention(queries, narrow, narrow, [0, 1], [1], table, 1.0)
    cache, wide = (np.zeros((1, 1, 16, dim), np.uint8) for dim in (8 + 4, 8))
    with pytest.raises(InvalidArgument, match=r"cache\.keys: expected .*D=8"):
        any_backend.store_kv(normal(rng, 1, 1, 8), normal(rng, 1, 1, 8), [0], wide, cache)
    small = np.zeros((1, 1, 8, 8 + 4), np.uint8)
    with pytest.raises(InvalidArgument, match=r"cache\.keys: panels take .* multiple of 16 tokens"):
        any_backend.store_kv(
            normal(rng, 1, 1, 8), normal(rng, 1, 1, 8), [0], small, small.copy(), "panels"
        )


@pytest.mark.parametrize("backend", ["cpu", "ref"])
def test_public_ops_take_caches_of_bytes(backend, rng):
    pair = normal(rng, 40, 2, 32), normal(rng, 40, 2, 32)
    caches = [torch.zeros(5, 2, 16, 36, dtype=torch.uint8) for _ in range(2)]
    ops.store_kv(*(torch.from_numpy(p) for p in pair), *caches, list(range(40)), backend=backend)
    ops.copy_blocks([(0, 4)], *caches, backend=backend)
    q = normal(rng, 3, 4, 32)
    tables = [[4, 1, 2]]
    got = ops.paged_attention(torch.from_numpy(q), *caches, tables, [40], [0, 3], backend=backend)
    wide = [
        torch.from_numpy(formulas.through_fp8(np.pad(p, ((0, 8), (0, 0), (0, 0)))))
        .reshape(3, 16, 2, 32)
        .transpose(1, 2)
        .contiguous()
        .bfloat16()  # exact
        for p in pair
    ]
    expected = ops.paged_attention(
        torch.from_numpy(q), *wide, [[0, 1, 2]], [40], [0, 3], backend=backend
    )
    torch.testing.assert_close(got, expected, atol=0, rtol=0)
    with pytest.raises(InvalidArgument, match="cache"):
        ops.paged_attention(torch.from_numpy(q), caches[0][:, :, ::2], caches[1], tables, [40])
