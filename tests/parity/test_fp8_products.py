"""Weights and activations in E4M3 by cuBLASLt, where a checkpoint's scheme says so and many rows
run: what NumPy makes of the definition (Fp8X of csrc/kernels/cuda/linear/quantized.h)."""

import numpy as np
import op_formulas as formulas
import pytest
import quantized_files as files
from checkpoints import checkpoint
from conftest import make_cuda
from llmserve import _core_testing as testing
from model_runner import PagedRunner

REASON = testing.unavailable_reason("cuda")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(bool(REASON), reason=f"no CUDA here: {REASON}")]

MANY = 70  # rows: more than the kernel that reads the weight once for few of them takes
GROUPS = {"rows": 0, "blocks": 128}


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture(params=["scales", "no scales"])
def has_scales(request, monkeypatch):
    """Whether cuBLASLt has scales of rows and blocks; before 12.9, as the emulator can be, not."""
    if request.param == "no scales":
        monkeypatch.setenv("LLMSERVE_FAKE_CUBLASLT", "old")
        if "emulated" not in make_cuda("auto").description:
            pytest.skip("this cuBLASLt has them")
    return request.param == "scales"


class Weight:
    """[N, K] of all codes but NaN, with scales of rows or of 128 columns of one."""

    def __init__(self, rng, n, k, group):
        self.group_of = np.arange(k) // (group or k)
        self.q = rng.integers(-128, 128, (n, k)).astype(np.int8)
        self.q[(self.q & 127) == 127] ^= 8
        self.scales = rng.uniform(0.25, 1, (n, self.group_of[-1] + 1)).astype(np.float32)
        self.group = group

    def pack(self, backend, rounds=True):
        traits = {"is_fp8": True, "group_size": self.group, "rounds_to_fp8": rounds}
        return backend.pack_numbers(testing.make_format(**traits), self.q, self.scales)

    def values(self):
        codes = formulas.E4M3[self.q & 127] * np.where(self.q < 0, -1, 1)
        return codes * self.scales[:, self.group_of]

    def rounded(self, x):
        """x as E4M3 gives it back, each row and group by a scale of its own."""
        result = np.empty_like(x)
        for g in range(self.group_of[-1] + 1):
            v = x[:, self.group_of == g]
            most = np.abs(v).max(-1, keepdims=True)
            with np.errstate(divide="ignore"):
                inverse = np.where(most < 1e-30, np.float32(0), np.float32(448) / most)
            scaled = np.minimum(np.abs(v * inverse), np.float32(448))
            upper = np.clip(np.searchsorted(formulas.E4M3, scaled), 1, 126)
            below = scaled - formulas.E4M3[upper - 1]
            above = formulas.E4M3[upper] - scaled
            is_lower = (below < above) | ((below == above) & (upper % 2 == 1))
            codes = formulas.E4M3[np.where(is_lower, upper - 1, upper)]
            result[:, self.group_of == g] = np.copysign(codes, v) * (most / np.float32(448))
        return result


def assert_near(backend, got, x, values, *added):
    """Tensor cores keep some 14 bits of a sum of E4M3; the emulator's sums are of floats."""
    is_emulated = "emulated" in backend.description
    tolerance = formulas.sum_tolerance(x.shape[1]) if is_emulated else 2.0**-12
    terms = np.abs(x).astype(np.float64) @ np.abs(values).T + sum(map(np.abs, added))
    expected = x.astype(np.float64) @ values.T + sum(added)
    assert (np.abs(got - expected) <= tolerance * terms).all()


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize(("n", "k"), [(40, 256), (24, 200), (37, 96), (36, 384)])
def test_many_rows_are_rounded_as_numpy_rounds_them(has_scales, rng, group, n, k):
    backend = make_cuda("auto")
    weight = Weight(rng, n, k, group)
    x = normal(rng, MANY, k + 3)[:, :k] * np.exp2(rng.integers(-30, 30, (MANY, 1)))
    x = x.astype(np.float32)
    packed = weight.pack(backend)
    traits = testing.make_format(is_fp8=True, group_size=group)
    assert packed.num_bytes == backend.packed_bytes_format(n, k, traits)
    bias, old = normal(rng, n), normal(rng, MANY, n)
    # The library multiplies four columns of 16 bytes each, and scales of blocks are its own alone.
    is_blocked = 0 < group < k
    is_rounded = n % 8 == 0 and has_scales if is_blocked else n % 4 == 0
    seen = weight.rounded(x) if is_rounded else formulas.from_bf16(formulas.to_bf16(x))
    for options, added in (
        ({}, ()),
        ({"bias": bias}, (bias,)),
        ({"accumulate": True}, (old,)),
        ({"bias": bias, "accumulate": True}, (bias, old)),
    ):
        got = backend.linear(x, packed, out=old.copy(), **options)
        assert_near(backend, got, seen, weight.values(), *added)


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
def test_what_is_not_to_be_rounded_is_not(rng, group):
    """Few rows, schemes with weights alone, and modes whose bits do not depend on the rows."""
    weight = Weight(rng, 40, 256, group)
    x = normal(rng, MANY, 256)
    plain = formulas.from_bf16(formulas.to_bf16(x))
    auto = make_cuda("auto")
    as_it_is = auto.linear(x, weight.pack(auto, rounds=False))
    assert_near(auto, as_it_is, plain, weight.values())
    np.testing.assert_array_equal(auto.linear(x[:64], weight.pack(auto)), as_it_is[:64])
    for mode in ("invariant", "plain"):
        backend = make_cuda(mode)
        np.testing.assert_array_equal(backend.linear(x, weight.pack(backend)), as_it_is)


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
def test_odd_rows_leave_the_others_their_bits(rng, group):
    backend = make_cuda("auto")
    weight = Weight(rng, 40, 256, group).pack(backend)
    x = normal(rng, MANY, 256)
    before = backend.linear(x, weight)
    odd = {3: 0.0, 4: 1e-38, 5: 3e38, 6: np.nan, 7: np.inf}
    for row, value in odd.items():
        x[row] = 0
        x[row, 17] = value
    got = backend.linear(x, weight)
    others = [i for i in range(MANY) if i not in odd]
    np.testing.assert_array_equal(got[others], before[others])
    assert (got[3:5] == 0).all()
    assert not np.isnan(got[5]).any()
    assert np.isnan(got[6:8]).all()


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
def test_norms_and_gates_on_the_way_have_the_bits_of_the_ops(rng, group):
    backend = make_cuda("auto")
    up, down = (Weight(rng, n, k, group).pack(backend) for n, k in ((320, 136), (40, 160)))
    x, norm = normal(rng, MANY, 136), normal(rng, 136)
    gate_up = backend.linear(backend.rms_norm(x, norm, 1e-5, 1.0), up)
    gated = backend.gated_activation(gate_up, "silu")
    got = backend.fused_linear(x, up, None, norm, 1e-5, 1.0, "silu")
    np.testing.assert_array_equal(got, gated)
    old = normal(rng, MANY, 40)
    both = backend.fused_linear(x, up, None, norm, 1e-5, 1.0, "silu", old.copy(), True, down=down)
    np.testing.assert_array_equal(both, backend.linear(gated, down, None, old.copy(), True))


def modelopt(algorithm):
    config = {"quant_method": "modelopt", "quant_algo": algorithm}
    return files.fp8(per_row=True, scale="weight_scale", config=config)


def compressed_tensors(**activations):
    layout = files.float_quantized(strategy="channel")
    if activations:
        layout.config["config_groups"]["group_0"]["input_activations"] = activations
    return layout


@pytest.mark.parametrize(
    ("layout", "is_rounded"),
    [
        (files.fp8(per_row=True, scale="weight_scale"), True),
        (files.fp8((128, 128)), True),
        (modelopt("FP8_PER_CHANNEL_PER_TOKEN"), True),
        (modelopt("FP8_PB_WO"), False),
        (compressed_tensors(num_bits=8, type="float", strategy="token", dynamic=True), True),
        (compressed_tensors(), False),
    ],
    ids=["fp8", "fp8 in blocks", "modelopt", "modelopt W8A16", "CT W8A8", "CT W8A16"],
)
def test_a_prompt_is_rounded_as_its_checkpoint_says(tmp_path, monkeypatch, layout, is_rounded):
    """And is as near to the CPU's, which does not round it, as three bits of mantissa allow."""
    source = checkpoint("qwen3", hidden_size=64, intermediate_size=160, num_hidden_layers=1)
    quantized, _ = files.write_pair(source, tmp_path, layout)
    tokens = [int(t) for t in np.random.default_rng(0).integers(5, 90, MANY)]

    def logits(device):
        return PagedRunner(quantized, device=device, dtype="float32").run(tokens)

    rounded = logits("cuda")
    monkeypatch.setenv("LLMSERVE_CUDA_FP8", "plain")
    assert np.array_equal(logits("cuda"), rounded) == (not is_rounded)
    cpu = logits("cpu")
    assert np.abs(rounded - cpu).max() < 0.2 * np.abs(cpu).max()
