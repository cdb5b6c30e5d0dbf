"""Products by wgmma, on sm_90: beside the reference and the kernel that is taken elsewhere, and a
row's bits in any company."""

import numpy as np
import op_formulas as formulas
import pytest
from checkpoints import checkpoint
from llmserve import LLM, NotSupported, SamplingParams
from llmserve import _core_testing as testing

REASON = testing.unavailable_reason("cuda")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(bool(REASON), reason=f"no CUDA here: {REASON}")]

# The operands of both are rounded to bf16 alike; what differs is the order of float32 sums.
BF16_OPERAND_TOLERANCE = 2**-9


def make(gemm):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMSERVE_CUDA_GEMM", gemm)
        patch.setenv("LLMSERVE_CUDA_ATTENTION", "mma")
        return testing.make_backend("cuda", 2)


@pytest.fixture(scope="module")
def wgmma():
    try:
        return make("wgmma")
    except NotSupported as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def mma():
    return make("invariant")


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def weight_of(backend, rows):
    return backend.pack_linear([formulas.as_dtype(rows, "bfloat16")], "bfloat16")


# A split of K, two, three and four, with ends within a stage of 64; weights that end within a
# tile; rows for each form, and more than one tile of them.
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        *((1, 64, 64), (9, 200, 1112), (20, 24, 8), (33, 136, 1544), (70, 40, 2056)),
        *((130, 130, 520), (8, 1, 2496), (64, 264, 72)),
    ],
)
def test_products_match_the_reference_and_the_other_kernel(wgmma, mma, ref, rng, m, n, k):
    x, rows = normal(rng, m, k + 5)[:, :k], normal(rng, n, k)
    bias, old = normal(rng, n), normal(rng, m, n)
    magnitude = np.abs(x) @ np.abs(rows).T + 8
    for options in ({}, {"bias": bias}, {"bias": bias, "accumulate": True}):
        got, other, expected = (
            backend.linear(x, weight_of(backend, rows), out=old.copy(), **options)
            for backend in (wgmma, mma, ref)
        )
        error = formulas.sum_tolerance(k + 2)
        assert (np.abs(got - expected) <= (error + BF16_OPERAND_TOLERANCE) * magnitude).all()
        assert (np.abs(got - other) <= error * magnitude).all()
    if k >= 1024:
        assert not np.array_equal(got, other)  # it was another kernel


@pytest.mark.parametrize(("n", "k"), [(80, 1544), (136, 136)])
def test_a_row_has_the_same_bits_among_any_number_of_rows_and_in_any_place(wgmma, rng, n, k):
    x, bias, old = normal(rng, 257, k), normal(rng, n), normal(rng, 257, n)
    weight = weight_of(wgmma, normal(rng, n, k))
    whole = wgmma.linear(x, weight, bias, old.copy(), True)
    for m in (*range(1, 10), 16, 17, 64, 65):
        for begin in (0, 100 - m):
            rows = slice(begin, begin + m)
            part = wgmma.linear(x[rows], weight, bias, old[rows].copy(), True)
            np.testing.assert_array_equal(part, whole[rows])


def test_a_part_of_a_weights_rows_has_the_bits_that_it_has_within_the_whole(wgmma, rng):
    """As ranks that cut a layer by its outputs have it."""
    x, rows = normal(rng, 20, 2056), normal(rng, 200, 2056)
    whole = wgmma.linear(x, weight_of(wgmma, rows))
    for begin, end in ((0, 100), (100, 200), (7, 8)):
        part = wgmma.linear(x, weight_of(wgmma, rows[begin:end]))
        np.testing.assert_array_equal(part, whole[:, begin:end])


@pytest.mark.parametrize(("n", "k"), [(160, 1112), (32, 64), (88, 72)])
def test_a_gate_at_the_end_has_the_bits_of_its_ops(wgmma, rng, n, k):
    """Where half the outputs are no multiple of eight, the gate is an op of its own."""
    weight, bias = weight_of(wgmma, normal(rng, n, k)), normal(rng, n)
    norm = normal(rng, k)
    for m in (1, 12, 40, 70):
        x = normal(rng, m, k)
        for activation in ("silu", "gelu_tanh"):
            got = wgmma.fused_linear(x, weight, bias, norm, 1e-5, 1.0, activation)
            product = wgmma.linear(wgmma.rms_norm(x, norm, 1e-5, 1.0), weight, bias)
            np.testing.assert_array_equal(got, wgmma.gated_activation(product, activation))


def test_a_gated_layer_has_the_bits_of_its_ops(wgmma, rng):
    """What the gate writes is bf16 already."""
    k, width = 72, 96
    up, down = weight_of(wgmma, normal(rng, 2 * width, k)), weight_of(wgmma, normal(rng, k, width))
    norm = normal(rng, k)
    for m in (1, 40):
        x, old = normal(rng, m, k), normal(rng, m, k)
        for weight in (norm, None):
            options = {"activation": "silu", "accumulate": True, "down": down}
            got = wgmma.fused_linear(x, up, None, weight, 1e-5, 1.0, out=old.copy(), **options)
            read = x if weight is None else wgmma.rms_norm(x, weight, 1e-5, 1.0)
            gated = wgmma.gated_activation(wgmma.linear(read, up), "silu")
            expected = wgmma.linear(gated, down, None, old.copy(), True)
            np.testing.assert_array_equal(got, expected)


def test_rows_of_nan_reach_their_own_outputs_alone(wgmma, rng):
    x, weight = normal(rng, 40, 200), weight_of(wgmma, normal(rng, 72, 200))
    clean = wgmma.linear(x, weight)
    x[7] = np.nan
    x[33, 5] = np.inf
    got = wgmma.linear(x, weight)
    others = np.delete(np.arange(40), [7, 33])
    np.testing.assert_array_equal(got[others], clean[others])
    assert not np.isfinite(got[[7, 33]]).any()


def test_a_gpu_whose_wgmma_is_wrong_or_a_driver_without_maps_leaves_products_to_the_library(
    mma, rng, monkeypatch
):
    if "emulated" not in mma.description:
        pytest.skip("a GPU's products are as they are")
    x, rows = normal(rng, 9, 1112), normal(rng, 24, 1112)
    library = make("auto")
    expected = library.linear(x, weight_of(library, rows))
    for variable, value, problem in (
        ("LLMSERVE_EMULATOR_WGMMA", "wrong", "wgmma differs from mma by"),
        ("LLMSERVE_EMULATOR_WGMMA", "uneven", "has other bits than of 128"),
        ("LLMSERVE_EMULATOR_DRIVER", "old", "the driver has no cuTensorMapEncodeTiled"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            backend = make("fastest")
            np.testing.assert_array_equal(backend.linear(x, weight_of(backend, rows)), expected)
            assert ", products without wgmma: " in backend.description
            assert problem in backend.description
            with pytest.raises(NotSupported, match=f"LLMSERVE_CUDA_GEMM=wgmma: .*{problem}"):
                make("wgmma")


def test_an_engine_has_the_same_tokens_alone_and_in_company(wgmma, monkeypatch):
    monkeypatch.setenv("LLMSERVE_CUDA_GEMM", "wgmma")
    prompts = [list(range(5, 5 + n)) for n in (1, 9, 70)]
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=4, logprobs=1)
    with LLM(checkpoint("qwen3"), device="cuda", dtype="bfloat16", max_model_len=96) as llm:
        assert "wgmma of one order" in llm.description
        together = llm.generate(prompts, params)
        for prompt, output in zip(prompts, together, strict=True):
            (alone,) = llm.generate([prompt], params)
            assert alone.outputs[0].token_ids == output.outputs[0].token_ids
            assert alone.outputs[0].cumulative_logprob == output.outputs[0].cumulative_logprob
