"""llmserve.BlockAllocator: the bookkeeping of a paged KV pool by itself."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llmserve import errors
from llmserve._core import BlockAllocator


def test_a_request_takes_as_many_blocks_as_its_tokens_need() -> None:
    pool = BlockAllocator(num_blocks=10, block_size=16)
    table = pool.allocate("a", 33)
    assert len(table) == 3
    assert pool.get_block_table("a") == table
    assert pool.num_free_blocks == 7


def test_append_at_block_boundary_allocates_one_block() -> None:
    pool = BlockAllocator(num_blocks=10, block_size=4)
    pool.allocate(1, 3)
    assert len(pool.allocate(1, 1)) == 1
    assert len(pool.allocate(1, 1)) == 2
    assert pool.num_tokens(1) == 5


def test_freed_blocks_are_free_again() -> None:
    pool = BlockAllocator(num_blocks=4)
    pool.allocate("a", 64)
    pool.free("a")
    assert pool.num_free_blocks == 4
    with pytest.raises(errors.InvalidArgument, match="'a' has no blocks"):
        pool.get_block_table("a")


def test_a_full_pool_says_what_is_missing_and_changes_nothing() -> None:
    pool = BlockAllocator(num_blocks=4, block_size=8)
    pool.allocate("a", 17)
    with pytest.raises(errors.ResourceExhausted, match=r"9 more tokens .* 1 are free"):
        pool.allocate("b", 9)
    with pytest.raises(errors.ResourceExhausted):
        pool.allocate("a", 2**62)
    assert pool.num_free_blocks == 1
    assert len(pool.get_block_table("a")) == 3
    pool.check_integrity()


@pytest.mark.parametrize("num_tokens", [0, -1])
def test_nothing_is_not_a_number_of_tokens(num_tokens: int) -> None:
    with pytest.raises(errors.InvalidArgument, match="num_tokens must be at least 1"):
        BlockAllocator(4).allocate("a", num_tokens)


@pytest.mark.parametrize(
    ("field", "value"), [("num_blocks", 0), ("num_blocks", -3), ("block_size", 0)]
)
def test_a_pool_of_nothing_is_refused(field: str, value: int) -> None:
    with pytest.raises(errors.InvalidArgument, match=f"{field} must be at least 1"):
        BlockAllocator(**{"num_blocks": 4, field: value})


def test_a_fork_shares_blocks_until_one_of_them_writes() -> None:
    pool = BlockAllocator(num_blocks=8, block_size=4)
    before = pool.allocate("a", 6)
    pool.fork("a", "b")
    assert pool.get_block_table("b") == before
    assert [pool.ref_count(b) for b in before] == [2, 2]
    after = pool.allocate("b", 1)
    assert pool.take_copies() == [(before[1], after[1])]
    assert after[0] == before[0]
    assert pool.get_block_table("a") == before
    assert pool.allocate("a", 1) == before  # the last holder writes in place
    assert pool.take_copies() == []
    pool.free("a")
    assert pool.get_block_table("b") == after
    pool.check_integrity()


@settings(deadline=None, derandomize=True, database=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), max_size=40))
def test_a_request_holds_just_the_blocks_of_its_tokens(ops: list[tuple[int, int]]) -> None:
    pool = BlockAllocator(num_blocks=64, block_size=16)
    lengths: dict[int, int] = {}
    for request, num_tokens in ops:
        try:
            pool.allocate(request, num_tokens)
            lengths[request] = lengths.get(request, 0) + num_tokens
        except errors.ResourceExhausted:
            if lengths.pop(request, None):
                pool.free(request)
        pool.check_integrity()
    for request, num_tokens in lengths.items():
        assert pool.num_tokens(request) == num_tokens
        assert len(pool.get_block_table(request)) == -(-num_tokens // 16)
    num_used = sum(len(pool.get_block_table(request)) for request in lengths)
    assert pool.num_free_blocks == 64 - num_used


def test_blocks_hold_sixteen_tokens_unless_told_otherwise() -> None:
    assert BlockAllocator(num_blocks=1).block_size == 16


def test_statistics_count_blocks_and_empty_slots() -> None:
    pool = BlockAllocator(num_blocks=8, block_size=4)
    assert (pool.usage, pool.waste) == (0.0, 0.0)
    pool.allocate("a", 6)
    assert (pool.num_used_blocks, pool.usage, pool.waste) == (2, 0.25, 0.25)
    pool.fork("a", "b")
    assert (pool.num_used_blocks, pool.waste) == (2, 0.25)
    pool.allocate("b", 2)  # copies the half-full block and fills it
    assert (pool.num_used_blocks, pool.waste) == (3, 1 / 6)


def test_a_loaded_pool_is_nearly_full_and_wastes_under_four_percent() -> None:
    """Row E3, seed 17: requests of 128 to 512 tokens and Pareto(1.5, 20) more, one at a time."""
    rng = random.Random(17)
    pool = BlockAllocator(num_blocks=400)
    left: dict[int, int] = {}
    usage, waste = [], []

    def grow(request_id: int) -> None:
        try:
            pool.allocate(request_id, 1)
        except errors.ResourceExhausted:  # the youngest gives way, as a scheduler would have it
            victim = max(left)
            pool.free(victim)
            del left[victim]

    for step in range(3_000):
        if pool.num_free_blocks > 50:  # room for a newcomer, and for the others to grow
            newcomer = max(left, default=step) + 1
            pool.allocate(newcomer, rng.randint(128, 512))
            left[newcomer] = min(512, int(20 * rng.paretovariate(1.5)))
        for request_id in list(left):
            if request_id in left:
                grow(request_id)
        for request_id in [r for r in left if left[r] == 0]:
            pool.free(request_id)
            del left[request_id]
        for request_id in left:
            left[request_id] -= 1
        if step >= 100:
            usage.append(pool.usage)
            waste.append(pool.waste)
    pool.check_integrity()
    assert 0.80 <= sum(usage) / len(usage) <= 0.95
    assert sum(waste) / len(waste) < 0.04
