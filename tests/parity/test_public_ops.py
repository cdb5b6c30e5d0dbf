"""llmserve.ops against torch, on torch tensors and NumPy arrays, in place and refused."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import numpy as np
import pytest
from llmserve import Array, BlockAllocator, InvalidArgument, NotSupported, _core, _core_testing, ops
from op_formulas import ROUNDED_ATTENTION_TOLERANCE

torch = pytest.importorskip("torch")

# Sums of n <= 512 terms in float32 on both sides, in different orders: sqrt(n) * 2^-24 of the
# terms' magnitude (about 1), and a factor of 8 for both sides and the tail.
TOLERANCE = 8 * 512**0.5 * 2**-24
BACKENDS = ["cpu", "ref"]
# Where the instruction set picked has them, attention over bf16 rounds queries and probabilities.
DESCRIPTION = _core_testing.make_backend("cpu").description
HAS_BF16_PRODUCTS = "avx512_bf16" in DESCRIPTION or "amx" in DESCRIPTION


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def normal() -> Any:
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator)


def assert_close(got: Any, expected: Any) -> None:
    assert isinstance(got, torch.Tensor)
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_norms_agree_with_torch(backend: str, normal: Any) -> None:
    x, residual, weight = normal(7, 96), normal(7, 96), normal(96)
    expected = torch.nn.functional.rms_norm(x, (96,), weight, 1e-5)
    assert_close(ops.rms_norm(x, weight, eps=1e-5, backend=backend), expected)
    shifted = ops.rms_norm(x, weight - 1, eps=1e-5, weight_offset=1.0, backend=backend)
    assert_close(shifted, expected)
    total = x + residual
    normed = ops.add_rms_norm(x, residual, weight, eps=1e-5, backend=backend)
    assert_close(residual, total)
    assert_close(normed, torch.nn.functional.rms_norm(total, (96,), weight, 1e-5))


def test_layer_norm_agrees_with_torch(backend: str, normal: Any) -> None:
    x, weight, bias = normal(7, 96), normal(96), normal(96)
    for offset in (bias, None):
        expected = torch.nn.functional.layer_norm(x, (96,), weight, offset, 1e-3)
        assert_close(ops.layer_norm(x, weight, offset, eps=1e-3, backend=backend), expected)
    assert ops.layer_norm(x, weight, bias, out=x, backend=backend) is x


def test_gated_activations_agree_with_torch(backend: str, normal: Any) -> None:
    gate_up = normal(5, 66)
    gate, up = gate_up.chunk(2, dim=-1)
    silu = torch.nn.functional.silu(gate) * up
    assert_close(ops.silu_and_mul(gate_up, backend=backend), silu)
    gelu = torch.nn.functional.gelu(gate, approximate="tanh") * up
    assert_close(ops.gelu_tanh_and_mul(gate_up, backend=backend), gelu)
    exact = torch.nn.functional.gelu(gate) * up
    assert_close(ops.gelu_and_mul(gate_up, backend=backend), exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_linear_agrees_with_torch(backend: str, normal: Any, dtype: Any) -> None:
    x, weight, bias, out = (
        normal(9, 128).bfloat16().float(),  # which some instruction sets would round it to
        (normal(40, 128) / 11).to(dtype),
        normal(40),
        normal(9, 40),
    )
    packed = ops.pack_linear(weight, backend=backend)
    assert packed.dtype == ("bfloat16" if dtype == torch.bfloat16 else "float32")
    expected = torch.nn.functional.linear(x, weight.float(), bias)
    assert_close(ops.linear(x, packed, bias, backend=backend), expected)
    stacked = ops.pack_linear([weight[:30], weight[30:]], backend=backend)
    total = out + torch.nn.functional.linear(x, weight.float())
    assert ops.linear(x, stacked, out=out, accumulate=True, backend=backend) is out
    assert_close(out, total)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding_agrees_with_torch(backend: str, normal: Any, interleaved: bool) -> None:
    heads, positions = normal(6, 3, 32), torch.tensor([0, 1, 5, 700, 2, 3])
    angles = positions[:, None].float() * (1e4 ** (-torch.arange(0, 32, 2).float() / 32))[None]
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    pairs = heads.reshape(6, 3, 16, 2) if interleaved else torch.stack(heads.chunk(2, -1), -1)
    rotated = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    expected = rotated.flatten(-2) if interleaved else torch.cat(rotated.unbind(-1), -1)
    before = heads.clone()
    got = ops.rotary_embedding(heads, positions, interleaved=interleaved, backend=backend)
    # the angle is rounded to float32: 700 * 2^-24
    torch.testing.assert_close(got, expected, atol=700 * 2**-23, rtol=0)
    torch.testing.assert_close(heads, before, atol=0, rtol=0)
    ops.rotary_embedding(
        heads, positions, interleaved=interleaved, out=heads, backend=backend, num_threads=1
    )
    torch.testing.assert_close(heads, got, atol=0, rtol=0)


def test_a_part_of_each_head_is_rotated_by_given_frequencies(normal: Any) -> None:
    heads = normal(2, 2, 8)
    got = ops.rotary_embedding(heads, [3, 4], inv_freq=torch.tensor([1.0, 0.5]))
    torch.testing.assert_close(got[..., 4:], heads[..., 4:], atol=0, rtol=0)
    alone = ops.rotary_embedding(
        heads[..., :4].contiguous(), [3, 4], inv_freq=torch.tensor([1, 0.5])
    )
    torch.testing.assert_close(got[..., :4], alone, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_embedding_and_gather_agree_with_torch(backend: str, normal: Any, dtype: Any) -> None:
    table, ids = normal(20, 33).to(dtype), torch.tensor([3, 0, 19, 3], dtype=torch.int32)
    got = ops.embedding(ids, table, scale=2.0, backend=backend)
    assert_close(got, table[ids].float() * 2)
    assert_close(ops.gather(got, [2, 2, 0], backend=backend), got[[2, 2, 0]])


class Paged:
    """Sequences of keys and values in a paged cache, by BlockAllocator and store_kv."""

    def __init__(self, normal: Any, lengths: list[int], dtype: Any, backend: str) -> None:
        self.pool = BlockAllocator(num_blocks=32, block_size=16)
        self.keys = torch.full((32, 2, 16, 64), float("nan"), dtype=dtype)
        self.values = torch.full((32, 2, 16, 48), float("nan"), dtype=dtype)
        self.sequences = []
        for request_id, length in enumerate(lengths):
            table = self.pool.allocate(request_id, length)
            slots = [table[p // 16] * 16 + p % 16 for p in range(length)]
            pair = normal(length, 2, 64), normal(length, 2, 48)
            ops.store_kv(*pair, self.keys, self.values, slots, backend=backend)
            self.sequences.append([part.to(dtype).float() for part in pair])
        self.tables = [self.pool.get_block_table(i) for i in range(len(lengths))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_paged_attention_agrees_with_torch(backend: str, normal: Any, dtype: Any) -> None:
    lengths, counts = [1, 40, 100], [1, 40, 3]
    paged = Paged(normal, lengths, dtype, backend)
    q = normal(sum(counts), 6, 64)
    starts = np.cumsum([0, *counts])
    got = ops.paged_attention(
        q, paged.keys, paged.values, paged.tables, lengths, starts, backend=backend
    )
    for b, (keys, values) in enumerate(paged.sequences):
        queries = q[starts[b] : starts[b + 1]]
        mask = torch.ones(lengths[b], lengths[b], dtype=torch.bool).tril()[-counts[b] :]
        expected = torch.nn.functional.scaled_dot_product_attention(
            queries.transpose(0, 1),
            keys.transpose(0, 1),
            values.transpose(0, 1),
            attn_mask=mask,
            enable_gqa=True,
        ).transpose(0, 1)
        rounded = dtype == torch.bfloat16 and HAS_BF16_PRODUCTS and backend == "cpu"
        tolerance = ROUNDED_ATTENTION_TOLERANCE if rounded else TOLERANCE
        got_b = got[starts[b] : starts[b + 1]]
        torch.testing.assert_close(got_b, expected, atol=tolerance, rtol=TOLERANCE)
    last = torch.stack([q[starts[b + 1] - 1] for b in range(3)])
    decode = ops.paged_attention(
        last, paged.keys, paged.values, paged.tables, np.array(lengths), backend=backend
    )
    torch.testing.assert_close(decode, got[starts[1:] - 1], atol=0, rtol=0)


def test_a_copied_block_serves_a_fork(backend: str, normal: Any) -> None:
    paged = Paged(normal, [20], torch.float32, backend)
    paged.pool.fork(0, "fork")
    table = paged.pool.allocate("fork", 1)
    ops.copy_blocks(paged.pool.take_copies(), paged.keys, paged.values, backend=backend)
    assert table != paged.tables[0]
    q = normal(1, 2, 64)
    outs = [
        ops.paged_attention(q, paged.keys, paged.values, [blocks], [20], backend=backend)
        for blocks in (table, paged.tables[0])
    ]
    torch.testing.assert_close(*outs, atol=0, rtol=0)


def test_sampling_takes_one_setting_or_one_a_row(backend: str, normal: Any) -> None:
    logits = normal(6, 50)
    greedy = ops.sample(logits, temperature=0.0, backend=backend)
    assert greedy.dtype == torch.int64
    assert greedy.tolist() == logits.argmax(-1).tolist()
    seeds = torch.arange(6)
    drawn = ops.sample(logits, seed=seeds, position=7, top_k=5, backend=backend)
    best = logits.topk(5).indices
    assert all(token in best[row] for row, token in enumerate(drawn.tolist()))
    alone = ops.sample(logits[2:3], seed=2, position=[7], top_k=[5], backend=backend)
    assert alone.item() == drawn[2].item()
    uniform = np.zeros((4000, 4), "f4")
    drawn = ops.sample(uniform, position=np.arange(4000), backend=backend)
    # 4,000 draws of four: a standard deviation of 27 around 1,000
    assert (abs(np.bincount(drawn, minlength=4) - 1000) < 6 * 27).all()


def test_results_come_back_as_what_went_in(normal: Any) -> None:
    x, weight = normal(3, 8), normal(8)
    assert isinstance(ops.rms_norm(x, weight), torch.Tensor)
    as_numpy = ops.rms_norm(x.numpy(), weight.numpy())
    assert isinstance(as_numpy, np.ndarray)
    mixed = ops.rms_norm(Array(x), weight)
    assert isinstance(mixed, Array)
    np.testing.assert_array_equal(as_numpy, mixed)
    np.testing.assert_array_equal(as_numpy, ops.rms_norm(x, weight))


def test_rows_may_be_strided_and_out_may_be_anything_writable(backend: str, normal: Any) -> None:
    wide, weight = normal(6, 40), normal(16)
    x, out = wide[::2, 8:24], torch.zeros(3, 50)
    expected = ops.rms_norm(x.contiguous(), weight, backend=backend)
    got = ops.rms_norm(x, weight, out=out[:, 10:26], backend=backend)
    torch.testing.assert_close(got, expected, atol=0, rtol=0)
    assert out[:, :10].abs().max() == 0
    array = Array(np.zeros((3, 16), "f4"))
    assert ops.rms_norm(x, weight, out=array, backend=backend) is array
    np.testing.assert_array_equal(array, expected)
    assert ops.rms_norm(x, weight, out=x, backend=backend) is x
    torch.testing.assert_close(wide[::2, 8:24], expected, atol=0, rtol=0)


def test_threads_change_no_bit(normal: Any) -> None:
    x, weight = normal(64, 300), normal(200, 300)
    packed = ops.pack_linear(weight)
    one, two = (ops.linear(x, packed, num_threads=n) for n in (1, 2))
    torch.testing.assert_close(one, two, atol=0, rtol=0)


def test_calls_from_several_threads_wait_for_each_other(normal: Any) -> None:
    x, weight = normal(40, 256), ops.pack_linear(normal(256, 256))
    expected, wrong = ops.linear(x, weight), []

    def work() -> None:
        for _ in range(20):
            wrong.extend([0] * (not torch.equal(ops.linear(x, weight), expected)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_other_threads_of_python_run_while_a_kernel_does(normal: Any) -> None:
    x, weight = normal(256, 1024), ops.pack_linear(normal(1024, 1024), backend="ref")
    thread = threading.Thread(target=lambda: ops.linear(x, weight, backend="ref"))
    thread.start()
    num_naps = 0
    while thread.is_alive():  # some tenths of a second
        time.sleep(1e-3)
        num_naps += 1
    assert num_naps > 4  # with the GIL held: one or two


def test_a_forked_child_has_kernels_of_its_own() -> None:
    x, weight = np.ones((64, 512), "f4"), np.ones(512, "f4")
    expected = ops.rms_norm(x, weight, num_threads=2)
    child = os.fork()
    if child == 0:
        os._exit(not np.array_equal(ops.rms_norm(x, weight, num_threads=2), expected))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


X = np.zeros((2, 8), "f4")
WEIGHT = np.zeros(8, "f4")
CACHE = np.zeros((4, 2, 4, 8), "f4")
Q = np.zeros((1, 2, 8), "f4")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.rms_norm(X, WEIGHT[:7]), r"rms_norm\.weight: expected float32 \[D=8\].*\[7\]"),
        (lambda: ops.rms_norm(X[0], WEIGHT), r"rms_norm\.x: expected float32 \[R, D\]"),
        (lambda: ops.rms_norm(X.astype("f8"), WEIGHT), r"expected float32 .* got float64 \[2, 8\]"),
        (lambda: ops.rms_norm(X.T, X[:, 0]), r"contiguous last dimension"),
        (lambda: ops.rms_norm([[1.0]], WEIGHT), r"rms_norm\.x: expected a NumPy array, a torch"),
        (lambda: ops.rms_norm(X, WEIGHT, out=X[:1]), r"overlaps one"),
        (lambda: ops.rms_norm(X, WEIGHT, out=X[::-1]), r"overlaps one"),
        (lambda: ops.rms_norm(X, WEIGHT, out=np.broadcast_to(X, (2, 8))), r"read-only"),
        (lambda: ops.layer_norm(X, WEIGHT, WEIGHT[:7]), r"layer_norm\.bias: expected float32"),
        (lambda: ops.silu_and_mul(X, out=X[:, :4]), r"expected memory apart from the inputs"),
        (lambda: ops.silu_and_mul(X[:, :7]), r"gated_activation\.gate_up: expected .*2F=6"),
        (
            lambda: ops.linear(X, X),
            r"expected what ops\.pack_linear.* got ndarray",
        ),
        (lambda: ops.linear(X, ops.pack_linear(X), accumulate=True), r"expected out, the array"),
        (lambda: ops.linear(X, ops.pack_linear(X), backend="ref"), r"packed for backend 'ref'"),
        (lambda: ops.pack_linear([]), r"expected at least one matrix"),
        (lambda: ops.pack_linear(X, "int8"), r"dtype: expected float32 or bfloat16, got 'int8'"),
        (lambda: ops.embedding([0, 2], X), r"embedding\.token_ids: .*\[0, 2\), got 2 at 1"),
        (lambda: ops.embedding([0.5], X), r"token_ids: expected an integer in range, got 0\.5"),
        (lambda: ops.embedding(X[0], X), r"token_ids: expected int32 or int64 of 1 dimension"),
        (lambda: ops.embedding([2**40], X), r"expected 32-bit integers, got 1099511627776"),
        (lambda: ops.gather(X, [-1]), r"gather_rows\.rows: expected indices in \[0, 2\), got -1"),
        (lambda: ops.rotary_embedding(Q, [1, 2]), r"positions: expected T=1 entries, got 2"),
        (lambda: ops.store_kv(Q, Q, CACHE, CACHE.copy(), [16]), r"slots: .*\[-1, 16\), got 16"),
        (lambda: ops.store_kv(Q, Q, CACHE, CACHE, [1]), r"expected memory apart"),
        (
            lambda: ops.store_kv(
                X.reshape(2, 1, 8)[:, [0, 0]],
                X.reshape(2, 1, 8)[:, [0, 0]],
                CACHE,
                CACHE.copy(),
                [3, 3],
            ),
            r"expected different slots, got 3 twice",
        ),
        (lambda: ops.copy_blocks([(0, 4)], CACHE, CACHE.copy()), r"pairs: .*\[0, 4\), got 4"),
        (lambda: ops.paged_attention(Q, CACHE, CACHE, [[4]], [1]), r"blocks in \[0, N=4\), got 4"),
        (lambda: ops.paged_attention(Q, CACHE, CACHE, [[0]], [5]), r"at most M\*P=4, got 5"),
        (lambda: ops.paged_attention(Q, CACHE, CACHE, [[0]], [1], []), r"expected B \+ 1 entries"),
        (lambda: ops.paged_attention(Q, CACHE, CACHE, [[0]], [1], [0, 2]), r"from 0 to T=1"),
        (
            lambda: ops.paged_attention(Q[:, :0], CACHE, CACHE, [[0]], [1]),
            r"a multiple of .* got 0",
        ),
        (lambda: ops.paged_attention(Q, CACHE, CACHE, [[0]], [1], window=-1), r"window: expected"),
        (lambda: ops.paged_attention(Q, CACHE[:, ::2], CACHE, [[0]], [1]), r"must be contiguous"),
        (lambda: ops.sample(X, top_p=0.0), r"top_p: expected a number in \(0, 1\], got 0"),
        (lambda: ops.sample(X, seed=[1, 2, 3]), r"one for each of the S=2 rows, got 3"),
        (lambda: ops.sample(X, seed=-1), r"sample\.seed: expected an integer in range, got -1"),
        (lambda: ops.sample(X * np.nan), r"sample\.logits: .* in row 0"),
        (lambda: ops.rms_norm(X, WEIGHT, num_threads=0), r"num_threads must be between 1 and"),
    ],
)
def test_what_does_not_fit_is_named_with_what_was_expected(call: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        call()


def test_an_unknown_backend_lists_the_known() -> None:
    with pytest.raises(NotSupported, match="use one of: cuda, cpu, ref"):
        ops.rms_norm(X, WEIGHT, backend="tpu")


@pytest.mark.parametrize("name", [name for name, _ in _core.supported_quantizations()])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_quantized_linear_is_that_of_its_integers(name: str, kind: str) -> None:
    """The packed weight holds what quantize() returns: torch multiplies the same numbers."""
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(70, 256, generator=generator)
    x = torch.randint(-127, 128, (5, 256), generator=generator).float()
    x[:, ::32] = 127  # so that activations are their own integers in every group
    values, scales, minima = ops.quantize(weight if kind == "torch" else weight.numpy(), name)
    assert isinstance(values, torch.Tensor if kind == "torch" else np.ndarray)
    parts = [torch.as_tensor(part).double() for part in (values, scales)]
    rows = parts[0].reshape(70, scales.shape[1], -1) * parts[1][..., None]
    if minima is not None:
        rows = rows - torch.as_tensor(minima).double()[..., None]
    rows = rows.reshape(70, 256)
    assert (rows - weight).abs().max() < (0.02 if name == "int8" else 0.4)
    packed = ops.pack_linear(weight if kind == "torch" else weight.numpy(), quantization=name)
    assert packed.quantization == name
    got = ops.linear(x if kind == "torch" else x.numpy(), packed)
    expected = (x.double() @ rows.T).numpy()
    np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-4, atol=0.05)


def test_quantize_refuses_what_it_cannot_do() -> None:
    weight = np.ones((4, 96), np.float32)
    with pytest.raises(
        NotSupported, match="quantization 'int3' is not supported; use one of: int8"
    ):
        ops.quantize(weight, "int3")
    with pytest.raises(NotSupported, match="rows of 131073 weights, and int8 takes at most 131072"):
        ops.pack_linear(np.ones((1, 131073), np.float32), quantization="int8")
    with pytest.raises(InvalidArgument, match="expected dtype or quantization, got"):
        ops.pack_linear(weight, "float32", quantization="int8")
    with pytest.raises(InvalidArgument, match=r"quantize.weight"):
        ops.quantize(np.ones(8, np.float32), "int8")
