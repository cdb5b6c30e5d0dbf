"""Ranks that keep one KV cache together have the attention of one rank, bit for bit."""

from __future__ import annotations

import numpy as np
import op_formulas as formulas
import pytest
from llmserve import _core_testing


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def among_ranks(backend, num_threads, context_size, sequences, queries, dtype, **options):
    """One call over all sequences on a rank for each number of threads; the spans walked by each
    rank for all."""
    isa = formulas.isa_of(backend) if backend.name == "cpu" else ""
    ranks = [_core_testing.make_backend(backend.name, n, isa) for n in num_threads]
    layout = options.pop("layout", "rows")
    shares_prefixes = options.pop("shares_prefixes", False)
    cache = formulas.PagedCache(sequences, 16, dtype, layout, shares_prefixes)
    return ranks[0].attention_among_ranks(
        ranks[1:],
        context_size,
        np.concatenate(queries),
        cache.keys,
        sequences[0][1].shape[2] if options.pop("values_in_keys", False) else cache.values,
        np.cumsum([0] + [len(q) for q in queries]).astype(np.int32),
        np.array([len(keys) for keys, _ in sequences], np.int32),
        cache.block_tables,
        queries[0].shape[-1] ** -0.5,
        key_layout=layout,
        **options,
    )


# Heads, ranks by their threads, and how many of them keep a cache together. With five ranks of four
# heads two have the same one.
CASES = [
    (4, [1, 1], 2),
    (8, [1, 2, 1], 3),
    (5, [1, 1, 1, 1], 2),
    (6, [2, 1, 1, 1], 4),
    (4, [1, 1, 1, 1, 1], 5),
    (3, [1, 1, 1, 1], 2),
]


@pytest.mark.parametrize(
    ("dtype", "heads", "threads", "size"),
    [
        pytest.param(dtype, *case, marks=() if number % 3 == offset else pytest.mark.long)
        for offset, dtype in enumerate(("float32", "bfloat16", "fp8"))
        for number, case in enumerate(CASES)
    ],
)
def test_ranks_that_share_contexts_have_the_attention_of_one(
    fast, fast_one_thread, rng, dtype, heads, threads, size
):
    """Decode steps, guesses, chunks, long and short, beside each other."""
    if fast.name != "cpu":
        pytest.skip("ranks that keep a cache together are of a CPU")
    lengths = [(40, 1), (2700, 1), (1025, 3), (900, 70), (513, 1), (2600, 1), (1536, 2)]
    for dim, kind in ((32, {}), (48, {"values_in_keys": True}), (32, {"layout": "panels"})):
        values = 32
        sequences = []
        for length, _ in lengths:
            keys = normal(rng, length, 1, dim)
            own = kind.get("values_in_keys", False)
            sequences.append((keys, keys[..., :values] if own else normal(rng, length, 1, values)))
        queries = [normal(rng, n, heads, dim) for _, n in lengths]
        sinks = {"sinks": normal(rng, heads)}
        of_one = {("key_layout" if k == "layout" else k): v for k, v in kind.items()}
        whole = formulas.run_attention(
            fast_one_thread, sequences, queries, 16, dtype, **of_one, **sinks
        )
        got, walked = among_ranks(fast, threads, size, sequences, queries, dtype, **kind, **sinks)
        np.testing.assert_array_equal(got, whole)
        # Those of as many spans as ranks, but for the chunk.
        shared = [-(-length // 512) for length, n in lengths if n < 70]
        groups = len(threads) // size
        assert sum(walked) == groups * sum(n for n in shared if n >= size)
        assert max(walked) - min(walked) <= 2


@pytest.mark.parametrize(("heads", "threads", "size"), CASES[:2])
def test_windows_and_shared_prefixes_stay_with_each_rank(
    fast, fast_one_thread, rng, heads, threads, size
):
    if fast.name != "cpu":
        pytest.skip("ranks that keep a cache together are of a CPU")
    prefix = normal(rng, 1600, 1, 32), normal(rng, 1600, 1, 32)
    tails = [(normal(rng, n, 1, 32), normal(rng, n, 1, 32)) for n in (1, 30, 9)]
    tails.append((normal(rng, 3000, 1, 32), normal(rng, 3000, 1, 32)))
    sequences = [
        tuple(np.concatenate(parts) for parts in zip(prefix, tail, strict=True)) for tail in tails
    ]
    queries = [normal(rng, 1, heads, 32) for _ in sequences]
    for options, num_shared in (
        ({"window": 700}, 0),
        ({"shares_prefixes": True}, 9),  # of the last one, most of which is its own
        ({"shares_prefixes": True, "soft_cap": 5.0}, 9),
    ):
        whole = formulas.run_attention(
            fast_one_thread, sequences, queries, 16, "float32", **options
        )
        got, walked = among_ranks(fast, threads, size, sequences, queries, "float32", **options)
        np.testing.assert_array_equal(got, whole)
        assert sum(walked) == num_shared


def test_what_does_not_fit_the_room_each_rank_does_by_itself(fast, fast_one_thread, rng):
    """A latent of 512 elements and 96 heads: 0.6 MB a span twice, and of queries 0.2."""
    if fast.name != "cpu":
        pytest.skip("ranks that keep a cache together are of a CPU")
    keys = normal(rng, 1030, 1, 520)
    sequences = [(keys + i, keys[..., :512] + i) for i in range(14)]
    queries = [normal(rng, 1, 96, 520) for _ in sequences]
    whole = formulas.run_attention(
        fast_one_thread, sequences, queries, 16, "bfloat16", values_in_keys=True
    )
    got, walked = among_ranks(fast, [1, 1], 2, sequences, queries, "bfloat16", values_in_keys=True)
    np.testing.assert_array_equal(got, whole)
    assert sum(walked) == 3 * 12


def test_the_specification_is_one_rank(rng):
    pair = normal(rng, 1100, 1, 8), normal(rng, 1100, 1, 8)
    q = normal(rng, 2, 4, 8)
    ref = _core_testing.make_backend("ref")
    whole = formulas.run_attention(ref, [pair], [q], 16)
    got, _ = among_ranks(ref, [1, 1], 2, [pair], [q], "float32")
    np.testing.assert_array_equal(got, whole)
