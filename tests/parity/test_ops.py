"""Every op of the cpu backend, on every instruction set that can run here, against ref."""

import os

import numpy as np
import op_formulas as formulas
import pytest
from gguf_files import in_format
from llmserve import _core_testing
from llmserve.errors import InvalidArgument, NotSupported
from op_formulas import SUM_TOLERANCE

# One exp (2 ulp), a division, products: units of 2^-24, times 90 for exp(y) of a rounded y.
ACTIVATION_TOLERANCE = 8 * 90 * 2**-24

# The cuda backend rounds x to bf16 where the weight is: 8 bits, half a unit in each term.
BF16_OPERAND_TOLERANCE = 2**-9

CPU_ISAS = [name for name, _ in _core_testing.cpu_isas()]
BLOCK_FORMATS = [name for name, *_ in _core_testing.kept_formats()]
ODD_SIZES = [1, 15, 17, 127, 129]


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_embedding_equals_ref(fast, ref, rng, dtype):
    table = formulas.as_dtype(normal(rng, 50, 33), dtype)
    ids = rng.integers(0, 50, 400)
    for scale in (1.0, 3.3):
        out = fast.embedding(table, ids, scale)
        np.testing.assert_array_equal(out, ref.embedding(table, ids, scale))


@pytest.mark.parametrize("format", BLOCK_FORMATS)
def test_embedding_of_blocks_is_their_values(fast, ref, rng, format):
    if fast.name == "cuda":
        pytest.skip("tables are in floats on a device")
    table, _ = in_format(format)("embedding", normal(rng, 50, 512))
    ids = rng.integers(0, 50, 400)
    values = _core_testing.dequantize(format, table.tobytes()).reshape(50, 512)
    assert np.isfinite(values).all()
    for scale in (1.0, 3.3):
        expected = values[ids] * np.float32(scale)
        np.testing.assert_array_equal(fast.embedding_of_blocks(table, format, ids, scale), expected)
        np.testing.assert_array_equal(ref.embedding_of_blocks(table, format, ids, scale), expected)


@pytest.mark.parametrize("width", [*ODD_SIZES, 2048])
def test_norms_match_ref(fast, ref, rng, width):
    x, weight = normal(rng, 70, width + 3)[:, :width], normal(rng, width)
    for scale in (1.0, 0.3):
        got, expected = (b.rms_norm(x, weight, 1e-5, 1.0, scale) for b in (fast, ref))
        np.testing.assert_allclose(got, expected, rtol=SUM_TOLERANCE)
    # Heads of tokens: the same bits as the same rows one by one.
    heads = normal(rng, 7, 5, width + 3)[:, 1:4, :width]
    rows = [fast.rms_norm(np.ascontiguousarray(token), weight, 1e-5, 1.0) for token in heads]
    np.testing.assert_array_equal(fast.rms_norm(heads, weight, 1e-5, 1.0), np.stack(rows))
    np.testing.assert_allclose(
        ref.rms_norm(heads, weight, 1e-5, 1.0), np.stack(rows), rtol=SUM_TOLERANCE
    )
    residuals = [normal(np.random.default_rng(1), 70, width) for _ in range(2)]
    outs = [b.add_rms_norm(r, x, weight) for b, r in zip((fast, ref), residuals, strict=True)]
    np.testing.assert_array_equal(*residuals)
    np.testing.assert_allclose(*outs, rtol=SUM_TOLERANCE, atol=1e-7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        *((1, 1, 1), (1, 129, 127), (2, 15, 17), (4, 127, 129), (5, 17, 15), (6, 64, 64)),
        *((7, 129, 15), (13, 33, 1031), (97, 31, 127), (193, 530, 513), (3, 256, 1024)),
    ],
)
def test_linear_matches_ref(fast, ref_of_fast, rng, dtype, m, n, k):
    check_linear(fast, ref_of_fast, rng, dtype, m, n, k)


@pytest.mark.parametrize("fast", CPU_ISAS, indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("m", "n", "k"), [(40, 100, 2049), (73, 40, 5632), (200, 40, 4097)])
def test_deep_products_match_ref(fast, ref_of_fast, rng, dtype, m, n, k):
    """Blocks of K are up to 2048 deep, and those of rows up to 72 or 96 high."""
    check_linear(fast, ref_of_fast, rng, dtype, m, n, k)


def check_linear(fast, ref, rng, dtype, m, n, k):
    x = normal(rng, m, k + 5)[:, :k]
    parts = [
        formulas.as_dtype(normal(rng, rows, k), dtype) for rows in (n - n // 3, n // 3) if rows
    ]
    bias, old = normal(rng, n), normal(rng, m, n)
    packed, plain = fast.pack_linear(parts, dtype), ref.pack_linear(parts, dtype)
    assert packed.num_bytes == fast.packed_bytes(n, k, dtype)
    magnitude = np.abs(x) @ np.abs(np.concatenate([formulas.as_float(p) for p in parts])).T + 8
    tolerance = formulas.sum_tolerance(k + 2)  # and the bias and what was there
    if fast.name == "cuda" and dtype == "bfloat16":
        tolerance += BF16_OPERAND_TOLERANCE
    for options in ({}, {"bias": bias}, {"bias": bias, "accumulate": True}):
        got, expected = (
            backend.linear(x, weight, out=old.copy(), **options)
            for backend, weight in ((fast, packed), (ref, plain))
        )
        assert (np.abs(got - expected) <= tolerance * magnitude).all()


@pytest.mark.parametrize("source", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packing_converts_exactly(fast, ref, rng, source, dtype):
    parts = [formulas.as_dtype(normal(rng, n, 131), source) for n in (20, 1, 45)]
    x = np.eye(131, dtype=np.float32)
    np.testing.assert_array_equal(
        fast.linear(x, fast.pack_linear(parts, dtype)), ref.linear(x, ref.pack_linear(parts, dtype))
    )


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_equals_ref(fast, ref, rng, interleaved):
    positions = rng.integers(0, 100_000, 65).astype(np.int32)
    inv_freq = (1e4 ** (-np.arange(9) / 9)).astype(np.float32)
    for growth in (0.1, 0.0):
        tables = [b.rotary_table(positions, inv_freq, 1.1, growth, 4096) for b in (fast, ref)]
        np.testing.assert_array_equal(*tables)
    heads = [normal(np.random.default_rng(1), 65, 40, 20)[:, 3:30] for _ in range(2)]
    for backend, x in zip((fast, ref), heads, strict=True):
        backend.rotary(x, tables[0], interleaved)
    np.testing.assert_array_equal(*heads)


@pytest.mark.parametrize("width", [*ODD_SIZES, 2048])
def test_layer_norm_add_and_cap_logits_match_ref(fast, ref, rng, width):
    x = normal(rng, 70, width + 3)[:, :width] + 1
    weight, bias = normal(rng, width), normal(rng, width)
    for offset in (None, bias):
        np.testing.assert_allclose(
            fast.layer_norm(x, weight, offset, weight_offset=0.5, scale=0.7),
            ref.layer_norm(x, weight, offset, weight_offset=0.5, scale=0.7),
            rtol=SUM_TOLERANCE,
            atol=8 * SUM_TOLERANCE,  # of terms up to 8 that cancel
        )
    sums = [normal(np.random.default_rng(1), 70, width + 5)[:, 2 : 2 + width] for _ in range(2)]
    for backend, total in zip((fast, ref), sums, strict=True):
        backend.add(total, x, 0.37)
    np.testing.assert_array_equal(*sums)
    for scale, cap in ((0.37, 0.0), (20.0, 30.0)):
        logits = [x.copy() for _ in range(2)]
        for backend, row in zip((fast, ref), logits, strict=True):
            backend.cap_logits(row, scale, cap)
        # tanh is within 2^-23 on each side, and the argument and the product are rounded.
        np.testing.assert_allclose(*logits, atol=cap * 2**-21, rtol=0)


@pytest.mark.parametrize("activation", formulas.all_activations())
@pytest.mark.parametrize("width", ODD_SIZES)
def test_gated_activation_matches_ref(fast, ref, rng, activation, width):
    gate_up = normal(rng, 50, 2 * width) * 10
    np.testing.assert_allclose(
        fast.gated_activation(gate_up, activation),
        ref.gated_activation(gate_up, activation),
        rtol=ACTIVATION_TOLERANCE,
        atol=1e-30,
    )


@pytest.mark.parametrize("activation", formulas.activations_of_one())
@pytest.mark.parametrize("width", ODD_SIZES)
def test_activation_matches_ref(fast, ref, rng, activation, width):
    x = (normal(rng, 50, 2 * width) * 10)[:, :width]
    np.testing.assert_allclose(
        fast.activation(x, activation),
        ref.activation(x, activation),
        rtol=ACTIVATION_TOLERANCE,
        atol=1e-30,
    )
    in_place = x.copy()
    fast.activation(in_place, activation, out=in_place)
    np.testing.assert_array_equal(in_place, fast.activation(x, activation))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cache_ops_equal_ref(fast, ref, rng, dtype):
    keys, values = normal(rng, 90, 3, 33)[:, :, :32], normal(rng, 90, 3, 20)
    keys[0, 0, :5] = [np.nan, np.inf, -0.0, 3.3961e38, 1e-45]  # rounding's special cases
    slots = rng.permutation(160)[:90]
    slots[7] = -1
    results = []
    for backend in (fast, ref):
        empty = np.zeros((10, 3, 16, 32), np.float32), np.zeros((10, 3, 16, 20), np.float32)
        caches = [formulas.as_dtype(part, dtype) for part in empty]
        backend.store_kv(keys, values, slots, *caches)
        backend.copy_blocks([(0, 3), (3, 4), (5, 5)], *caches)
        results.append(caches)
    for got, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(got, expected)
    rows = rng.integers(0, 90, 200)
    x = keys[:, 0]
    np.testing.assert_array_equal(fast.gather_rows(x, rows), x[rows])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "value_dim"),
    [
        *((4, 4, 64, 64), (8, 1, 128, 128), (6, 2, 80, 80), (3, 3, 33, 20), (2, 2, 4, 7)),
        *((5, 1, 72, 72), (2, 1, 256, 16), (16, 1, 96, 96), (2, 1, 256, 256)),
    ],
)
def test_attention_matches_ref(
    fast, ref_of_fast, attention_tolerance, rng, dtype, heads, kv_heads, dim, value_dim
):
    lengths = [(1, 1), (150, 40), (64, 1), (65, 65), (200, 2), (300, 1)]
    sequences = [
        (normal(rng, n, kv_heads, dim), normal(rng, n, kv_heads, value_dim)) for n, _ in lengths
    ]
    queries = [normal(rng, t, heads, dim) for _, t in lengths]
    tolerance = attention_tolerance(dtype)
    for options in ({}, {"window": 70, "soft_cap": 5.0}):
        got, expected = (
            formulas.run_attention(backend, sequences, queries, 16, dtype, **options)
            for backend in (fast, ref_of_fast)
        )
        np.testing.assert_allclose(got, expected, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
def test_sinks_match_ref(fast, ref_of_fast, attention_tolerance, rng, dtype):
    """A context of three spans, where a sink counts once."""
    lengths = [(1, 1), (70, 9), (1100, 2)]
    sequences = [(normal(rng, n, 2, 32), normal(rng, n, 2, 32)) for n, _ in lengths]
    queries = [normal(rng, t, 8, 32) for _, t in lengths]
    sinks = np.array([-95, -3, 0, 1, 2, 5, 9, 150], np.float32)
    layouts = ("rows", fast.key_layout(16, 32, 32, dtype))
    for options in ({"window": 70}, {"soft_cap": 3.0}):
        got = [
            formulas.run_attention(
                fast, sequences, queries, 16, dtype, layout, sinks=sinks, **options
            )
            for layout in layouts
        ]
        expected = formulas.run_attention(
            ref_of_fast, sequences, queries, 16, dtype, sinks=sinks, **options
        )
        np.testing.assert_allclose(got[0], expected, atol=attention_tolerance(dtype))
        np.testing.assert_array_equal(got[1], got[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize(
    ("heads", "rank", "rotary"),
    [
        *((16, 512, 64), (5, 256, 64), (20, 64, 16), (3, 20, 8), (1, 8, 28)),
        pytest.param(40, 256, 32, marks=pytest.mark.long),
    ],
)
def test_latent_attention_matches_ref(
    fast, ref_of_fast, attention_tolerance, rng, dtype, heads, rank, rotary
):
    """All query heads over one row a token, whose first elements are the value."""
    lengths = [(1, 1), (150, 5), (64, 1), (65, 20), (600, 1)]
    sequences = [(x, x[..., :rank]) for x in (normal(rng, n, 1, rank + rotary) for n, _ in lengths)]
    queries = [normal(rng, t, heads, rank + rotary) for _, t in lengths]
    other = 12 if fast.name == "cuda" else 7  # its tensor cores take blocks of 4 tokens in fp8
    for options in ({}, {"window": 70, "soft_cap": 5.0, "sinks": normal(rng, heads)}):
        got, again, expected = (
            formulas.run_attention(
                backend, sequences, queries, block_size, dtype, values_in_keys=True, **options
            )
            for backend, block_size in ((fast, 16), (fast, other), (ref_of_fast, 16))
        )
        np.testing.assert_allclose(got, expected, atol=attention_tolerance(dtype))
        np.testing.assert_array_equal(again, got)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
def test_latent_rows_are_stored_as_ref_stores_them(fast, ref_of_fast, rng, dtype):
    if fast.name != "cpu" or "LLMSERVE_GUARD_OPERANDS" in os.environ:
        pytest.skip("arrays of the host, two of which are one memory, are copied apart")
    keys = normal(rng, 40, 1, 72)
    slots = rng.permutation(64)[:40]
    got, expected = (
        formulas.as_dtype(np.zeros((4, 1, 16, 72), np.float32), dtype) for _ in range(2)
    )
    for backend, cache in ((fast, got), (ref_of_fast, expected)):
        backend.store_kv(keys, None, slots, cache, cache)
    np.testing.assert_array_equal(got, expected)


def test_rotated_heads_go_where_ref_puts_them(fast, ref, rng):
    heads, angles = normal(rng, 20, 3, 50), normal(rng, 20, 48)
    for interleaved in (False, True):
        got, expected = np.zeros_like(heads), np.zeros_like(heads)
        fast.rotary(heads.copy(), angles, interleaved, got)
        ref.rotary(heads, angles, interleaved, expected)
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
def test_keys_in_panels_match_ref(fast, ref_of_fast, attention_tolerance, rng, dtype):
    """Where they are stored, and what attention makes of them."""
    if fast.key_layout(32, 24, 48, dtype) == "rows":
        caches = [np.zeros((1, 1, 16, 16), np.float32) for _ in range(2)]
        with pytest.raises(NotSupported, match="panels"):
            fast.store_kv(*normal(rng, 2, 1, 1, 16), [0], *caches, "panels")
        pytest.skip("this backend's caches have no panels")
    keys, values = normal(rng, 70, 3, 24), normal(rng, 70, 3, 48)
    rows = [formulas.as_dtype(np.zeros((5, 3, 32, d), np.float32), dtype) for d in (24, 48)]
    panels, by_ref = ([part.copy() for part in rows] for _ in range(2))
    slots = rng.permutation(160)[:70]
    fast.store_kv(keys, values, slots, *rows)
    fast.store_kv(keys, values, slots, *panels, "panels")
    ref_of_fast.store_kv(keys, values, slots, *by_ref, "panels")
    np.testing.assert_array_equal(panels[0], formulas.to_panels(rows[0]))
    np.testing.assert_array_equal(panels[1], rows[1])
    for got, same in zip(panels, by_ref, strict=True):
        np.testing.assert_array_equal(got, same)
    sequences = [(normal(rng, n, 3, 24), normal(rng, n, 3, 48)) for n in (1, 150, 64)]
    queries = [normal(rng, t, 6, 24) for t in (1, 40, 3)]
    for block_size in (16, 48):
        got, expected = (
            formulas.run_attention(backend, sequences, queries, block_size, dtype, "panels")
            for backend in (fast, ref_of_fast)
        )
        np.testing.assert_allclose(got, expected, atol=attention_tolerance(dtype))


def test_the_key_layout_is_rows_where_panels_do_not_fit(fast):
    for shape in (
        *((8, 64, 64, "float32"), (16, 33, 64, "bfloat16"), (16, 64, 20, "float32")),
        *((24, 64, 64, "fp8"), (16, 64, 20, "fp8")),
    ):
        assert fast.key_layout(*shape) == "rows"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_first_non_finite_finds_the_first(fast, ref, rng, dtype):
    clean = formulas.as_dtype(normal(rng, 700, 401), dtype)
    assert fast.first_non_finite(clean) == -1
    for bad, places in ((np.nan, [0, 280_699]), (-np.inf, [1023, 131_073]), (np.inf, [140_350])):
        array = clean.copy()
        array.reshape(-1)[places] = formulas.as_dtype(np.array([bad], np.float32), dtype)
        assert fast.first_non_finite(array) == places[0]
    assert ref.first_non_finite(array[350:351]) == 0


def test_bad_shapes_are_named(fast, rng):
    x, weight = normal(rng, 3, 8), normal(rng, 9)
    with pytest.raises(InvalidArgument, match=r"rms_norm\.weight: expected float32 \[D=8\]"):
        fast.rms_norm(x, weight)
    with pytest.raises(InvalidArgument, match=r"rms_norm\.out: .* \[T=1, H=3, D=8\]"):
        fast.rms_norm(x[None], weight[:8], out=x)
    packed = fast.pack_linear([normal(rng, 4, 9)], "float32")
    with pytest.raises(InvalidArgument, match=r"linear\.x: expected float32 \[M, K=9\]"):
        fast.linear(x, packed)
    with pytest.raises(InvalidArgument, match=r"embedding\.token_ids: .* got 3 at 1"):
        fast.embedding(x, [0, 3])
    with pytest.raises(InvalidArgument, match=r"layer_norm\.bias: expected float32 \[D=8\]"):
        fast.layer_norm(x, weight[:8], weight)
    with pytest.raises(InvalidArgument, match=r"add\.x: expected float32 \[R=3, E=8\]"):
        fast.add(x, x[:, :7])
    with pytest.raises(InvalidArgument, match=r"cap_logits\.soft_cap: expected a number >= 0"):
        fast.cap_logits(x, 1.0, -1.0)
    with pytest.raises(InvalidArgument, match=r"sample\.rows\.temperature"):
        fast.sample(x[:1], [{"temperature": -1.0}])


def test_unknown_names_list_the_choices(monkeypatch):
    with pytest.raises(NotImplementedError, match="cuda, cpu, ref"):
        _core_testing.make_backend("tpu")
    monkeypatch.setenv("LLMSERVE_CPU_ISA", "sse9")
    with pytest.raises(InvalidArgument, match=r"LLMSERVE_CPU_ISA: expected one of .*generic"):
        _core_testing.make_backend("cpu")
    monkeypatch.setenv("LLMSERVE_CPU_ISA", "generic")
    assert _core_testing.make_backend("cpu").description == "cpu/generic, 1 thread"
