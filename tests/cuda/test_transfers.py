"""What crosses to the device and back beside the ops: blocks of the KV cache, weights."""

import numpy as np
import pytest
from checkpoints import checkpoint, copy_checkpoint
from llmserve import LLM, InvalidArgument, SamplingParams
from llmserve import _core_testing as testing
from llmserve.errors import CorruptFile
from safetensors.torch import load_file, save_file

REASON = testing.unavailable_reason("cuda")
BLOCK = (2, 8, 16)  # KV heads, tokens, head size
LARGE = 3 << 20  # elements: more than the staging buffers of two threads hold at once


@pytest.fixture(
    params=["ref", pytest.param("cuda", marks=pytest.mark.cuda)],
)
def backend(request):
    if request.param == "cuda" and REASON:
        pytest.skip(f"no CUDA here: {REASON}")
    return testing.make_backend(request.param)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


class Caches:
    """A cache on the device of 6 blocks, and one of 9 in host memory; keys and values of each."""

    def __init__(self, backend, rng):
        self.backend = backend
        self.content = [rng.standard_normal((6, *BLOCK), dtype=np.float32) for _ in range(2)]
        self.device = [backend.to_device(part) for part in self.content]
        self.host = [backend.transfer_array([9, *BLOCK]) for _ in range(2)]

    def transfer(self, pairs, to_host):
        return self.backend.transfer_blocks(pairs, *self.device, *self.host, to_host)

    def wait(self, number):
        while not self.backend.is_transferred(number):
            pass


def test_blocks_go_to_the_host_and_come_back_elsewhere(backend, rng):
    caches = Caches(backend, rng)
    caches.wait(caches.transfer([(0, 4), (1, 5), (5, 0)], to_host=True))
    for content, device, host in zip(caches.content, caches.device, caches.host, strict=True):
        np.testing.assert_array_equal(host[[4, 5, 0]], content[[0, 1, 5]])
        assert not host[[1, 2, 3, 6, 7, 8]].any()
        np.testing.assert_array_equal(backend.to_numpy(device), content)
    number = caches.transfer([(4, 2), (0, 3)], to_host=False)
    backend.await_transfer(number)
    for content, device in zip(caches.content, caches.device, strict=True):
        expected = content.copy()
        expected[[2, 3]] = content[[0, 5]]
        np.testing.assert_array_equal(backend.to_numpy(device), expected)
    assert backend.is_transferred(number)


def test_blocks_of_codes_go_with_their_scales(backend, rng):
    """As any bytes: a host array of floats is a place for them."""
    shape = (6, 2, 8, 16 + 4)
    device = [np.zeros(shape, np.uint8) for _ in range(2)]
    pair = [rng.standard_normal((48, 2, 16), dtype=np.float32) for _ in range(2)]
    backend.store_kv(*pair, np.arange(48), *device)
    content = [part.copy() for part in device]
    device = [backend.to_device(part) for part in device]
    host = [backend.transfer_array([6, 2, 8, 5]).view(np.uint8) for _ in range(2)]
    for pairs, to_host in (([(0, 4), (1, 5)], True), ([(4, 2), (5, 3)], False)):
        number = backend.transfer_blocks(pairs, *device, *host, to_host)
        while not backend.is_transferred(number):
            pass
    for old, part in zip(content, device, strict=True):
        np.testing.assert_array_equal(backend.to_numpy(part), old[[0, 1, 0, 1, 4, 5]])


def test_a_transfer_sees_the_ops_before_it_and_ops_wait_for_it_when_told_to(backend, rng):
    """Without waiting for anything on the host: the streams' order has to do it."""
    caches = Caches(backend, rng)
    one = rng.standard_normal((8, 2, 16), dtype=np.float32)
    backend.store_kv(one, one, np.arange(8) + 8, *caches.device)  # block 1
    out = caches.transfer([(1, 7)], to_host=True)
    back = caches.transfer([(7, 4)], to_host=False)
    backend.await_transfer(back)
    backend.copy_blocks([(4, 0)], *caches.device)
    got = [backend.to_numpy(part) for part in caches.device]
    caches.wait(out)
    for part, host in zip(got, caches.host, strict=True):
        for block in (part[0], part[1], part[4], host[7]):
            np.testing.assert_array_equal(block, one.transpose(1, 0, 2))


def test_transfers_are_done_in_their_order(backend, rng):
    caches = Caches(backend, rng)
    numbers = [caches.transfer([(i, i)], to_host=True) for i in range(6)]
    assert numbers == sorted(numbers)
    caches.wait(numbers[3])
    assert all(backend.is_transferred(number) for number in numbers[:4])
    for content, host in zip(caches.content, caches.host, strict=True):
        np.testing.assert_array_equal(host[:4], content[:4])
    caches.wait(numbers[-1])


def test_blocks_that_are_not_there_are_refused_and_nothing_moves(backend, rng):
    caches = Caches(backend, rng)
    for pairs, to_host, field in (
        ([(0, 9)], True, "destination"),
        ([(6, 0)], True, "source"),
        ([(9, 0)], False, "source"),
        ([(0, 6)], False, "destination"),
        ([(-1, 0)], False, "source"),
    ):
        with pytest.raises(InvalidArgument, match=f"transfer_blocks.pairs .{field}"):
            caches.transfer([(1, 1), *pairs], to_host=to_host)
    assert not any(host.any() for host in caches.host)


def test_a_host_cache_of_other_blocks_is_refused(backend, rng):
    caches = Caches(backend, rng)
    caches.host = [backend.transfer_array([9, 2, 4, 16]) for _ in range(2)]
    with pytest.raises(InvalidArgument, match=r"transfer_blocks.host: expected blocks of 8 tokens"):
        caches.transfer([(0, 0)], to_host=True)


def test_blocks_side_by_side_are_one_copy():
    pairs = [(3, 7), (4, 8), (5, 9), (5, 10), (6, 11), (9, 0), (8, 1)]
    assert testing.block_runs(pairs) == [(3, 7, 3), (5, 10, 2), (9, 0, 1), (8, 1, 1)]
    assert testing.block_runs([]) == []


def test_pieces_as_large_and_as_far_apart_are_one_copy():
    def runs(*pieces):
        return testing.piece_runs(pieces, 1000)

    assert runs() == []
    assert runs((0, 10), (100, 10), (200, 10), (300, 10)) == [(0, 10, 100, 4)]
    assert runs((0, 10), (100, 20), (200, 10)) == [
        (0, 10, 10, 1),
        (100, 20, 20, 1),
        (200, 10, 10, 1),
    ]
    assert runs((0, 10), (100, 10), (150, 10), (200, 10)) == [(0, 10, 100, 2), (150, 10, 50, 2)]
    assert runs((100, 10), (0, 10), (1000, 10)) == [(100, 10, 10, 1), (0, 10, 1000, 2)]
    assert runs((0, 10), (1001, 10)) == [(0, 10, 10, 1), (1001, 10, 10, 1)]
    assert runs((0, 10), (10, 10)) == [(0, 10, 10, 2)]


def test_weights_of_several_staging_buffers_arrive_whole(backend, rng):
    """The buffers are filled again while copies from them are on their way."""
    rows = LARGE // 256
    weights = [rng.standard_normal((rows, 256), dtype=np.float32) for _ in range(3)]
    halves = weights[2].astype(np.float16)
    packed = backend.pack_linear([*weights[:2], halves], "float32")
    for part in weights:
        part[:] = np.nan  # on its way means taken over
    probe = np.eye(256, dtype=np.float32)[[0, 100, 255]]
    got = backend.linear(probe, packed)
    rng = np.random.default_rng(0)
    expected = [rng.standard_normal((rows, 256), dtype=np.float32) for _ in range(3)]
    expected[2] = expected[2].astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(got, np.concatenate(expected)[:, [0, 100, 255]].T)


@pytest.mark.cuda
@pytest.mark.skipif(bool(REASON), reason=f"no CUDA here: {REASON}")
@pytest.mark.parametrize("num_threads", [1, 3])
def test_integers_of_several_staging_buffers_are_those_of_the_host(rng, num_threads):
    rows = rng.standard_normal((2300, 1024), dtype=np.float32)
    x = rng.standard_normal((1, 1024), dtype=np.float32)
    got, expected = (
        backend.linear(x, backend.pack_quantized(rows, "int8"))
        for backend in (testing.make_backend("cuda", num_threads), testing.make_backend("ref"))
    )
    np.testing.assert_array_equal(got, expected)


@pytest.mark.cuda
@pytest.mark.skipif(bool(REASON), reason=f"no CUDA here: {REASON}")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name",  # of stacked ones, and of a table
    ["model.layers.1.self_attn.v_proj", "model.layers.1.mlp.gate_proj", "model.embed_tokens"],
)
def test_a_value_that_is_not_finite_is_named_where_it_is_found_on_its_way(tmp_path, dtype, name):
    path = copy_checkpoint(checkpoint("llama", dtype=dtype), tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    bad = tensors[f"{name}.weight"]
    bad.reshape(-1)[37] = float("inf")
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CorruptFile) as caught:
        LLM(path, device="cuda", max_model_len=64)
    assert f'"{name}.weight": element 37 of {dtype}' in str(caught.value)
    assert "is infinite; weights must be finite" in str(caught.value)


@pytest.mark.cuda
@pytest.mark.skipif(bool(REASON), reason=f"no CUDA here: {REASON}")
def test_blocks_are_expanded_by_any_number_of_threads(tmp_path):
    """A table is in floats on a device, and so are weights of a file that is to run unquantized."""
    gguf_files = pytest.importorskip("gguf_files")
    wide = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    quantize = gguf_files.quantized("Q8_0")
    path = gguf_files.write_gguf(tmp_path / "model.gguf", checkpoint("llama", **wide), quantize)
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=2)
    outputs = []
    for num_threads in (1, 3):
        options = {"num_threads": num_threads, "quantization": "none", "max_model_len": 64}
        with LLM(path, device="cuda", **options) as llm:
            (output,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
        outputs.append((output.outputs[0].token_ids, output.outputs[0].logprobs))
    assert outputs[0] == outputs[1]


def test_large_arrays_are_copied_whole(backend, rng):
    array = rng.standard_normal(LARGE + 17, dtype=np.float32)
    np.testing.assert_array_equal(backend.to_numpy(backend.to_device(array)), array)
