"""Kernels that go over rows in fours of neighbours: rows of any width that lie anywhere.

A row of whole fours that is aligned to 16 bytes is read as such and has the same bits as when it
lies otherwise.
"""

import sys
from functools import partial

import numpy as np
import pytest
import torch
from device_arrays import FakeTensor, fake_torch
from llmserve import _core_testing, ops

from tests.parity import op_formulas as formulas

REASON = _core_testing.unavailable_reason("cuda")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(bool(REASON), reason=f"no CUDA here: {REASON}")]

# One thread, a part of a warp, a warp and its end; what a thread holds 1, 2, 4 and 8 fours of, and
# no longer holds.
WIDTHS = [1, 3, 4, 30, 64, 128, 132, 1000, 1024, 1028, 2048, 2050, 3076, 4100, 8192, 8196]


@pytest.fixture(scope="module")
def backend():
    return _core_testing.make_backend("cuda")


@pytest.fixture
def normal():
    rng = np.random.default_rng(0)
    return lambda *shape: rng.standard_normal(shape, dtype=np.float32)


def apart(x, gap):
    """The same rows, `gap` floats further apart."""
    wider = np.zeros((len(x), x.shape[1] + gap), np.float32)
    wider[:, : x.shape[1]] = x
    return wider[:, : x.shape[1]]


def row_gap(x):
    return x.strides[0] // 4 - x.shape[1]


def laid_out(run, *arrays):
    """What `run` gives for arrays whose rows lie side by side, after it has given the same bits for
    rows that are aligned, and for rows that are not."""
    expected = run(*arrays)
    for gap in (4, 3):
        got = run(*(apart(x, gap) if x.ndim == 2 else x for x in arrays))
        np.testing.assert_array_equal(got, expected)
    return expected


def assert_close(got, expected, width):
    tolerance = formulas.sum_tolerance(width)
    np.testing.assert_allclose(got, expected, atol=4 * tolerance, rtol=tolerance)


@pytest.mark.parametrize("width", WIDTHS)
def test_norms_of_rows_of_any_width(backend, normal, width):
    x, weight, bias, residual = normal(3, width), normal(width), normal(width), normal(3, width)

    def rms_norm(x):
        return backend.rms_norm(x, weight, 1e-6, 1.0, 0.3)

    def layer_norm(x):
        return backend.layer_norm(x, weight, bias, 1e-5, 1.0, 0.3)

    def add_rms_norm(x, residual):
        total = apart(residual, row_gap(residual))
        return np.stack([backend.add_rms_norm(total, x, weight, 1e-6, 1.0, 0.3), total])

    assert_close(laid_out(rms_norm, x), formulas.rms_norm(x, weight, 1e-6, 1.0, 0.3), width)
    if width > 3:  # a mean of few is near any of them: small differences, which are scaled up
        assert_close(
            laid_out(layer_norm, x), formulas.layer_norm(x, weight, bias, 1e-5, 1.0, 0.3), width
        )
    normed, total = laid_out(add_rms_norm, x, residual)
    np.testing.assert_array_equal(total, x + residual)
    np.testing.assert_array_equal(normed, rms_norm(total))


def activation(backend, name, x):
    return backend.activation(x, name)


def gated_activation(backend, name, x):
    return backend.gated_activation(x, name)


@pytest.mark.parametrize("width", WIDTHS)
def test_elementwise_ops_of_rows_of_any_width(backend, normal, width):
    x, gate_up = normal(2, width), normal(2, 2 * width)
    for name in formulas.all_activations():
        gated = laid_out(partial(gated_activation, backend, name), gate_up)
        assert_close(gated, formulas.gated_activation(gate_up, name), 1)
    for name in formulas.activations_of_one():
        alone = laid_out(partial(activation, backend, name), x)
        beside_two = np.concatenate([x, np.full_like(x, 2)], axis=1)
        np.testing.assert_array_equal(gated_activation(backend, name, beside_two), alone * 2)
    total = x.copy()
    backend.add(total, gate_up[:, :width], 0.5)
    np.testing.assert_array_equal(total, x + gate_up[:, :width] * np.float32(0.5))
    rows = np.array([1, 1, 0], np.int32)
    np.testing.assert_array_equal(laid_out(lambda x: backend.gather_rows(x, rows), x), x[rows])
    table = formulas.to_bf16(x)
    np.testing.assert_array_equal(
        backend.embedding(table, rows, 2.0), formulas.from_bf16(table[rows]) * 2
    )
    capped = x.copy()
    backend.cap_logits(capped, 0.5, 3.0)
    assert_close(capped, 3.0 * np.tanh(x.astype(np.float64) * 0.5 / 3.0), 1)


def slice_of(is_emulated, memory, begin, end):
    """Columns of an array on the device."""
    if is_emulated:
        return FakeTensor(memory[..., begin:end])
    return torch.from_numpy(memory).cuda()[..., begin:end]


@pytest.mark.parametrize("begin", [0, 1, 2, 3])
def test_rows_that_begin_at_any_float(monkeypatch, normal, begin):
    is_emulated = "emulated" in _core_testing.make_backend("cuda").description
    if is_emulated:
        monkeypatch.setitem(sys.modules, "torch", fake_torch(0))
    elif not torch.cuda.is_available():
        pytest.skip("torch has no CUDA here")
    arrays = normal(3, 132), normal(3, 264), normal(132)
    on = []
    for part in arrays:
        end = begin + part.shape[-1]
        memory = np.zeros((*part.shape[:-1], part.shape[-1] + 4), np.float32)
        memory[..., begin:end] = part
        on.append(slice_of(is_emulated, memory, begin, end))
    got = ops.rms_norm(on[0], on[2]), ops.silu_and_mul(on[1])
    expected = (
        formulas.rms_norm(arrays[0], arrays[2]),
        formulas.gated_activation(arrays[1], "silu"),
    )
    for a, b in zip(got, expected, strict=True):
        assert_close((a if is_emulated else a.cpu()).numpy(), b, 132)


HEADS = [
    (14, 2, 64, 64),  # half a warp a head
    (3, 1, 48, 16),
    (9, 5, 128, 128),  # a warp a head
    (33, 4, 96, 96),
    (5, 1, 128, 40),
    (3, 3, 256, 256),  # a lane has both elements of a pair
    (2, 1, 256, 128),
    (2, 1, 160, 72),
    (2, 1, 192, 192),  # not held in registers
    (4, 2, 64, 20),
]


def check_prepared(backend, qkv, shape, dtype, slots, norms, angles, interleaved):
    heads, kv_heads, dim = shape
    empty = np.full((max(slots) // 16 + 1, kv_heads, 16, dim), 7, np.float32)
    rows = apart(qkv, row_gap(qkv))
    got, expected = ([formulas.as_dtype(empty, dtype) for _ in range(2)] for _ in range(2))
    backend.prepare_qkv(rows, heads, *got, slots, norms, angles, 1e-5, 1.0, interleaved)
    q = formulas.prepare_one_by_one(
        backend, qkv, heads, expected, slots, norms, angles, interleaved
    )
    np.testing.assert_array_equal(rows[:, : heads * dim].reshape(q.shape), q)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("case", HEADS)
def test_prepared_heads_have_the_bits_of_the_ops(backend, normal, dtype, interleaved, case):
    heads, kv_heads, dim, rotated = case
    slots = np.array([17, -1, 2])
    table, other = normal(2, 3, rotated)
    pair = normal(dim), normal(dim)
    for gap in (0, 4, 3):  # the last is not aligned
        qkv = apart(normal(3, (heads + 2 * kv_heads) * dim) * 2, gap)
        for norms, angles in ((pair, (table, other)), (None, (table, table)), (pair, None)):
            shape = heads, kv_heads, dim
            check_prepared(backend, qkv, shape, dtype, slots, norms, angles, interleaved)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize(
    "case", [(14, 2, 64, 64), (9, 5, 128, 128), (7, 6, 128, 64), (9, 5, 256, 256)]
)
def test_heads_of_many_tokens_are_prepared_alike(backend, normal, dtype, case):
    heads, kv_heads, dim, rotated = case
    num_tokens = 16 * 132 // (heads + 2 * kv_heads) + 1  # a warp has several heads of a token
    slots = np.random.default_rng(0).permutation(num_tokens)
    slots[3] = -1
    angles = (normal(num_tokens, rotated),) * 2
    qkv = normal(num_tokens, (heads + 2 * kv_heads) * dim)
    norms = normal(dim), normal(dim)
    check_prepared(backend, qkv, (heads, kv_heads, dim), dtype, slots, norms, angles, False)


def test_angles_grow_only_where_they_are_to(backend):
    positions, inv_freq = np.array([0, 9000, 123456]), np.array([1.0, 0.25], np.float32)
    plain = backend.rotary_table(positions, inv_freq)
    angle = positions[:, None].astype(np.float32) * inv_freq
    expected = np.concatenate([np.cos(angle, dtype="f8"), np.sin(angle, dtype="f8")], axis=1)
    np.testing.assert_allclose(plain, expected, atol=2**-23)
