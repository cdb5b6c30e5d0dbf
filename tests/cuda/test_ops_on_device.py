"""llmserve.ops on arrays of the GPU: in place, on their library's stream, refused elsewhere."""

import sys

import device_arrays
import numpy as np
import pytest
from device_arrays import CPU, CUDA, FakeTensor, fake_torch
from llmserve import InvalidArgument, NotSupported, _core_testing, ops
from parity.op_formulas import ROUNDED_ATTENTION_TOLERANCE

REASON = _core_testing.unavailable_reason("cuda")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(bool(REASON), reason=f"no CUDA here: {REASON}")]

# Sums of n <= 512 terms in float32 on both sides, in different orders: sqrt(n) * 2^-24 of the
# terms' magnitude (about 1), and a factor of 8 for both sides and the tail.
TOLERANCE = 8 * 512**0.5 * 2**-24


def is_emulated():
    return "emulated" in _core_testing.make_backend("cuda").description


@pytest.fixture(params=[0, 77], ids=["default-stream", "other-stream"])
def to_device(request, monkeypatch):
    """NumPy arrays to the device: torch's tensors, or the emulated device's."""
    if is_emulated():
        monkeypatch.setitem(sys.modules, "torch", fake_torch(request.param))
        yield lambda values: FakeTensor(np.array(values))
        return
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA here")
    stream = torch.cuda.Stream() if request.param else torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        yield lambda values: torch.from_numpy(np.ascontiguousarray(values)).cuda()


def to_host(array):
    return (array.cpu() if hasattr(array, "cpu") else array).numpy()


def assert_close(got, expected, tolerance=TOLERANCE):
    np.testing.assert_allclose(to_host(got), expected, atol=tolerance, rtol=tolerance)


@pytest.fixture
def normal():
    rng = np.random.default_rng(0)
    return lambda *shape: rng.standard_normal(shape, dtype=np.float32)


def test_row_ops_of_a_device_give_what_the_host_gives(to_device, normal):
    x, residual, weight, bias = normal(7, 64), normal(7, 64), normal(64), normal(64)
    on = {name: to_device(a) for name, a in {"x": x, "w": weight, "b": bias}.items()}
    assert_close(ops.rms_norm(on["x"], on["w"]), ops.rms_norm(x, weight))
    assert_close(ops.layer_norm(on["x"], on["w"], on["b"]), ops.layer_norm(x, weight, bias))
    total = to_device(residual)
    normed = ops.add_rms_norm(on["x"], total, on["w"])
    assert_close(normed, ops.add_rms_norm(x, residual, weight))
    assert_close(total, residual)
    for op in (ops.silu_and_mul, ops.gelu_and_mul, ops.gelu_tanh_and_mul):
        assert_close(op(on["x"]), op(x))
    assert_close(ops.gather(on["x"], [2, 2, 0]), x[[2, 2, 0]])
    assert_close(ops.embedding(to_device(np.array([3, 0])), on["x"]), x[[3, 0]])


def test_results_are_written_in_place(to_device, normal):
    x, weight = to_device(normal(3, 32)), to_device(normal(32))
    expected = to_host(ops.rms_norm(x, weight))
    assert ops.rms_norm(x, weight, out=x) is x
    assert_close(x, expected)


def test_linear_takes_weights_from_either_side(to_device, normal):
    x, bias, weight = normal(5, 96), normal(33), normal(33, 96) / 10
    expected = x @ weight.T + bias
    for parts in (weight, to_device(weight), [to_device(weight[:20]), weight[20:]]):
        packed = ops.pack_linear(parts, backend="cuda")
        assert (packed.backend, packed.out_features) == ("cuda", 33)
        assert_close(ops.linear(to_device(x), packed, to_device(bias)), expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_heads_are_rotated_in_place_and_beside(to_device, normal, interleaved):
    heads = normal(4, 3, 16)
    expected = ops.rotary_embedding(heads, [0, 5, 9, 2], interleaved=interleaved)
    on = to_device(heads)
    got = ops.rotary_embedding(on, to_device(np.array([0, 5, 9, 2])), interleaved=interleaved)
    np.testing.assert_array_equal(to_host(got), expected)
    np.testing.assert_array_equal(to_host(on), heads)
    ops.rotary_embedding(on, [0, 5, 9, 2], interleaved=interleaved, out=on)
    np.testing.assert_array_equal(to_host(on), expected)


@pytest.mark.parametrize(("dtype", "row"), [(np.float32, 16), (np.uint8, 16 + 4)])
def test_a_paged_cache_on_the_device_is_written_copied_and_attended(to_device, normal, dtype, row):
    keys, values, q = normal(20, 2, 16), normal(20, 2, 16), normal(2, 4, 16)
    slots = np.arange(20) + 8
    pools = []
    # Beside ref: a CPU may round what it multiplies with codes.
    for move, on in ((np.asarray, {"backend": "ref"}), (to_device, {})):
        cache = [move(np.zeros((6, 2, 8, row), dtype)) for _ in range(2)]
        ops.store_kv(move(keys), move(values), *cache, move(slots), **on)
        ops.copy_blocks([(1, 5)], *cache, **on)
        tables = move(np.array([[5, 2, 3], [1, 2, 0]], np.int32))
        pools.append(ops.paged_attention(move(q), *cache, tables, move(np.array([20, 11])), **on))
    # Tensor cores read codes, and round queries to bf16 beside them.
    assert_close(
        pools[1], pools[0], TOLERANCE if dtype == np.float32 else ROUNDED_ATTENTION_TOLERANCE
    )


def test_sampled_tokens_equal_those_of_the_host_and_lie_beside_the_logits(to_device, normal):
    logits = normal(4, 100) * 3
    on = to_device(logits)
    options = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 7}
    got = ops.sample(on, position=to_device(np.array([1, 2, 3, 4])), **options)
    assert to_host(got).tolist() == ops.sample(logits, position=[1, 2, 3, 4], **options).tolist()
    assert got.device == on.device


def test_an_array_in_host_memory_among_those_of_a_device_is_named(to_device, normal):
    with pytest.raises(InvalidArgument, match=r"rms_norm.weight: .* CUDA device 0 .*got one in ho"):
        ops.rms_norm(to_device(normal(3, 8)), normal(8))
    with pytest.raises(InvalidArgument, match=r"rms_norm.x: .* got one in host memory; copy it"):
        ops.rms_norm(normal(3, 8), normal(8), backend="cuda")


def test_a_device_array_among_those_of_the_host_is_named(to_device, normal):
    with pytest.raises(NotSupported, match=r"weight: expected an array in host memory.*'cuda'"):
        ops.rms_norm(normal(3, 8), to_device(normal(8)))


needs_fakes = pytest.mark.skipif(bool(REASON) or not is_emulated(), reason="for the emulator alone")


@needs_fakes
@pytest.mark.parametrize(("current", "told"), [(0, 1), (77, 77)])
def test_arrays_are_told_of_the_stream_that_the_work_goes_to(monkeypatch, normal, current, told):
    monkeypatch.setitem(sys.modules, "torch", fake_torch(current))
    x, weight = FakeTensor(normal(3, 8)), FakeTensor(normal(8))
    ops.rms_norm(x, weight, out=x)
    assert (x.streams, weight.streams) == ([told, told], [told])


@needs_fakes
def test_without_torch_work_goes_to_the_legacy_stream_and_needs_out(monkeypatch, normal):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    x = FakeTensor(normal(3, 8))
    with pytest.raises(NotSupported, match=r"gated_activation.out: .* pass out="):
        ops.silu_and_mul(x)
    ops.silu_and_mul(x, out=FakeTensor(np.zeros((3, 4), np.float32)))
    assert x.streams == [1, 1]


@needs_fakes
def test_a_second_device_is_refused(monkeypatch, normal):
    monkeypatch.setitem(sys.modules, "torch", fake_torch(0))
    with pytest.raises(NotSupported, match=r"CUDA device 0, where the backend is.* CUDA 1; copy"):
        ops.rms_norm(FakeTensor(normal(3, 8), (CUDA, 1)), FakeTensor(normal(8)))


@needs_fakes
def test_a_capsule_that_contradicts_its_array_is_refused(monkeypatch, normal):
    class Liar(FakeTensor):
        def __dlpack__(self, stream=None):
            return device_arrays.FakeTensor(self.values, (CPU, 0)).__dlpack__(stream)

    monkeypatch.setitem(sys.modules, "torch", fake_torch(0))
    with pytest.raises(InvalidArgument, match="got one in host memory"):
        ops.rms_norm(Liar(normal(3, 8)), FakeTensor(normal(8)))
