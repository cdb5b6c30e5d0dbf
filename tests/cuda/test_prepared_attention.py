"""Attention that prepares a decoding step's queries, keys and values by itself: with the bits, and
the cache, of a kernel in front."""

import numpy as np
import pytest
from llmserve import InvalidArgument, _core_testing
from parity import op_formulas as formulas

REASON = _core_testing.unavailable_reason("cuda")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(bool(REASON), reason=f"no CUDA here: {REASON}")]

FEW = [(n, 1) for n in (1, 64, 65, 256, 257, 900)]  # a warp for each unit
MANY = [*FEW, (1100, 1), (513, 1), *([(3, 1)] * 40)]  # a warp for each span


def step(monkeypatch, case, shape, dtype, choices, **options):
    """What the step gives, its cache, and whether its queries were left as they are."""
    for name, value in choices.items():
        monkeypatch.setenv(name, value)
    backend = _core_testing.make_backend("cuda")
    rng = np.random.default_rng(1)
    heads, _, dim = shape
    weight = backend.pack_linear(
        [rng.standard_normal((8, heads * dim), dtype=np.float32)], "float32"
    )
    norms = [rng.standard_normal(dim, dtype=np.float32) for _ in range(2)]
    qkv, cache, slots, at = formulas.prepared_case(rng, case, shape, dtype)
    slots[2] = -1
    angles = rng.standard_normal((len(slots), dim), dtype=np.float32)
    rows, keys, values = np.array(qkv), cache.keys.copy(), cache.values.copy()
    out = backend.prepared_attention(
        *(rows, heads, keys, values, slots, *at, weight, norms, (angles, angles)),
        sinks=rng.standard_normal(heads, dtype=np.float32),
        **options,
    )
    return out, keys, values, np.array_equal(rows, qkv)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize("merge", ["last", "kernel"])
@pytest.mark.parametrize(
    ("case", "shape", "options"),
    [
        (FEW, (4, 2, 128), {}),
        (FEW, (16, 1, 64), {"window": 300}),
        (MANY, (4, 2, 64), {}),
        (MANY, (6, 2, 128), {"window": 70, "soft_cap": 3.0}),
    ],
)
def test_attention_prepares_with_the_bits_of_a_kernel_in_front(
    monkeypatch, case, shape, options, dtype, merge
):
    by_kernel = step(
        monkeypatch, case, shape, dtype, {"LLMSERVE_CUDA_PREPARE": "kernel"}, **options
    )
    by_attention = step(
        *(monkeypatch, case, shape, dtype),
        {"LLMSERVE_CUDA_PREPARE": "attention", "LLMSERVE_CUDA_MERGE": merge},
        **options,
    )
    assert np.isfinite(by_kernel[0]).all()
    for got, expected in zip(by_attention[:3], by_kernel[:3], strict=True):
        np.testing.assert_array_equal(got, expected)
    if dtype == "fp8":
        of_codes = step(
            *(monkeypatch, case, shape, dtype),
            {"LLMSERVE_CUDA_DECODE_F8": "registers"},
            **options,
        )
        for got, expected in zip(of_codes[:3], by_kernel[:3], strict=True):
            np.testing.assert_array_equal(got, expected)
    assert by_attention[3]  # what was compared is two kernels
    assert not by_kernel[3]


def test_steps_of_up_to_eight_tokens_alone_are_prepared_by_attention(monkeypatch):
    for case, is_by_attention in (([(9, 1)] * 8, True), ([(9, 1)] * 9, False)):
        assert step(monkeypatch, case, (2, 1, 64), "bfloat16", {})[3] == is_by_attention
    assert not step(monkeypatch, [(9, 1), (9, 2)], (2, 1, 64), "bfloat16", {})[3]
    assert not step(monkeypatch, [(9, 1)] * 3, (2, 1, 80), "bfloat16", {})[3]


def test_another_choice_is_refused(monkeypatch):
    monkeypatch.setenv("LLMSERVE_CUDA_PREPARE", "3")
    with pytest.raises(InvalidArgument, match="expected auto, attention or kernel, got 3"):
        _core_testing.make_backend("cuda")
