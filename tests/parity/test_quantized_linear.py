"""The linear layer over integers: every CPU gives ref's bits, and ref what NumPy makes of the
definition in kernels/ops.h and quant/linear_format.h; CUDA sums parts of K by themselves."""

import numpy as np
import op_formulas as formulas
import pytest
from gguf_files import SCALE_PLACES, put_scales
from llmserve import _core, _core_testing, ops
from llmserve.errors import NotSupported

FORMATS = [name for name, _ in _core.supported_quantizations()]
SHAPES = [(1, 16, 128), (2, 17, 256), (3, 31, 384), (7, 130, 128), (9, 48, 1024), (70, 33, 512)]
# Deep enough that a cache holds a few panels, which rows pass block by block.
SHAPES += [(200, 40, 2176), (40, 140, 5632)]
PARTS = 8  # of K, on CUDA


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def as_halves(x: np.ndarray) -> np.ndarray:
    return x.clip(-65504, 65504).astype(np.float16).astype(np.float32)


def inverse(scale: np.ndarray) -> np.ndarray:
    """[N, groups, 1]; 0 where a scale has none."""
    with np.errstate(divide="ignore", over="ignore"):
        result = np.float32(1) / scale
    return np.where(np.isfinite(result), result, np.float32(0))[..., None]


def quantize(rows: np.ndarray, name: str):
    """Integers less their zero point, scales and minima [N, groups] of rows [N, K]."""
    group = rows.shape[1] if name == "int8" else 32 if "g32" in name else 128
    v = rows.reshape(len(rows), -1, group)
    if name == "int8":
        scale = np.abs(v).max(-1) / np.float32(127)
        return np.rint(v * inverse(scale)).clip(-127, 127), scale, None
    if "asym" in name:
        scale = as_halves((v.max(-1) - v.min(-1)) / np.float32(15))
        low = as_halves(-v.min(-1))
        return np.rint((v + low[..., None]) * inverse(scale)).clip(0, 15), scale, low
    at = np.abs(v).argmax(-1)[..., None]
    scale = as_halves(np.take_along_axis(v, at, -1)[..., 0] / np.float32(-8))
    return np.rint(v * inverse(scale) + np.float32(8)).clip(0, 15) - 8, scale, None


def twin(x: np.ndarray, rows: np.ndarray, name: str, parts: int = 1) -> np.ndarray:
    """x rows^T as the integers have it, operation by operation in float32; of several parts of K,
    each is summed by itself, and then they are."""
    w, scale, low = quantize(rows, name)
    steps = -(-rows.shape[1] // max(128, w.shape[2]))
    groups_each = max(128, w.shape[2]) // w.shape[2]
    ends = [steps * (i + 1) // parts * groups_each for i in range(parts)]
    whole = np.zeros((len(x), len(rows)), np.float32)
    v = x.reshape(len(x), *w.shape[1:])
    most = np.abs(v).max(-1)
    q = np.rint(v * (np.float32(127) / most)[..., None])
    s = most / np.float32(127)
    total = np.zeros((len(x), len(rows)), np.float32)
    for g in range(w.shape[1]):
        dots = (q[:, g].astype(np.int64) @ w[:, g].astype(np.int64).T).astype(np.float32)
        total = total + (scale[None, :, g] * s[:, None, g]) * dots
        if low is not None:
            sums = q[:, g].astype(np.int64).sum(-1).astype(np.float32)
            total = total - low[None, :, g] * (s[:, g] * sums)[:, None]
        if parts > 1 and g + 1 in ends:
            whole, total = whole + total, np.zeros_like(whole)
    return whole + total


def check_same(fast, got: np.ndarray, expected: np.ndarray):
    """Bits; on CUDA, where K is summed in parts, within some ulps of a row's largest."""
    if fast.name == "cuda":
        atol = 3e-6 * np.abs(expected).max()
        np.testing.assert_allclose(got, expected, rtol=0, atol=atol)
    else:
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name", FORMATS)
def test_weights_of_any_magnitude_are_rounded_as_the_definition_says(rng, name):
    rows = normal(rng, 200, 384) * (10.0 ** rng.uniform(-44, 37, (200, 1))).astype(np.float32)
    rows[0] = 0
    rows[1, ::2] = -rows[1, 1::2]  # ties of magnitude
    rows[2] = np.arange(384) / 8 - 16  # ties of rounding
    rows[3] = -0.0
    got = ops.quantize(rows, name)
    for part, expected in zip(got, quantize(rows, name), strict=True):
        if expected is None:
            assert part is None
        else:
            np.testing.assert_array_equal(part, expected.reshape(part.shape))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_ref_is_what_numpy_makes_of_the_definition(ref, rng, name, m, n, k):
    x, rows = normal(rng, m, k), normal(rng, n, k)
    got = ref.linear(x, ref.pack_quantized(rows, name))
    np.testing.assert_array_equal(got, twin(x, rows, name))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_every_instruction_set_gives_the_bits_of_ref(fast, ref, rng, name, m, n, k):
    x, rows = normal(rng, m, k + 5)[:, :k], normal(rng, n, k)
    rows[0] *= 1e-3
    rows[-1] *= 1e6  # past what float16 scales hold
    bias, old = normal(rng, n), normal(rng, m, n)
    packed, plain = fast.pack_quantized(rows, name), ref.pack_quantized(rows, name)
    assert packed.num_bytes == fast.packed_bytes_quantized(n, k, name)
    for options in ({}, {"bias": bias}, {"bias": bias, "accumulate": True}):
        got, expected = (
            backend.linear(x, weight, out=old.copy(), **options)
            for backend, weight in ((fast, packed), (ref, plain))
        )
        if fast.name == "cuda":
            expected = twin(x, rows, name, PARTS)
            if "bias" in options:
                expected = expected + bias
            if "accumulate" in options:
                expected = expected + old
        np.testing.assert_array_equal(got, expected)


# Activations are rounded to 8 bits in groups of 16 to 256: half a step of 1/127 of the largest is
# 0.5% of their deviation, 0.65% in groups of 256; times 3.
BLOCK_ERROR = 0.02


def random_blocks(rng, name: str, rows: int, count: int, num_bytes: int, fill: int | None = None):
    """[rows, count * num_bytes]: random bits, or as `fill` has them, and scales in [0, 1)."""
    blocks = rng.integers(0, 256, (rows, count, num_bytes), np.uint8)
    if fill is not None:
        blocks[:] = fill
    if name == "MXFP4":
        blocks[..., 0] = rng.integers(117, 127, (rows, count))
    if name == "NVFP4":
        blocks[..., :4] = rng.integers(0, 0x38, (rows, count, 4))
    if len(SCALE_PLACES[name]) < 2:
        put_scales(name, blocks, rng.random((rows, count)))
    else:
        for at in SCALE_PLACES[name]:
            halves = rng.random((rows, count, 1)).astype(np.float16)
            blocks[..., at : at + 2] = halves.view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("m", [1, 4, 9])
@pytest.mark.parametrize(
    ("name", "elements", "num_bytes"), [row[:3] for row in _core_testing.kept_formats()]
)
def test_blocks_of_files_run_with_the_bits_of_ref_and_near_their_values(
    fast, ref, rng, name, elements, num_bytes, m
):
    x, n = normal(rng, m, 1280), 33
    blocks = random_blocks(rng, name, n, 1280 // elements, num_bytes)
    got = fast.linear(x, fast.pack_blocks(blocks, name))
    check_same(fast, got, ref.linear(x, ref.pack_blocks(blocks, name)))
    expected = x @ _core_testing.dequantize(name, blocks.tobytes()).reshape(n, -1).T
    assert (got - expected).std() < BLOCK_ERROR * expected.std()


@pytest.mark.parametrize(
    ("name", "elements", "num_bytes"), [row[:3] for row in _core_testing.kept_formats()]
)
def test_blocks_weigh_what_their_file_says(fast, rng, name, elements, num_bytes):
    """Each activation is alone in its group, and so exact: what is left are the weights."""
    blocks = random_blocks(rng, name, 33, 512 // elements, num_bytes)
    got = fast.linear(np.eye(512, dtype=np.float32), fast.pack_blocks(blocks, name))
    expected = _core_testing.dequantize(name, blocks.tobytes()).reshape(33, -1).T
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


# K-quants keep a byte for a group's scale, and one for its minimum, where files have 4 to 8 bits.
BITS_IN_MEMORY = {"Q4_0": 4.5, "Q8_0": 8.5, "Q2_K": 3.125, "Q3_K": 3.5625}
BITS_IN_MEMORY |= {"Q4_K": 4.625, "Q5_K": 5.625, "Q6_K": 6.5625, "IQ4_NL": 4.5, "IQ4_XS": 4.3125}
BITS_IN_MEMORY |= {"MXFP4": 4.25, "TQ1_0": 2.125, "TQ2_0": 2.125, "IQ3_S": 4.3125}
# Those with an f32 of a row have it once for 2048.
BITS_IN_MEMORY |= {
    **{name: bits + 32 / 2048 for name, bits in (("NVFP4", 4.5), ("IQ1_S", 4.3125))},
    **{name: 4.3125 + 32 / 2048 for name in ("IQ2_XXS", "IQ3_XXS")},
    **{name: 4.5625 + 32 / 2048 for name in ("IQ1_M", "IQ2_XS", "IQ2_S")},
}
# What 256 weights share is there for each 128 of them.
BITS_ON_CUDA = {"Q2_K": 3.25, "Q3_K": 3.625, "Q4_K": 4.75, "Q5_K": 5.75, "Q6_K": 6.625}
BITS_ON_CUDA |= {"IQ4_XS": 4.375, "TQ1_0": 2.25, "TQ2_0": 2.25, "IQ3_S": 4.375}
for _name in ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS"):
    BITS_ON_CUDA[_name] = BITS_IN_MEMORY[_name] + 8 / 128


@pytest.mark.parametrize("name", BITS_IN_MEMORY)
def test_blocks_take_few_more_bits_than_in_files(fast, rng, name):
    _, elements, num_bytes, _ = next(f for f in _core_testing.kept_formats() if f[0] == name)
    weight = fast.pack_blocks(random_blocks(rng, name, 32, 2048 // elements, num_bytes), name)
    bits = BITS_IN_MEMORY[name]
    if fast.name == "cuda":
        bits = BITS_ON_CUDA.get(name, bits)
    assert weight.num_bytes == 32 * 2048 * bits / 8


@pytest.mark.parametrize(
    ("name", "elements", "num_bytes"), [row[:3] for row in _core_testing.kept_formats()]
)
def test_blocks_of_extreme_values_are_exact(fast, ref, rng, name, elements, num_bytes):
    """All bits of a block's integers are set, and all activations at their largest: sums of few
    bits must not saturate."""
    x = np.array([1, -1, 1], np.float32)[:, None] * np.ones((1, 512), np.float32)
    x[2, ::3] = -1
    blocks = random_blocks(rng, name, 20, 512 // elements, num_bytes, fill=0xFF)
    blocks[10:] = random_blocks(rng, name, 10, 512 // elements, num_bytes, fill=0)
    got = fast.linear(x, fast.pack_blocks(blocks, name))
    check_same(fast, got, ref.linear(x, ref.pack_blocks(blocks, name)))


@pytest.mark.parametrize(
    ("name", "elements", "num_bytes"), [row[:3] for row in _core_testing.kept_formats()]
)
def test_rows_of_blocks_alone_equal_rows_in_any_batch(
    fast, fast_one_thread, rng, name, elements, num_bytes
):
    x, n = normal(rng, 73, 2560), 140
    weight = fast.pack_blocks(random_blocks(rng, name, n, 2560 // elements, num_bytes), name)
    alone = np.concatenate([fast.linear(x[i : i + 1], weight) for i in range(73)])
    for m in (2, 3, 5, 8, 13, 24, 40, 73):
        np.testing.assert_array_equal(fast.linear(x[:m], weight), alone[:m])
        np.testing.assert_array_equal(fast_one_thread.linear(x[73 - m :], weight), alone[73 - m :])


@pytest.mark.parametrize(
    "name",
    ["Q2_K", "Q3_K", "Q5_0", "Q5_K", "Q6_K", "IQ2_S", "IQ4_NL", "IQ4_XS", "MXFP4", "TQ2_0"],
)
def test_deep_rows_of_blocks_alone_equal_rows_in_a_batch(fast, rng, name):
    """Widened panels, or scales as floats, of which two, or one, do not fit where many rows would
    pass them."""
    _, elements, num_bytes, _ = next(f for f in _core_testing.kept_formats() if f[0] == name)
    for k in (8192, 16384, 33024):
        x = normal(rng, 66, k)
        weight = fast.pack_blocks(random_blocks(rng, name, 50, k // elements, num_bytes), name)
        alone = np.concatenate([fast.linear(x[i : i + 1], weight) for i in (0, 31, 65)])
        np.testing.assert_array_equal(fast.linear(x, weight)[[0, 31, 65]], alone)


@pytest.mark.parametrize("m", [1, 9, 70])
def test_powers_of_two_of_any_size_are_scales(fast, ref, rng, m):
    """The two least are below the least normal float with most of their values, and count as 0."""
    blocks = random_blocks(rng, "MXFP4", 256, 16, 17).reshape(256, 16, 17)
    blocks[..., 0] = np.minimum(np.arange(256), 252)[:, None]
    blocks = blocks.reshape(256, -1)
    weight = fast.pack_blocks(blocks, "MXFP4")
    x = np.zeros((m, 512), np.float32)
    x[np.arange(m), np.arange(m) * 7] = 1
    got = fast.linear(x, weight)
    check_same(fast, got, ref.linear(x, ref.pack_blocks(blocks, "MXFP4")))
    values = _core_testing.dequantize("MXFP4", blocks.tobytes()).reshape(256, -1)
    values[:2] = 0
    expected = values[:, np.arange(m) * 7].T
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=2.0**-125)


@pytest.mark.parametrize("m", [1, 5])
@pytest.mark.parametrize("k", [1, 3, 5, 31, 130, 1027])
def test_int8_takes_rows_of_any_length(fast, ref, rng, m, k):
    x, rows = normal(rng, m, k), normal(rng, 20, k)
    got = fast.linear(x, fast.pack_quantized(rows, "int8"))
    np.testing.assert_array_equal(got, ref.linear(x, ref.pack_quantized(rows, "int8")))


@pytest.mark.parametrize("name", FORMATS)
def test_extreme_values_are_exact(fast, ref, name):
    """All products at their largest: 16-bit sums must not saturate."""
    signs = np.where(np.arange(1024) % 3 == 0, -1, 1).astype(np.float32)
    x = np.stack([np.ones(1024, np.float32), -np.ones(1024, np.float32), signs])
    rows = np.concatenate([x, np.zeros((1, 1024), np.float32)])
    got = fast.linear(x, fast.pack_quantized(rows, name))
    check_same(fast, got, ref.linear(x, ref.pack_quantized(rows, name)))
    # Symmetric 4 bits have 7 of 8 steps on one side.
    np.testing.assert_allclose(np.abs(got[[0, 1, 2], [0, 1, 2]]), 1024, rtol=0.06)
    assert (got[:, 3] == 0).all()


@pytest.mark.parametrize("name", FORMATS)
def test_bad_activations_spoil_their_own_row_alone(fast, rng, name):
    x, rows = normal(rng, 6, 256), normal(rng, 40, 256)
    weight = fast.pack_quantized(rows, name)
    good = fast.linear(x, weight)
    x[1, 7], x[3, 200], x[4] = np.nan, np.inf, 1e-35
    got = fast.linear(x, weight)
    assert np.isnan(got[[1, 3]]).all()
    assert (got[4] == 0).all()
    np.testing.assert_array_equal(got[[0, 2, 5]], good[[0, 2, 5]])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("n", "k"), [(300, 640), (140, 5632)])
def test_rows_alone_equal_rows_in_any_batch(fast, fast_one_thread, rng, n, k, name):
    x = normal(rng, 73, k)
    weight = fast.pack_quantized(normal(rng, n, k), name)
    alone = np.concatenate([fast.linear(x[i : i + 1], weight) for i in range(73)])
    for m in (2, 3, 4, 5, 7, 8, 9, 13, 40, 73):
        np.testing.assert_array_equal(fast.linear(x[:m], weight), alone[:m])
        np.testing.assert_array_equal(fast_one_thread.linear(x[73 - m :], weight), alone[73 - m :])


# Relative to the product of the rows' norms, which is what rounding errors of random signs grow
# with: half a step of a uniform rounding is 0.29 of a step, a step 1/8 of the largest of 128 normal
# weights (2.7 deviations) and 1/127 of the largest activation.
ERRORS = {"int8": 0.015, "int4": 0.13, "int4-g32": 0.1, "int4-asym": 0.12, "int4-g32-asym": 0.09}


@pytest.mark.parametrize("name", FORMATS)
def test_products_are_near_those_of_the_floats(fast, rng, name):
    x, rows = normal(rng, 50, 1024), normal(rng, 60, 1024)
    error = fast.linear(x, fast.pack_quantized(rows, name)) - x @ rows.T
    assert np.sqrt((error**2).mean() / 1024) < ERRORS[name]


def test_rows_that_integer_sums_cannot_take_are_refused_with_what_to_do(ref):
    with pytest.raises(NotSupported, match="takes at most 131072"):
        ref.pack_quantized(np.ones((1, 131073), np.float32), "int8")
    with pytest.raises(NotSupported, match="'int3' is not supported; use one of: int8, int4"):
        ref.pack_quantized(formulas.as_dtype(np.ones((1, 4)), "float32"), "int3")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("k", [40, 200, 1000])
def test_the_last_group_of_a_row_may_be_shorter(fast, ref, rng, name, k):
    x, rows = normal(rng, 30, k), normal(rng, 40, k)
    got = fast.linear(x, fast.pack_quantized(rows, name))
    # CUDA adds the groups of a row up in eight parts.
    tolerance = 1e-4 if fast.name == "cuda" else 0
    expected = ref.linear(x, ref.pack_quantized(rows, name))
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)
    # Of zeros more, neither scales nor products know anything.
    whole = -k % 128
    wider = [np.pad(a, ((0, 0), (0, whole))) for a in (x, rows)]
    if "asym" not in name and name != "int8":
        expected = ref.linear(wider[0], ref.pack_quantized(wider[1], name))
        np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)
