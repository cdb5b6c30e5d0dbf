"""Parts of the device's memory that go to the host and come back while steps run."""

import threading

import numpy as np
import pytest
from llmserve import _core_testing as testing
from llmserve.errors import InternalError

REASON = testing.unavailable_reason("cuda")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(bool(REASON), reason=f"no CUDA here: {REASON}")]

BLOCKS, HEADS, TOKENS, WIDTH = 6, 2, 8, 16
BLOCK_BYTES = HEADS * TOKENS * WIDTH * 4


class Cache:
    """Keys and values on a device, and steps that store rows of one number into a block."""

    def __init__(self):
        self.backend = testing.make_backend("cuda")
        shape = (BLOCKS, HEADS, TOKENS, WIDTH)
        self.parts = [self.backend.to_device(np.zeros(shape, np.float32)) for _ in range(2)]
        rows = [np.full((TOKENS, HEADS, WIDTH), value, np.float32) for value in range(10)]
        self.rows = [self.backend.to_device(row) for row in rows]
        self.copies = self.backend.make_copies(4 * BLOCK_BYTES)
        self.num_steps = 0

    def step(self, block, value):
        rows = self.rows[value]
        self.backend.store_kv(rows, rows, np.arange(TOKENS) + block * TOKENS, *self.parts)
        self.num_steps += 1
        self.copies.mark(self.num_steps)

    def pieces(self, block):
        return [(part, block * BLOCK_BYTES, BLOCK_BYTES) for part in self.parts]

    def read(self, block):
        return self.read_pieces(self.pieces(block))

    def read_pieces(self, pieces):
        out = np.zeros(sum(size for _, _, size in pieces), np.uint8)
        self.copies.read(pieces, out)
        return out.view(np.float32)

    def values(self):
        """[keys and values, blocks] what fills each block."""
        parts = [self.backend.to_numpy(part) for part in self.parts]
        assert all((block == block.flat[0]).all() for part in parts for block in part)
        return [[block.flat[0] for block in part] for part in parts]


@pytest.fixture
def cache():
    return Cache()


def test_a_copy_sees_the_steps_that_it_follows(cache):
    """Nobody waits for the ops: the order of the streams has to do it, with others behind."""
    for value in range(1, 5):
        cache.step(1, value)
    cache.step(2, 9)
    cache.copies.follow(4)
    np.testing.assert_array_equal(cache.read(1), np.full(2 * BLOCK_BYTES // 4, 4, np.float32))
    # The blocks of a step that failed are stored again, under its number.
    cache.num_steps = 4
    cache.step(2, 8)
    cache.copies.follow(5)
    np.testing.assert_array_equal(cache.read(2), np.full(2 * BLOCK_BYTES // 4, 8, np.float32))


def test_a_step_that_was_not_marked_is_followed_by_the_one_before(cache):
    cache.step(3, 5)
    cache.num_steps = 7  # steps of nothing
    cache.step(4, 6)
    cache.copies.follow(6)
    np.testing.assert_array_equal(cache.read(3), np.full(2 * BLOCK_BYTES // 4, 5, np.float32))


def test_what_is_written_comes_after_the_step_that_used_the_block_before(cache):
    cache.step(1, 3)
    cache.step(2, 4)
    cache.copies.follow(2)
    rows = np.full((2, BLOCK_BYTES // 4), [[7], [8]], np.float32)
    cache.copies.write(cache.pieces(1), rows.reshape(-1).view(np.uint8))
    cache.backend.copy_blocks([(1, 5)], *cache.parts)  # a later step finds it
    assert cache.values() == [[0, 7, 4, 0, 0, 7], [0, 8, 4, 0, 0, 8]]


def test_many_threads_take_turns(cache):
    for block in range(BLOCKS):
        cache.step(block, block + 1)
    cache.copies.follow(BLOCKS)
    got = [None] * 24

    def read(i):
        got[i] = set(cache.read(i % BLOCKS))

    threads = [threading.Thread(target=read, args=(i,)) for i in range(len(got))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [{i % BLOCKS + 1} for i in range(len(got))]


def test_parts_that_are_far_apart_keep_their_order(cache):
    for block in range(BLOCKS):
        cache.step(block, block + 1)
    cache.copies.follow(BLOCKS)
    keys, values = cache.parts
    quarter = BLOCK_BYTES // 4
    places = [(keys, 4), (keys, 1), (values, 0), (values, 2), (values, 4), (keys, 5), (keys, 2)]
    sizes = [quarter, quarter, quarter, quarter, quarter, 2 * quarter, quarter]
    pieces = [
        (part, block * BLOCK_BYTES, size) for (part, block), size in zip(places, sizes, strict=True)
    ]
    expected = [block + 1 for (_, block), size in zip(places, sizes, strict=True)]
    expected.insert(6, 6)  # of which there are two quarters
    got = cache.read_pieces(pieces).reshape(len(expected), -1)
    np.testing.assert_array_equal(got, np.repeat(expected, got.shape[1]).reshape(got.shape))
    cache.copies.write(pieces, (got * 10).reshape(-1).view(np.uint8))
    for part, block in places:
        head = cache.backend.to_numpy(part)[block].flat[: quarter // 4]
        np.testing.assert_array_equal(head, 10 * (block + 1))


def test_more_than_the_buffer_holds_is_refused_and_the_buffer_goes_on(cache):
    cache.step(0, 1)
    cache.copies.follow(1)
    pieces = [piece for block in range(3) for piece in cache.pieces(block)]
    for _ in range(6):  # more often than there are buffers
        with pytest.raises(InternalError, match="pieces fit their buffer"):
            cache.read_pieces(pieces)
    assert set(cache.read(0)) == {1}
