"""A row's bits do not depend on its company, the number of threads, or how the work is cut."""

import numpy as np
import op_formulas as formulas
import pytest
from llmserve import _core_testing


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("n", "k"), [(600, 1029), (40, 2049), (40, 4096), (100, 5632)])
def test_linear_rows_alone_equal_rows_in_any_batch(fast, fast_one_thread, rng, n, k, dtype):
    """The cpu backend's blocks are up to 2048 of K deep, and 72 or 96 rows high."""
    sizes = (2, 3, 4, 5, 6, 7, 8, 13, 16, 17, 23, 24, 36, 40, 73, 96, 97, 200)
    if "cuBLASLt" in fast.description and "gemv" not in fast.description:
        pytest.skip("cuBLASLt chooses its algorithm by M")
    if fast.name != "cpu" and k > 1029:
        pytest.skip("blocks of K are the cpu backend's")
    if "gemv" in fast.description:
        sizes = sizes[:7]  # another kernel takes more rows
    x, bias, old = normal(rng, 200, k), normal(rng, n), normal(rng, 200, n)
    weight = fast.pack_linear([formulas.as_dtype(normal(rng, n, k), dtype)], dtype)

    def run(backend, rows):
        return backend.linear(x[rows], weight, bias, old[rows].copy(), True)

    alone = np.concatenate([run(fast, slice(i, i + 1)) for i in range(200)])
    for m in sizes:
        np.testing.assert_array_equal(run(fast, slice(0, m)), alone[:m])
        np.testing.assert_array_equal(run(fast_one_thread, slice(200 - m, 200)), alone[200 - m :])


def test_linear_rows_have_the_same_bits_in_every_tile(fast, rng):
    """Enough outputs that a GPU takes its largest tiles, few enough for its smallest."""
    if "cuBLASLt" in fast.description or "gemv" in fast.description:
        pytest.skip("several products share the work by M")
    n, k = 1537, 72
    x, bias, old = normal(rng, 1409, k), normal(rng, n), normal(rng, 1409, n)
    weight = fast.pack_linear([formulas.as_dtype(normal(rng, n, k), "bfloat16")], "bfloat16")
    whole = fast.linear(x, weight, bias, old.copy(), True)
    for begin, end in ((0, 1), (3, 19), (0, 17), (1345, 1409), (200, 265)):
        rows = slice(begin, end)
        part = fast.linear(x[rows], weight, bias, old[rows].copy(), True)
        np.testing.assert_array_equal(part, whole[rows])


def test_row_ops_alone_equal_rows_in_a_batch(fast, fast_one_thread, rng):
    x, weight = normal(rng, 90, 130), normal(rng, 130)
    for run in (
        lambda backend, rows: backend.rms_norm(x[rows], weight),
        lambda backend, rows: backend.add_rms_norm(x[rows].copy(), x[rows], weight),
        lambda backend, rows: backend.layer_norm(x[rows], weight, weight),
        *(
            lambda backend, rows, name=name: backend.gated_activation(x[rows], name)
            for name in formulas.all_activations()
        ),
        *(
            lambda backend, rows, name=name: backend.activation(x[rows], name)
            for name in formulas.activations_of_one()
        ),
    ):
        whole = run(fast, slice(None))
        np.testing.assert_array_equal(run(fast_one_thread, slice(None)), whole)
        np.testing.assert_array_equal(run(fast, slice(41, 42)), whole[41:42])


ATTENTION_OPTIONS = [{}, {"window": 70, "soft_cap": 5.0}]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", ATTENTION_OPTIONS, ids=["plain", "window"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 64), (3, 3, 33)])
def test_attention_in_chunks_and_batches_equals_whole(
    fast, fast_one_thread, rng, dtype, options, heads, kv_heads, dim
):
    n = 200
    pair = normal(rng, n, kv_heads, dim), normal(rng, n, kv_heads, dim)
    other = normal(rng, 90, kv_heads, dim), normal(rng, 90, kv_heads, dim)
    q, other_q = normal(rng, n, heads, dim), normal(rng, 30, heads, dim)
    whole = formulas.run_attention(fast, [pair], [q], 16, dtype, **options)
    assert np.isfinite(whole).all()  # what lies in unused slots is NaN
    for block_size in (8, 32, 7):
        again = formulas.run_attention(fast, [pair], [q], block_size, dtype, **options)
        np.testing.assert_array_equal(again, whole)
    for block_size in (16, 32, 48):
        layout = fast.key_layout(block_size, dim, dim, dtype)
        again = formulas.run_attention(fast, [pair], [q], block_size, dtype, layout, **options)
        np.testing.assert_array_equal(again, whole)
    one_thread = formulas.run_attention(fast_one_thread, [pair], [q], 16, dtype, **options)
    np.testing.assert_array_equal(one_thread, whole)
    layout = fast.key_layout(16, dim, dim, dtype)
    for begin, end in ((0, 50), (50, 130), (130, 199), (199, 200), (99, 100)):
        prefix = tuple(part[:end] for part in pair)
        chunk = formulas.run_attention(
            fast, [other, prefix], [other_q, q[begin:end]], 16, dtype, layout, **options
        )
        np.testing.assert_array_equal(chunk[30:], whole[begin:end])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("heads", [4, 23])
def test_latent_attention_in_chunks_batches_and_threads_equals_whole(
    fast, fast_one_thread, rng, dtype, heads
):
    """Rows of queries share panels with whoever comes beside them, and change no bit of them."""
    if fast.name != "cpu":
        pytest.skip("this backend keeps values in rows of their own")

    def sequence(n):
        keys = normal(rng, n, 1, 80)
        return keys, keys[..., :64]

    n = 1100
    row, other = sequence(n), sequence(90)
    q, other_q = normal(rng, n, heads, 80), normal(rng, 30, heads, 80)
    options = {"values_in_keys": True, "sinks": normal(rng, heads)}
    whole = formulas.run_attention(fast, [row], [q], 16, dtype, **options)
    assert np.isfinite(whole).all()  # what lies in unused slots is NaN
    one_thread = formulas.run_attention(fast_one_thread, [row], [q], 32, dtype, **options)
    np.testing.assert_array_equal(one_thread, whole)
    eight = _core_testing.make_backend("cpu", 8, formulas.isa_of(fast))
    for begin, end in ((0, 50), (500, 530), (1040, 1099), (1099, 1100), (99, 100)):
        prefix = tuple(part[:end] for part in row)
        for backend in (fast, eight):
            for block_size in (16, 7):
                chunk = formulas.run_attention(
                    backend, [other, prefix], [other_q, q[begin:end]], block_size, dtype, **options
                )
                np.testing.assert_array_equal(chunk[30:], whole[begin:end])
    several = [row] * 5
    together = formulas.run_attention(
        fast_one_thread, several, [q[-1:]] * 5, 16, dtype, shares_prefixes=True, **options
    )
    np.testing.assert_array_equal(together, np.repeat(whole[-1:], 5, axis=0))
    assert (fast_one_thread.num_prefix_items > 0) == (heads == 4)


@pytest.mark.parametrize("window", [0, 290])
def test_a_token_alone_has_the_attention_that_it_has_in_a_prompt_of_many_spans(fast, rng, window):
    """CUDA splits the context of few rows, in spans of 256, and not that of many."""
    n, dim = 540, 64
    pair = normal(rng, n, 1, dim), normal(rng, n, 1, dim)
    q = normal(rng, n, 5, dim)
    whole = formulas.run_attention(fast, [pair], [q], 16, "bfloat16", window=window)
    for begin, end in ((0, 1), (254, 257), (256, 257), (300, 350), (512, 513), (539, 540)):
        prefix = tuple(part[:end] for part in pair)
        batch = [pair, prefix], [q[-3:], q[begin:end]]
        again = formulas.run_attention(fast, *batch, 32, "bfloat16", window=window)
        np.testing.assert_array_equal(again, np.concatenate([whole[-3:], whole[begin:end]]))


@pytest.mark.parametrize(
    ("dtype", "window"),
    [
        *((dtype, 0) for dtype in ("float32", "bfloat16", "fp8")),
        ("float32", 700),
        *(pytest.param(dtype, 700, marks=pytest.mark.long) for dtype in ("bfloat16", "fp8")),
    ],
)
def test_attention_over_spans_does_not_depend_on_who_computes_them(
    fast, ref_of_fast, attention_tolerance, rng, dtype, window
):
    """Long contexts, whose spans of 512 positions several threads share where there are few."""
    if fast.name != "cpu":
        pytest.skip("threads are the cpu backend's")
    isa = fast.description.removeprefix("cpu/").split(",")[0]
    one, eight = (_core_testing.make_backend("cpu", n, isa) for n in (1, 8))
    long = normal(rng, 1700, 1, 32), normal(rng, 1700, 1, 32)
    short = normal(rng, 40, 1, 32), normal(rng, 40, 1, 32)
    for num_queries in (1, 3, 60):
        q, short_q = normal(rng, num_queries, 4, 32), normal(rng, 2, 4, 32)
        for layout in ("rows", "panels"):
            alone, shared, beside = (
                formulas.run_attention(backend, *batch, 32, dtype, layout, window=window)
                for backend, batch in (
                    (one, ([long], [q])),
                    (eight, ([long], [q])),
                    (eight, ([short, long, short], [short_q, q, short_q])),
                )
            )
            np.testing.assert_array_equal(shared, alone)
            np.testing.assert_array_equal(beside[2:-2], alone)
        expected = formulas.run_attention(ref_of_fast, [long], [q], 32, dtype, window=window)
        np.testing.assert_allclose(alone, expected, atol=attention_tolerance(dtype))
    # The last token of a prompt, and the step of the one that follows it.
    prefix = tuple(part[:1699] for part in long)
    chunk = formulas.run_attention(eight, [prefix], [q[:-1]], 16, dtype, window=window)
    np.testing.assert_array_equal(chunk, alone[:-1])


# Tokens of a prefix: two tiles and some, a whole span, spans and some.
@pytest.mark.parametrize(
    ("dtype", "num_shared"),
    [
        *(("float32", num) for num in (150, 512, 1100)),
        *((dtype, 150) for dtype in ("bfloat16", "fp8")),
        *(
            pytest.param(dtype, num, marks=pytest.mark.long)
            for dtype in ("bfloat16", "fp8")
            for num in (512, 1100)
        ),
    ],
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (8, 1)])
def test_sequences_that_share_a_prefix_have_the_attention_that_each_has_alone(
    fast, fast_one_thread, rng, dtype, num_shared, heads, kv_heads
):
    """Decode steps may walk the blocks that sequences share once for all of them."""
    dim = 32

    def sequence(n, before=None):
        own = normal(rng, n, kv_heads, dim), normal(rng, n, kv_heads, dim)
        if before is None:
            return own
        return tuple(np.concatenate(parts) for parts in zip(before, own, strict=True))

    prefix, other = sequence(num_shared), sequence(num_shared)
    # Alone, five of a prefix, a chunk of the same, two of another, one that is in the middle of the
    # prefix, more than one walk takes.
    sequences = [sequence(70)]
    sequences += [sequence(n, prefix) for n in (1, 64, 17, 1400, 40)]
    sequences += [sequence(3, prefix), sequence(5, other), sequence(6, other)]
    sequences += [tuple(part[: num_shared // 2] for part in prefix)]
    sequences += [sequence(1 + n % 4, prefix) for n in range(96 // (heads // kv_heads) + 2)]
    queries = [normal(rng, 3 if i == 6 else 1, heads, dim) for i in range(len(sequences))]
    # By the backend whose prefixes are counted: its first call takes the memory that they need.
    apart = np.concatenate(
        [
            formulas.run_attention(fast_one_thread, [pair], [q], 16, dtype)
            for pair, q in zip(sequences, queries, strict=True)
        ]
    )
    own_layout = fast.key_layout(16, dim, dim, dtype)
    for layout, block_size in (("rows", 16), (own_layout, 16), ("rows", 8), (own_layout, 48)):
        kind = block_size, dtype, layout
        for backend in (fast_one_thread, fast):
            together = formulas.run_attention(
                backend, sequences, queries, *kind, shares_prefixes=True
            )
            np.testing.assert_array_equal(together, apart)
        num_tiles = num_shared // block_size * block_size // 64
        is_shared = fast.name == "cpu" and num_tiles >= max(2, heads // kv_heads)
        assert (fast_one_thread.num_prefix_items > 0) == is_shared


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("heads", "key_dim", "value_dim"), [(2, 64, 64), (1, 80, 16), (3, 1030, 48)]
)
def test_keys_and_values_are_stored_alike_at_once_and_one_by_one(
    fast, ref, rng, dtype, heads, key_dim, value_dim
):
    # Runs that fill half a panel, that begin in one or end in one, and one with a gap.
    slots = [*range(64, 96), *range(3, 30), *range(40, 48), -1, *range(49, 56), *range(96, 104)]
    k, v = normal(rng, len(slots), heads, key_dim), normal(rng, len(slots), heads, value_dim)
    k[5, 0, :6] = [np.inf, -np.inf, np.nan, -0.0, 1e-40, 3.39e38]
    layout = fast.key_layout(32, key_dim, value_dim, dtype)
    zeros = [np.zeros((4, heads, 32, d), np.float32) for d in (key_dim, value_dim)]
    expected, at_once, one_by_one = (
        [formulas.as_dtype(cache, dtype) for cache in zeros] for _ in range(3)
    )
    ref.store_kv(k, v, slots, *expected, layout)
    fast.store_kv(k, v, slots, *at_once, layout)
    for i, slot in enumerate(slots):
        fast.store_kv(k[i : i + 1], v[i : i + 1], [slot], *one_by_one, layout)
    for want, *got in zip(expected, at_once, one_by_one, strict=True):
        for cache in got:
            np.testing.assert_array_equal(cache.view(np.uint8), want.view(np.uint8))


def test_sampled_rows_alone_equal_rows_in_a_batch(fast, fast_one_thread, rng):
    logits = normal(rng, 7, 1037) * 3
    rows = [
        {"seed": 7, "position": i, "num_top": 2, **filters}
        for i, filters in enumerate(
            [
                *({}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.02}, {"temperature": 0.0}),
                *({"top_k": 1}, {"top_n_sigma": 1.5}),
            ]
        )
    ]
    whole = fast.sample(logits, rows)
    assert fast_one_thread.sample(logits, rows) == whole
    alone = [fast.sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(7)]
    assert alone == whole


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize(("k", "sizes"), [(64, (70, 33, 300)), (302, (16, 1024)), (301, (70, 9))])
def test_a_weight_has_the_same_bits_in_rows_and_packed(fast, rng, dtype, stored, k, sizes):
    parts = [formulas.as_dtype(normal(rng, n, k), stored) for n in sizes]
    n = sum(len(part) for part in parts)
    packed = fast.pack_linear(parts, dtype)
    deferred = fast.defer_linear(parts, dtype)
    x, bias = normal(rng, 130, k), normal(rng, n)

    def check():
        for m in (1, 2, 7, 12, 16, 17, 24, 40, 64, 65, 130):
            old = normal(rng, m, n)
            expected = fast.linear(x[:m], packed, bias, old.copy(), True)
            result = fast.linear(x[:m], deferred, bias, old.copy(), True)
            np.testing.assert_array_equal(result, expected)

    check()
    fast.pack_rows(deferred)
    for part in parts:
        part[:] = 0  # read no more
    check()
