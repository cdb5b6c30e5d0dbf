"""Linear layers over formats made of their traits, as files of quantized weights need them: ref is
what NumPy makes of the definition (quant/linear_format.h, kernels/ops.h), and every backend is as
near to ref as its arithmetic promises: to the bit, over integers."""

import numpy as np
import op_formulas as formulas
import pytest
from conftest import sums_as_the_manual_says
from llmserve import _core_testing as testing
from llmserve.errors import NotSupported

E2M1_DOUBLED = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]
# QLoRA, Dettmers et al. 2023, appendix E.
NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453]
NF4 += [-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0]
NF4 += [0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224]
NF4 += [0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]

INTEGERS = {
    "GPTQ, AWQ": {"bits": 4, "group_size": 128, "scale_type": "float16", "has_zero": True},
    "compressed-tensors": {"bits": 4, "group_size": 64, "scale_type": "bfloat16"},
    "of a row": {"bits": 4, "group_size": 0, "scale_type": "float32", "has_zero": True},
    "3 bits": {"bits": 3, "group_size": 128, "scale_type": "float16", "has_zero": True},
    "3 bits of a row": {"bits": 3, "group_size": 0, "scale_type": "bfloat16"},
    "2 bits": {"bits": 2, "group_size": 64, "scale_type": "bfloat16", "has_zero": True},
    "5 bits": {"bits": 5, "group_size": 32, "scale_type": "float32", "has_zero": True},
    "6 bits": {"bits": 6, "group_size": 128, "scale_type": "bfloat16", "has_zero": True},
    "8 bits": {"bits": 8, "group_size": 128, "scale_type": "float16", "has_zero": True},
    "8 bits, symmetric": {"bits": 8, "group_size": 96, "scale_type": "float32"},
    "8 bits of a row": {"bits": 8, "group_size": 0, "scale_type": "float32", "has_zero": True},
    "minima": {"bits": 4, "group_size": 48, "scale_type": "bfloat16", "has_min": True},
    "NVFP4": {
        "bits": 4,
        "group_size": 16,
        "scale_type": "fp8",
        "table": E2M1_DOUBLED,
        "has_row_scale": True,
    },
    "row scales": {
        "bits": 8,
        "group_size": 64,
        "scale_type": "power-of-two",
        "has_row_scale": True,
    },
    "outliers": {"bits": 8, "group_size": 0, "outlier_threshold": 2.5},
}
FLOATS = {
    "FP8 of a row": {"is_fp8": True},
    "FP8 in blocks": {"is_fp8": True, "group_size": 128},
    "FP8 in large blocks": {"is_fp8": True, "group_size": 256, "scale_type": "bfloat16"},
    "NF4": {"bits": 4, "group_size": 64, "values": NF4},
    "NF4 of a row": {"bits": 4, "values": NF4, "has_row_scale": True},
}
# Whole groups, a partial last one, rows of a few weights, many rows.
SHAPES = [(1, 33, 1280), (9, 50, 1352), (3, 17, 40), (70, 40, 1000)]
# Of the terms' magnitudes: as many roundings as K has parts, and those of the groups.
SUMS_IN_PARTS = 3e-6


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


ROUNDED = {
    "float32": lambda x: x,
    "float16": lambda x: x.astype(np.float16).astype(np.float32),
    "bfloat16": lambda x: formulas.from_bf16(formulas.to_bf16(x)),
    "fp8": lambda x: formulas.E4M3.astype(np.float32)[
        np.abs(x[..., None] - formulas.E4M3).argmin(-1)
    ],
    "power-of-two": lambda x: np.exp2(np.floor(np.log2(x))),
}


class Numbers:
    """A weight [N, K] of any numbers that a format holds, the extremes among them."""

    def __init__(self, rng, traits, n, k):
        self.traits, self.n, self.k = traits, n, k
        bits = traits.get("bits", 8)
        size = traits.get("group_size", 0) or k
        self.group_of = np.arange(k) // size
        groups = self.group_of[-1] + 1
        low, high = (-128, 128) if bits == 8 else (0, 2**bits)
        self.q = rng.integers(low, high, (n, k)).astype(np.int8)
        self.q[0], self.q[-1] = low, high - 1
        if traits.get("is_fp8"):
            self.q[(self.q & 127) == 127] ^= 8  # not NaN
        kind = traits.get("scale_type", "float32")
        scales = rng.uniform(0.25, 1, (n, groups)).astype(np.float32) * np.float32(2.0**-6)
        self.scales = ROUNDED[kind](scales)
        if kind in ("bfloat16", "float32"):
            self.scales[0] *= np.float32(2.0**-40)  # out of float16's range
            self.scales[n // 2] *= np.float32(2.0**40)
        self.mins = self.zeros = self.row_scales = None
        if traits.get("has_min"):
            self.mins = np.float32(2) * self.scales
        if traits.get("has_zero"):
            self.zeros = rng.integers(low, high + 1, (n, groups)).astype(np.int16)
            self.zeros[0], self.zeros[-1] = high, low
        if traits.get("has_row_scale"):
            self.row_scales = rng.uniform(0.5, 2, n).astype(np.float32)
        self.format = testing.make_format(**traits)

    def pack(self, backend, **kwargs):
        return backend.pack_numbers(
            self.format,
            self.q,
            self.scales,
            mins=self.mins,
            zeros=self.zeros,
            row_scales=self.row_scales,
            **kwargs,
        )

    def numbers(self):
        """[N, K]: what scales multiply."""
        if self.traits.get("is_fp8"):
            sign = np.where(self.q < 0, np.float32(-1), np.float32(1))
            return sign * formulas.E4M3.astype(np.float32)[self.q & 127]
        for name in ("table", "values"):
            if name in self.traits:
                return ROUNDED["bfloat16"](np.array(self.traits[name], np.float32))[self.q]
        q = self.q.astype(np.int64)
        if self.zeros is not None:
            return q - self.zeros[:, self.group_of]
        bits = self.traits.get("bits", 8)
        return q if bits == 8 or self.mins is not None else q - 2 ** (bits - 1)

    def values(self):
        """[N, K] in float64."""
        w = self.numbers().astype(np.float64) * self.scales[:, self.group_of]
        if self.mins is not None:
            w = w - self.mins[:, self.group_of].astype(np.float64)
        return w if self.row_scales is None else w * self.row_scales[:, None]

    def integer_twin(self, x):
        """x W^T operation by operation in float32."""
        w, x = self.numbers().astype(np.int64), x.copy()
        threshold = self.traits.get("outlier_threshold", np.inf)
        outliers = np.abs(x) >= threshold
        outlying, x[outliers] = np.where(outliers, x, 0), 0
        total = np.zeros((len(x), self.n), np.float32)
        for g in range(self.group_of[-1] + 1):
            v = x[:, self.group_of == g]
            most = np.abs(v).max(-1)
            with np.errstate(divide="ignore"):
                inverse = np.where(most < 1e-30, np.float32(0), np.float32(127) / most)
            q = np.rint(v * inverse[:, None]).astype(np.int64)
            s = most / np.float32(127)
            dots = (q @ w[:, self.group_of == g].T).astype(np.float32)
            total = total + (self.scales[None, :, g] * s[:, None]) * dots
            if self.mins is not None:
                sums = q.sum(-1).astype(np.float32)
                total = total - self.mins[None, :, g] * (s * sums)[:, None]
        if self.row_scales is not None:
            total = total * self.row_scales
        for m, row in enumerate(outlying):
            added = np.zeros(self.n, np.float32)
            for k in np.flatnonzero(outliers[m]):
                added = added + row[k] * w[:, k].astype(np.float32)
            if outliers[m].any():
                total[m] = total[m] + self.scales[:, 0] * added
        return total


@pytest.mark.parametrize("traits", INTEGERS.values(), ids=INTEGERS)
def test_ref_is_what_numpy_makes_of_the_definition(ref, rng, traits):
    for m, n, k in SHAPES:
        x, w = normal(rng, m, k), Numbers(rng, traits, n, k)
        np.testing.assert_array_equal(ref.linear(x, w.pack(ref)), w.integer_twin(x))


@pytest.mark.parametrize("traits", INTEGERS.values(), ids=INTEGERS)
def test_every_instruction_set_gives_the_bits_of_ref(fast, ref, rng, traits):
    for m, n, k in SHAPES:
        x, w = normal(rng, m, k + 5)[:, :k], Numbers(rng, traits, n, k)
        x[m // 2] = -1  # all products of one sign, at their largest
        bias, old = normal(rng, n), normal(rng, m, n)
        packed, plain = w.pack(fast), w.pack(ref)
        assert packed.num_bytes == fast.packed_bytes_format(n, k, w.format)
        for options in ({}, {"bias": bias, "accumulate": True}):
            got, expected = (
                backend.linear(x, weight, out=old.copy(), **options)
                for backend, weight in ((fast, packed), (ref, plain))
            )
            if fast.name == "cuda":  # sums K in parts
                mins = 0 if w.mins is None else 2 * np.abs(w.mins[:, w.group_of])
                terms = np.abs(x) @ (np.abs(w.values()) + mins).T + np.abs(bias) + np.abs(old)
                assert (np.abs(got - expected) <= SUMS_IN_PARTS * terms).all()
            else:
                np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("traits", (INTEGERS | FLOATS).values(), ids=INTEGERS | FLOATS)
def test_weights_are_what_the_numbers_say(fast, rng, traits):
    """Each activation is alone in its row, and a power of two: what is left are the weights."""
    w = Numbers(rng, traits, 33, 200)
    got = fast.linear(np.eye(200, dtype=np.float32), w.pack(fast))
    # A minimum takes off what may be nearly all; the last bits are those of what it is taken from.
    terms = np.abs(w.values()) + (0 if w.mins is None else 2 * np.abs(w.mins[:, w.group_of]))
    assert (np.abs(got.T - w.values()) <= 1e-6 * terms).all()


@pytest.mark.parametrize("traits", FLOATS.values(), ids=FLOATS)
def test_products_of_floats_are_those_of_ref(fast, ref_of_fast, rng, traits):
    is_cuda = fast.name == "cuda"
    is_exact = (
        not is_cuda
        and formulas.isa_of(fast) != "generic"
        and (not formulas.multiplies_bf16(fast) or sums_as_the_manual_says())
    )
    for m, n, k in SHAPES:
        x, w = normal(rng, m, k), Numbers(rng, traits, n, k)
        got = fast.linear(x, w.pack(fast))
        rounded = ROUNDED["bfloat16"](x) if is_cuda else x
        expected = ref_of_fast.linear(rounded, w.pack(ref_of_fast))
        if is_exact:
            np.testing.assert_array_equal(got, expected)
        terms = np.abs(x) @ np.abs(w.values()).T
        assert (np.abs(got - expected) <= formulas.sum_tolerance(k) * terms).all()
        # Activations are rounded to bfloat16 at most.
        tolerance = 2.0**-8 + formulas.sum_tolerance(k)
        assert (np.abs(got - x @ w.values().T) <= tolerance * terms).all()


@pytest.mark.parametrize("traits", (INTEGERS | FLOATS).values(), ids=INTEGERS | FLOATS)
def test_rows_alone_equal_rows_in_any_batch(fast, fast_one_thread, rng, traits):
    x, w = normal(rng, 73, 1320), Numbers(rng, traits, 140, 1320)
    weight = w.pack(fast)
    alone = np.concatenate([fast.linear(x[i : i + 1], weight) for i in range(73)])
    for m in (2, 5, 8, 24, 73):
        np.testing.assert_array_equal(fast.linear(x[:m], weight), alone[:m])
        np.testing.assert_array_equal(fast_one_thread.linear(x[73 - m :], weight), alone[73 - m :])


@pytest.mark.parametrize("name", ["GPTQ, AWQ", "outliers", "FP8 in blocks"])
def test_columns_in_another_order_give_the_same_product(any_backend, rng, name):
    """The weight's columns were moved: its groups are of others, and x follows them."""
    w = Numbers(rng, (INTEGERS | FLOATS)[name], 40, 256)
    x, order = normal(rng, 21, 256), rng.permutation(256)
    moved = np.ascontiguousarray(x[:, order])
    got = any_backend.linear(x, w.pack(any_backend, input_order=order.tolist()))
    np.testing.assert_array_equal(got, any_backend.linear(moved, w.pack(any_backend)))


def test_outliers_of_a_row_leave_the_others_their_bits(any_backend, rng):
    w = Numbers(rng, {"bits": 8, "outlier_threshold": 6.0}, 40, 256)
    weight = w.pack(any_backend)
    x = normal(rng, 8, 256).clip(-5, 5)
    before = any_backend.linear(x, weight)
    plain = testing.make_format(bits=8)
    np.testing.assert_array_equal(
        before, any_backend.linear(x, any_backend.pack_numbers(plain, w.q, w.scales))
    )
    x[3, 17], x[3, 200], x[5, 0] = 60, -6, np.inf
    got = any_backend.linear(x, weight)
    others = [0, 1, 2, 4, 6, 7]
    np.testing.assert_array_equal(got[others], before[others])
    assert np.isnan(got[5]).all()
    # An outlier is exact, and the scale of the rest is that of the rest.
    expected = x[3].astype(np.float64) @ w.values().T
    error = np.abs(got[3] - expected)
    rest = np.abs(np.where(np.abs(x[3]) < 6, x[3], 0)).max()
    assert (error <= rest / 254 * np.abs(w.values()).sum(1)).all()


def test_equal_traits_are_one_format():
    table = testing.make_format(bits=4, group_size=16, table=E2M1_DOUBLED)
    assert testing.make_format(bits=4, group_size=16, table=list(E2M1_DOUBLED)) is table
    other = testing.make_format(bits=4, group_size=16, table=E2M1_DOUBLED[::-1])
    assert (other.name, other.description) != (table.name, table.description)
    assert testing.make_format(bits=4, group_size=128, scale_type="float16").name == "int4"
    made = testing.make_format(bits=4, group_size=128, scale_type="bfloat16", has_zero=True)
    assert made.name == "int4 g128, zero points, bfloat16 scales"


@pytest.mark.parametrize(
    ("traits", "trait"),
    [
        ({"bits": 7}, "bits"),
        ({"bits": 4, "group_size": 24}, "group_size"),
        ({"bits": 4, "group_size": 32, "has_min": True, "has_zero": True}, "zero points"),
        ({"bits": 5, "table": E2M1_DOUBLED}, "bits"),
        ({"bits": 8, "group_size": 32, "outlier_threshold": 6.0}, "outliers"),
    ],
)
def test_traits_that_no_kernel_takes_are_refused_by_name(traits, trait):
    with pytest.raises(NotSupported, match=f"their {trait}"):
        testing.make_format(**traits)
