"""NCCL with one rank on a GPU."""

import numpy as np
import pytest
from llmserve import _core_testing as testing
from llmserve.errors import NotSupported

REASON = testing.unavailable_reason("cuda")

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(bool(REASON), reason=f"no CUDA here: {REASON}"),
]


@pytest.fixture(scope="module")
def backend():
    return testing.make_backend("cuda")


@pytest.fixture(scope="module")
def ranks(backend):
    try:
        return testing.nccl_communicator(backend)
    except NotSupported as error:
        pytest.skip(str(error))


def test_one_rank_exchanges_with_itself_in_the_order_of_the_ops(backend, ranks):
    x = np.random.default_rng(0).standard_normal((64, 96), dtype=np.float32)
    data, gathered, part = (backend.to_device(np.zeros_like(x)) for _ in range(3))
    backend.add(data, backend.to_device(x), 1.0)  # the ops before are done first
    ranks.all_reduce(data)
    ranks.all_reduce(data, "max")
    ranks.broadcast(data)
    ranks.all_gather(data, gathered)
    ranks.reduce_scatter(gathered, part)
    backend.add(part, data, 1.0)  # and those after come after
    ranks.barrier()
    ranks.check()
    np.testing.assert_array_equal(backend.to_numpy(gathered), x)
    np.testing.assert_array_equal(backend.to_numpy(part), x + x)


def test_an_aborted_communicator_leaves_the_device_usable(backend):
    try:
        ranks = testing.nccl_communicator(backend)
    except NotSupported as error:
        pytest.skip(str(error))
    ones = np.ones((4, 256), np.float32)
    data = backend.to_device(ones)
    ranks.all_reduce(data)
    ranks.wait()
    ranks.abort()
    backend.add(data, backend.to_device(ones), 1.0)
    np.testing.assert_array_equal(backend.to_numpy(data), ones + ones)
