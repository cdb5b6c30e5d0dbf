"""The ref backend, which every other backend is tested against, against float64 formulas."""

import numpy as np
import op_formulas as formulas
import pytest
from llmserve import _core_testing
from llmserve.errors import InvalidArgument

# ref sums n terms in float32: the error grows like sqrt(n) * 2^-24 for random signs; n <= 512 and
# a factor of 8 for the tail of the distribution.
SUM_TOLERANCE = 8 * 512**0.5 * 2**-24
# A handful of roundings and an exp of 2 ulp.
ELEMENTWISE_TOLERANCE = 8 * 2**-24


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("width", [1, 15, 128])
def test_rms_norm_matches_the_formula(ref, rng, width):
    x, weight = normal(rng, 3, width), normal(rng, width)
    expected = formulas.rms_norm(x, weight, 1e-5, 1.0)
    np.testing.assert_allclose(ref.rms_norm(x, weight, 1e-5, 1.0), expected, rtol=SUM_TOLERANCE)
    expected = formulas.rms_norm(x, weight, 1e-5, 1.0, 0.3)
    got = ref.rms_norm(x, weight, 1e-5, 1.0, 0.3)
    np.testing.assert_allclose(got, expected, rtol=SUM_TOLERANCE)
    residual = normal(rng, 3, width)
    total = residual + x
    out = ref.add_rms_norm(residual, x, weight, 1e-5)
    np.testing.assert_array_equal(residual, total)
    np.testing.assert_array_equal(out, ref.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_linear_matches_the_formula(ref, rng, dtype):
    x = normal(rng, 5, 127)
    parts = [formulas.as_dtype(normal(rng, n, 127), dtype) for n in (17, 4)]
    bias = normal(rng, 21)
    weight = ref.pack_linear(parts, dtype)
    w = np.concatenate([formulas.as_float(part) for part in parts])
    product = x.astype(np.float64) @ w.T.astype(np.float64) + bias
    scale = np.abs(x).astype(np.float64) @ np.abs(w.T)
    out = ref.linear(x, weight, bias)
    assert (np.abs(out - product) <= SUM_TOLERANCE * scale).all()
    old = normal(rng, 5, 21)
    total = ref.linear(x, weight, bias, old.copy(), True)
    np.testing.assert_array_equal(total, out + old)


@pytest.mark.parametrize(("isa", "depth"), [("avx512_bf16", 2), ("amx", 32)])
def test_linear_over_bf16_sums_as_the_instruction_set_does(rng, isa, depth):
    """Multiply-adds of bf16: exact in float64 but for the rounding to float32 at each one's end."""
    x, w = normal(rng, 3, 77), formulas.as_dtype(normal(rng, 5, 77), "bfloat16")
    x[0, :3] = [1e-39, 2**-126, 1 + 3 * 2**-8]  # subnormal; the smallest normal; a tie, to even
    backend = _core_testing.make_backend("ref", 1, isa)
    rounded = formulas.from_bf16(formulas.to_bf16(x)).astype(np.float64)
    rounded[0, 0] = 0.0
    expected = np.zeros((3, 5), np.float32)
    terms = np.einsum("mk,nk->kmn", rounded, formulas.as_float(w).astype(np.float64))
    for begin in range(0, 77, depth):
        part = terms[begin : begin + depth]
        if isa == "avx512_bf16":
            for term in part[::-1]:
                expected = (expected + term).astype(np.float32)
        else:
            halves = [np.zeros((3, 5), np.float32) for _ in range(2)]
            for i, term in enumerate(part):
                halves[i % 2] = (halves[i % 2] + term).astype(np.float32)
            expected = expected + (halves[0] + halves[1])
    got = backend.linear(x, backend.pack_linear([w], "bfloat16"))
    np.testing.assert_array_equal(got, expected)


def test_linear_converts_between_16_bit_floats(ref, rng):
    half = normal(rng, 3, 8).astype(np.float16)
    x = np.eye(8, dtype=np.float32)
    for dtype, expected in (
        ("float32", half.astype(np.float32)),
        ("bfloat16", formulas.from_bf16(formulas.to_bf16(half.astype(np.float32)))),
    ):
        np.testing.assert_array_equal(ref.linear(x, ref.pack_linear([half], dtype)), expected.T)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_matches_the_formula(ref, rng, interleaved):
    heads = normal(rng, 4, 3, 20)
    positions = np.array([0, 1, 77, 131071], np.int32)
    inv_freq = (1e4 ** (-np.arange(8) / 8)).astype(np.float32)
    expected = formulas.rotary(heads, positions, inv_freq, interleaved, 1.25)
    ref.rotary(heads, ref.rotary_table(positions, inv_freq, 1.25), interleaved)
    np.testing.assert_allclose(heads, expected, atol=ELEMENTWISE_TOLERANCE * 4)


def test_rotary_table_grows_with_the_logarithm_of_whole_periods(ref):
    positions = np.array([0, 15, 16, 77, 131071], np.int32)
    inv_freq = (1e4 ** (-np.arange(8) / 8)).astype(np.float32)
    plain = ref.rotary_table(positions, inv_freq, 1.25)
    grown = ref.rotary_table(positions, inv_freq, 1.25, growth=0.3, period=16)
    factor = 1 + 0.3 * np.log(1 + np.array([0, 0, 1, 4, 8191]))
    np.testing.assert_allclose(grown, plain * factor[:, None], rtol=4 * ELEMENTWISE_TOLERANCE)
    np.testing.assert_array_equal(grown[:2], plain[:2])
    with pytest.raises(InvalidArgument, match=r"rotary_table\.period: expected at least 1, got 0"):
        ref.rotary_table(positions, inv_freq, period=0)


@pytest.mark.parametrize("up", [1.0, -2.5, 20.0, -20.0])
@pytest.mark.parametrize("activation", formulas.all_activations())
def test_gated_activation_matches_the_formula(ref, activation, up):
    gate = np.concatenate([np.linspace(-20, 20, 999), [0, -120, 120]]).astype(np.float32)
    gate_up = np.concatenate([gate, np.full_like(gate, up)])[None]
    expected = formulas.gated_activation(gate_up.astype(np.float64), activation)
    # exp(y) of a y rounded to float32 is off by |y| * 2^-24, and |y| < 90 where the result is
    # not below atol.
    np.testing.assert_allclose(
        ref.gated_activation(gate_up, activation),
        expected,
        rtol=90 * ELEMENTWISE_TOLERANCE,
        atol=1e-36,
    )


def test_an_activation_of_a_gate_is_refused_without_one(ref, rng):
    with pytest.raises(InvalidArgument, match=r"activation\.activation: .* got swiglu_oai"):
        ref.activation(normal(rng, 1, 4), "swiglu_oai")


@pytest.mark.parametrize("activation", formulas.activations_of_one())
def test_activation_is_the_gated_one_beside_ones(ref, activation):
    gate = np.concatenate([np.linspace(-20, 20, 999), [0, -120, 120]]).astype(np.float32)
    gate_up = np.concatenate([gate, np.ones_like(gate)])[None]
    np.testing.assert_array_equal(
        ref.activation(gate[None], activation), ref.gated_activation(gate_up, activation)
    )


@pytest.mark.parametrize("width", [1, 15, 128])
def test_layer_norm_matches_the_formula(ref, rng, width):
    x, weight, bias = normal(rng, 3, width) + 2, normal(rng, width), normal(rng, width)
    # Of deviations near 1 whose mean is 2: the terms are about 3 in magnitude.
    options = {"atol": 3 * SUM_TOLERANCE, "rtol": 3 * SUM_TOLERANCE}
    expected = formulas.layer_norm(x, weight, bias)
    np.testing.assert_allclose(ref.layer_norm(x, weight, bias), expected, **options)
    expected = formulas.layer_norm(x, weight, eps=0.5)
    np.testing.assert_allclose(ref.layer_norm(x, weight, eps=0.5), expected, **options)
    expected = formulas.layer_norm(x, weight, bias, weight_offset=1.0, scale=0.3)
    got = ref.layer_norm(x, weight, bias, weight_offset=1.0, scale=0.3)
    np.testing.assert_allclose(got, expected, **options)


def test_add_and_cap_logits_match_the_formula(ref, rng):
    x, y = normal(rng, 3, 20), normal(rng, 3, 20) * 30
    total = x.copy()
    ref.add(total, y, 0.3)
    np.testing.assert_array_equal(total, x + y * np.float32(0.3))
    capped, scaled = y.copy(), y.copy()
    ref.cap_logits(capped, 0.5, 10.0)
    ref.cap_logits(scaled, 0.5)
    np.testing.assert_array_equal(scaled, y * np.float32(0.5))
    expected = 10 * np.tanh(y.astype(np.float64) * 0.5 / 10)
    np.testing.assert_allclose(capped, expected, atol=10 * ELEMENTWISE_TOLERANCE)


@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("soft_cap", [0.0, 3.0])
def test_attention_matches_the_formula(ref, rng, window, soft_cap):
    sequences = [(normal(rng, n, 2, 8), normal(rng, n, 2, 5)) for n in (1, 150, 64)]
    queries = [normal(rng, t, 6, 8) for t in (1, 130, 3)]
    options = {"scale": 0.5, "window": window, "soft_cap": soft_cap}
    out = formulas.run_attention(ref, sequences, queries, 7, **options)
    for (keys, values), q in zip(sequences, queries, strict=True):
        expected = formulas.attention(q, keys, values, **options)
        np.testing.assert_allclose(out[: len(q)], expected, atol=SUM_TOLERANCE)
        out = out[len(q) :]


@pytest.mark.parametrize("window", [0, 70])
def test_a_sink_is_a_score_without_a_value(ref, rng, window):
    """Below, among and far above the scores, and not scaled as they are."""
    pair = normal(rng, 150, 2, 8), normal(rng, 150, 2, 5)
    q = normal(rng, 130, 6, 8)
    sinks = np.array([-90, -2, 0, 1.5, 4, 200], np.float32)
    options = {"scale": 0.5, "window": window, "sinks": sinks}
    out = formulas.run_attention(ref, [pair], [q], 7, **options)
    np.testing.assert_allclose(out, formulas.attention(q, *pair, **options), atol=SUM_TOLERANCE)
    assert not out[:, 5].any()  # the sink takes it all
    far = options | {"sinks": np.full(6, -200, np.float32)}
    without = {"scale": 0.5, "window": window}
    plain, unsunk = (formulas.run_attention(ref, [pair], [q], 7, **each) for each in (without, far))
    np.testing.assert_array_equal(unsunk, plain)
    with pytest.raises(InvalidArgument, match=r"sinks: expected .*H=6"):
        formulas.run_attention(ref, [pair], [q], 7, sinks=sinks[:5])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
def test_values_may_be_the_first_elements_of_the_keys(ref, rng, dtype):
    sequences = [(keys, keys[..., :12]) for keys in (normal(rng, n, 1, 20) for n in (1, 150))]
    queries = [normal(rng, t, 5, 20) for t in (1, 130)]
    apart, within = (
        formulas.run_attention(ref, sequences, queries, 7, dtype, values_in_keys=is_within)
        for is_within in (False, True)
    )
    if dtype == "fp8":  # the value has the scale of the whole row
        np.testing.assert_allclose(within, apart, atol=0.1)
    else:
        np.testing.assert_array_equal(within, apart)


def test_a_cache_with_values_in_its_keys_stores_keys_alone(ref, rng):
    keys = normal(rng, 5, 1, 8)
    for dtype in ("float32", "bfloat16", "fp8"):
        got, expected, values = (
            formulas.as_dtype(np.zeros((2, 1, 4, 8), np.float32), dtype) for _ in range(3)
        )
        ref.store_kv(keys, None, [7, 1, -1, 0, 4], got, got)
        ref.store_kv(keys, keys, [7, 1, -1, 0, 4], expected, values)
        np.testing.assert_array_equal(got, expected)
    with pytest.raises(InvalidArgument, match=r"store_kv\.values: expected none"):
        ref.store_kv(keys, keys, [7, 1, -1, 0, 4], got, got)


def test_rotated_heads_may_go_elsewhere(ref, rng):
    heads, angles = normal(rng, 6, 3, 10), normal(rng, 6, 8)
    for interleaved in (False, True):
        out, in_place = np.zeros_like(heads), heads.copy()
        before = heads.copy()
        ref.rotary(heads, angles, interleaved, out)
        ref.rotary(in_place, angles, interleaved)
        np.testing.assert_array_equal(out, in_place)
        np.testing.assert_array_equal(heads, before)


@pytest.mark.parametrize("isa", ["avx512_bf16", "amx"])
@pytest.mark.parametrize("window", [0, 3])
def test_attention_over_bf16_sums_as_the_instruction_sets_do(rng, isa, window):
    """Pairs of D and of positions, the second first; probabilities are rounded, then summed."""
    n, dim, value_dim = 7, 5, 3
    keys, values = normal(rng, n, 1, dim), normal(rng, n, 1, value_dim)
    q = normal(rng, n, 1, dim)
    backend = _core_testing.make_backend("ref", 1, isa)
    options = {"scale": 0.5, "window": window}
    got = formulas.run_attention(backend, [(keys, values)], [q], 4, "bfloat16", **options)

    def bf16(x):
        return formulas.from_bf16(formulas.to_bf16(np.float32(x)))

    def chain(a, b):
        total = np.float32(0)
        for i in range(0, len(a), 2):
            for x, y in zip(a[i : i + 2][::-1], b[i : i + 2][::-1], strict=True):
                total = np.float32(np.float64(total) + np.float64(x) * np.float64(y))
        return total

    for t in range(n):
        begin = max(0, t + 1 - window) if window else 0
        scores = np.array([chain(bf16(q[t, 0]), bf16(keys[j, 0])) for j in range(begin, t + 1)])
        scores *= np.float32(0.5)
        # In NumPy's exp, which may differ in the last bit: before the rounding, not after it.
        p = np.zeros(t + 2, np.float32)
        p[begin : t + 1] = bf16(np.exp(scores - scores.max()))
        seen = np.where(p[:, None] > 0, np.append(bf16(values[: t + 1, 0]), [[0] * 3], 0), 0)
        first = begin // 2 * 2
        count = (t + 2 - first) // 2 * 2
        for i in range(value_dim):
            expected = chain(p[first : first + count], seen[first : first + count, i]) / p.sum()
            np.testing.assert_allclose(got[t, 0, i], expected, rtol=2 * 2**-23)


def test_store_kv_rounds_to_nearest_even_and_skips_minus_one(ref, rng):
    keys, values = normal(rng, 3, 2, 6), normal(rng, 3, 2, 4)
    caches = [np.zeros((4, 2, 5, d), np.uint16) for d in (6, 4)]
    ref.store_kv(keys, values, np.array([7, -1, 19]), *caches)
    for x, cache in zip((keys, values), caches, strict=True):
        np.testing.assert_array_equal(cache[1, :, 2], formulas.to_bf16(x[0]))
        np.testing.assert_array_equal(cache[3, :, 4], formulas.to_bf16(x[2]))
        assert np.count_nonzero(cache) == 2 * x[0].size


def test_sampling_matches_the_formula(ref, rng):
    logits = normal(rng, 1, 50) * 3
    noise = formulas.gumbel_noise(50, seed=0x123456789ABC, position=5_000_000_000)
    row = {"seed": 0x123456789ABC, "position": 5_000_000_000, "temperature": 0.7, "num_top": 3}
    z = (logits[0].astype(np.float64) - logits.max()) / 0.7
    (drawn,) = ref.sample(logits, [row])
    assert drawn["token_id"] == np.argmax(z + noise)
    logprobs = formulas.log_softmax(logits)[0]
    assert drawn["logprob"] == pytest.approx(logprobs[drawn["token_id"]], abs=1e-5)
    best = np.argsort(-logits[0])[:3]
    assert [token for token, _, _ in drawn["top"]] == best.tolist()
    assert [rank for _, _, rank in drawn["top"]] == [1, 2, 3]
    np.testing.assert_allclose([lp for _, lp, _ in drawn["top"]], logprobs[best], atol=1e-5)


def test_philox_matches_the_published_known_answers():
    # kat_vectors of the Random123 distribution, philox4x32-10.
    assert formulas.philox4x32([0] * 4, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = formulas.philox4x32([0xFFFFFFFF] * 4, 0xFFFFFFFFFFFFFFFF)
    assert ones == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
