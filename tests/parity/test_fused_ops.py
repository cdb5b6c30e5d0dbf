"""Fused ops give what the ops that they stand for give one after another, bit for bit but where
`assert_same` says otherwise."""

import numpy as np
import op_formulas as formulas
import pytest
from gguf_files import in_format
from llmserve.errors import InvalidArgument

ROWS = (1, 2, 3, 5, 8, 9, 40)  # below and above where kernels for few rows end


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def assert_same(backend, kind, is_fused, got, expected):
    """Bit for bit, but where CUDA's product of few rows does more on the way: a norm's factor of a
    row comes after the product, so that other numbers are rounded to bf16, and what a gate takes of
    a narrow weight is summed by fewer warps."""
    has_own_bits = backend.name == "cuda" and "gemv" in backend.description
    if has_own_bits and is_fused and kind == "bfloat16" and len(got) <= 8:
        assert np.linalg.norm(got - expected) < 0.01 * np.linalg.norm(expected)
    else:
        np.testing.assert_array_equal(got, expected)


def one_by_one(backend, x, weight, bias, norm, activation, out, accumulate):
    if norm is not None:
        x = backend.rms_norm(x, norm, 1e-5, 1.0)
    y = backend.linear(x, weight, bias, out.copy() if activation is None else None, accumulate)
    return y if activation is None else backend.gated_activation(y, activation)


def fused(backend, x, weight, bias, norm, activation, out, accumulate):
    return backend.fused_linear(
        *(x, weight, bias, norm, 1e-5, 1.0, activation),
        *(out.copy() if activation is None else None, accumulate),
    )


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4-g32"])
@pytest.mark.parametrize(("n", "k"), [(66, 64), (64, 256), (160, 1184)])
def test_a_fused_linear_equals_its_ops(any_backend, rng, kind, n, k):
    backend = any_backend
    if kind.startswith("int"):
        weight = backend.pack_quantized(normal(rng, n, k), kind)
    else:
        weight = backend.pack_linear([formulas.as_dtype(normal(rng, n, k), kind)], kind)
    norm, bias = normal(rng, k), normal(rng, n)
    for m in ROWS:
        x, old = normal(rng, m, k + 3)[:, :k] * 3, normal(rng, m, n)
        for case in (
            (None, norm, None, old, True),
            (bias, norm, None, old, False),
            (bias, norm, "silu", old, False),
            (None, None, "gelu_tanh", old, False),
            (None, norm, "gelu", old, False),
            (bias, norm, "relu", old, False),
            (None, norm, "relu2", old, False),
            (bias, None, None, old, True),
        ):
            got, expected = (run(backend, x, weight, *case) for run in (fused, one_by_one))
            has_more = case[1] is not None or case[2] is not None
            assert_same(backend, kind, has_more, got, expected)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4", "Q5_0"])
def test_a_gate_over_many_rows_and_columns_equals_its_ops(any_backend, rng, kind):
    # Several blocks of rows, several pieces of columns a thread, and a last one that is shorter.
    n, k = 2 * 16 * 37, 128
    rows = normal(rng, n, k)
    if kind == "Q5_0":
        weight = any_backend.pack_blocks(in_format(kind)("rows", rows)[0], kind)
    elif kind.startswith("int"):
        weight = any_backend.pack_quantized(rows, kind)
    else:
        weight = any_backend.pack_linear([formulas.as_dtype(rows, kind)], kind)
    norm, bias = normal(rng, k), normal(rng, n)
    for m in (16, 17, 300, 601):
        x = normal(rng, m, k) * 3
        expected = any_backend.gated_activation(
            any_backend.linear(any_backend.rms_norm(x, norm, 1e-5, 1.0), weight, bias), "silu"
        )
        got = any_backend.fused_linear(x, weight, bias, norm, 1e-5, 1.0, "silu")
        assert_same(any_backend, kind, True, got, expected)


@pytest.mark.parametrize(
    ("up_kind", "down_kind"),
    [("bfloat16", "bfloat16"), ("float32", "float32"), ("int8", "bfloat16")],
)
@pytest.mark.parametrize(("width", "k"), [(16 * 6, 128), (16 * 37, 64), (66, 34)])
def test_a_fused_mlp_equals_its_ops(any_backend, rng, up_kind, down_kind, width, k):
    # A middle that is whole tiles of 32, one that ends in half a tile, one that ends in none.
    up_rows = normal(rng, 2 * width, k)
    if up_kind == "int8":
        up = any_backend.pack_quantized(up_rows, up_kind)
    else:
        up = any_backend.pack_linear([formulas.as_dtype(up_rows, up_kind)], up_kind)
    down = any_backend.pack_linear(
        [formulas.as_dtype(normal(rng, 48, width), down_kind)], down_kind
    )
    norm, bias = normal(rng, k), normal(rng, 2 * width)
    for m in (*ROWS, 17, 130):
        x, old = normal(rng, m, k) * 3, normal(rng, m, 48)
        gated = any_backend.fused_linear(x, up, bias, norm, 1e-5, 1.0, "silu")
        for accumulate in (False, True):
            expected = any_backend.linear(gated, down, None, old.copy(), accumulate)
            got = any_backend.fused_linear(
                *(x, up, bias, norm, 1e-5, 1.0, "silu", old.copy(), accumulate), down=down
            )
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (4, 1, 16), (2, 1, 20)])
def test_a_fused_attention_equals_its_ops(any_backend, rng, dtype, kind, heads, kv_heads, dim):
    # A prompt, what threads share by spans, what sequences share, steps alone.
    def sequence(n, before=None):
        before = before or [np.empty((0, kv_heads, dim), np.float32)] * 2
        return tuple(np.concatenate([part, normal(rng, n, kv_heads, dim)]) for part in before)

    prefix = sequence(320)
    batches = (
        [(sequence(100), 100)],
        [(sequence(1100), 1)],
        [(sequence(n, prefix), 1) for n in (1, 7, 30)] + [(sequence(9), 1), (sequence(80), 30)],
    )
    weight = any_backend.pack_linear([formulas.as_dtype(normal(rng, 35, heads * dim), kind)], kind)
    layouts = {"rows", any_backend.key_layout(16, dim, dim, dtype)}
    for batch in batches:
        sequences = [pair for pair, _ in batch]
        queries = [normal(rng, count, heads, dim) for _, count in batch]
        for layout in layouts:
            case = sequences, queries, 16, dtype, layout, True
            attended = formulas.run_attention(any_backend, *case)
            got = formulas.run_attention(any_backend, *case, output=weight)
            expected = any_backend.linear(attended.reshape(len(attended), -1), weight)
            np.testing.assert_array_equal(got, expected)


def test_a_fused_rows_bits_do_not_depend_on_its_company(any_backend, rng):
    if "cuBLASLt" in any_backend.description:
        pytest.skip("cuBLASLt chooses its algorithm by M")
    k, n = 160, 96
    weight = any_backend.pack_linear([formulas.as_dtype(normal(rng, n, k), "bfloat16")], "bfloat16")
    x, norm = normal(rng, 40, k), normal(rng, k)
    whole = any_backend.fused_linear(x, weight, norm_weight=norm, activation="silu")
    for begin, end in ((0, 1), (7, 9), (3, 11), (20, 40)):
        part = any_backend.fused_linear(x[begin:end], weight, norm_weight=norm, activation="silu")
        np.testing.assert_array_equal(part, whole[begin:end])


def qkv_case(rng, num_tokens, heads, kv_heads, dim, dtype):
    width = (heads + 2 * kv_heads) * dim
    qkv = normal(rng, num_tokens, width + 4)[:, :width] * 2
    caches = [
        formulas.as_dtype(np.full((6, kv_heads, 16, dim), 7, np.float32), dtype) for _ in range(2)
    ]
    slots = rng.permutation(96)[:num_tokens]
    if num_tokens > 2:
        slots[1] = -1
    return qkv, caches, slots


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotated"),
    [(4, 2, 64, 64), (3, 1, 128, 32), (2, 2, 80, 80), (2, 1, 256, 256), (2, 1, 34, 10)],
)
def test_prepared_queries_keys_and_values_equal_those_of_the_ops(
    any_backend, rng, dtype, interleaved, heads, kv_heads, dim, rotated
):
    for num_tokens in (1, 3, 37):
        qkv, caches, slots = qkv_case(rng, num_tokens, heads, kv_heads, dim, dtype)
        table, other = normal(rng, 2, num_tokens, rotated)
        pair = normal(rng, dim), normal(rng, dim)
        layout = any_backend.key_layout(16, dim, dim, dtype)
        for norms in (None, pair):
            for angles in (None, (table, table), (table, other)):
                rows, got, expected = (
                    np.array(qkv),
                    [c.copy() for c in caches],
                    [c.copy() for c in caches],
                )
                any_backend.prepare_qkv(
                    *(rows, heads, *got, slots, norms, angles, 1e-5, 1.0, interleaved, layout)
                )
                q = formulas.prepare_one_by_one(
                    any_backend, qkv, heads, expected, slots, norms, angles, interleaved, layout
                )
                np.testing.assert_array_equal(rows[:, : heads * dim].reshape(q.shape), q)
                for a, b in zip(got, expected, strict=True):
                    np.testing.assert_array_equal(a, b)


def assert_prepared_attention_equals_its_ops(backend, rng, lengths, shape, dtype, kind, options):
    heads, dim = shape[0], shape[2]
    layout = backend.key_layout(16, dim, dim, dtype)
    qkv, cache, slots, step = formulas.prepared_case(rng, lengths, shape, dtype, layout)
    if len(slots) > 1:  # a row that fills a batch up: its key is in the cache already
        slots[len(slots) // 2] = -1
    weight = backend.pack_linear([formulas.as_dtype(normal(rng, 24, heads * dim), kind)], kind)
    norms = (normal(rng, dim), normal(rng, dim)) if options.pop("has_norms", True) else None
    angles = (normal(rng, len(slots), options.pop("rotated", dim)),) * 2
    interleaved = options.pop("interleaved", False)
    keys, values = cache.keys.copy(), cache.values.copy()
    got = backend.prepared_attention(
        *(np.array(qkv), heads, keys, values, slots, *step, weight, norms, angles, 1e-5),
        *(interleaved, layout),
        **options,
    )
    rows = np.array(qkv)
    backend.prepare_qkv(
        *(rows, heads, cache.keys, cache.values, slots, norms, angles, 1e-5, 0.0, interleaved),
        layout,
    )
    q = rows[:, : heads * dim].reshape(-1, heads, dim)
    attended = backend.paged_attention(
        q, cache.keys, cache.values, *step, key_layout=layout, **options
    )
    expected = backend.linear(attended.reshape(len(attended), -1), weight)
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(keys, cache.keys)
    np.testing.assert_array_equal(values, cache.values)


# Beginnings and ends of units and spans of positions, several spans; a step of several tokens.
TOKENS = [(n, 1) for n in (1, 2, 33, 64, 65, 256, 257, 600)]
PREPARED = [
    (TOKENS, {}),
    (TOKENS[2:], {"window": 40, "has_norms": False, "rotated": 32, "soft_cap": 4.0}),
    (TOKENS[-1:], {"interleaved": True}),
    ([(70, 1), (80, 3), (9, 2)], {}),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("case", range(len(PREPARED)))
@pytest.mark.parametrize("shape", [(4, 2, 64), (3, 1, 128)], ids=["64", "128"])
def test_attention_of_what_is_prepared_equals_its_ops(any_backend, rng, dtype, case, shape):
    lengths, options = PREPARED[case]
    options = options | {"sinks": normal(rng, shape[0])}
    kind = "float32" if dtype == "float32" else "bfloat16"
    assert_prepared_attention_equals_its_ops(any_backend, rng, lengths, shape, dtype, kind, options)


def test_bad_arguments_of_fused_ops_are_named(any_backend, rng):
    weight = any_backend.pack_linear([normal(rng, 7, 8)], "float32")
    x = normal(rng, 2, 8)
    with pytest.raises(InvalidArgument, match=r"rms_norm\.weight: expected float32 \[D=8\]"):
        any_backend.fused_linear(x, weight, norm_weight=normal(rng, 9))
    with pytest.raises(InvalidArgument, match="gate_up"):
        any_backend.fused_linear(x, weight, activation="silu")  # 7 columns are no gate and up
    even = any_backend.pack_linear([normal(rng, 6, 8)], "float32")
    with pytest.raises(InvalidArgument, match=r"accumulate: expected none beside a gate"):
        any_backend.fused_linear(x, even, activation="silu", accumulate=True)
    with pytest.raises(InvalidArgument, match=r"fused_mlp\.up\.gate: expected a gate"):
        any_backend.fused_linear(x, even, down=weight)
    with pytest.raises(InvalidArgument, match=r"linear\.x: expected float32 \[M, K=8\]"):
        any_backend.fused_linear(x, even, activation="silu", down=weight)
    pair, queries = (normal(rng, 5, 1, 16),) * 2, [normal(rng, 2, 3, 16)]
    with pytest.raises(InvalidArgument, match=r"linear\.x: expected float32 \[M, K=8\]"):
        formulas.run_attention(any_backend, [pair], queries, output=weight)
    qkv, caches, slots = qkv_case(rng, 2, 2, 1, 16, "float32")
    angles = normal(rng, 2, 18)
    with pytest.raises(InvalidArgument, match=r"rotary\.cos_sin: .* at most D=16, got 18"):
        any_backend.prepare_qkv(qkv, 2, *caches, slots, angles=(angles, angles))
    with pytest.raises(InvalidArgument, match=r"store_kv\.slots: expected indices in \[-1, 96\)"):
        any_backend.prepare_qkv(qkv, 2, *caches, slots + 96)
