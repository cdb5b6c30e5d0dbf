"""The KV cache manager against a model that keeps the contents of every block."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from kv_machine import PROMPTS, SALTS, PoolRules, drive, machine_settings
from kv_pool_model import GONE, WINDOWS, PoolModel
from llmserve import _core_testing as testing

WEIGHTS = {"admit": 25, "run": 45, "fork": 8, "release": 21, "reset": 1}


class PoolMachine(PoolRules):
    @initialize(windows=st.sampled_from(WINDOWS))
    def start(self, windows: tuple[int, ...]) -> None:
        self.model = PoolModel(windows)

    @rule(salt=SALTS, tokens=PROMPTS)
    def admit(self, salt: int, tokens: list[int]) -> None:
        self.model.admit(salt, tokens)


TestPool = PoolMachine.TestCase
TestPool.settings = machine_settings(max_examples=120)


@pytest.mark.long
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_a_quarter_million_operations_keep_every_block(windows: tuple[int, ...]) -> None:
    drive(PoolModel(windows), len(windows), 250_000, WEIGHTS)


def test_a_full_hit_leaves_the_last_token_to_run() -> None:
    manager = testing.KvCacheManager(num_blocks=8, block_size=4)
    first = testing.BlockTable(1)
    tokens = list(range(8))
    manager.attach(first, tokens)
    manager.allocate(first, 0, 8)
    manager.commit(first, tokens, 8)
    blocks, _ = manager.find_prefix(testing.BlockTable(2), tokens)
    assert blocks == first.blocks[:1]
    blocks, _ = manager.find_prefix(testing.BlockTable(3), [*tokens, 9])
    assert blocks == first.blocks


def test_equal_blocks_become_one_at_commit() -> None:
    manager = testing.KvCacheManager(num_blocks=8, block_size=4)
    tokens = [1, 2, 3, 4]
    tables = [testing.BlockTable(owner) for owner in range(2)]
    for table in tables:  # neither waits: the block holds the last token of both
        manager.attach(table, tokens)
        manager.allocate(table, 0, 4)
    assert tables[0].blocks != tables[1].blocks
    for table in tables:
        manager.commit(table, tokens, 4)
    assert tables[0].blocks == tables[1].blocks
    assert manager.ref_count(tables[0].blocks[0]) == 2
    assert manager.num_free_blocks == 7
    manager.check_integrity(tables)


def test_who_needs_a_block_under_way_is_told_by_whom() -> None:
    manager = testing.KvCacheManager(num_blocks=8, block_size=4)
    tokens = list(range(10))
    owner, other = testing.BlockTable(7), testing.BlockTable(8)
    manager.attach(owner, tokens)
    manager.allocate(owner, 0, 4)
    assert manager.find_prefix(other, tokens)[1] == 7
    manager.commit(owner, tokens, 4)
    assert manager.find_prefix(other, tokens)[1] == 7  # the second block
    manager.release(owner)
    assert manager.find_prefix(other, tokens) == ([0], None)


def test_who_does_not_wait_announces_all_that_it_has_by_then() -> None:
    manager = testing.KvCacheManager(num_blocks=8, block_size=4)
    tokens = list(range(13))
    owner, hasty, third = (testing.BlockTable(number) for number in (7, 8, 9))
    manager.attach(owner, tokens[:5])
    manager.allocate(owner, 0, 5)
    manager.attach(hasty, tokens[:5])  # as a drafter does, and gets no block
    manager.attach(hasty, tokens)
    manager.commit(owner, tokens[:5], 5)
    assert manager.find_prefix(third, tokens) == (owner.blocks[:1], 8)


def test_salts_do_not_share_blocks() -> None:
    manager = testing.KvCacheManager(num_blocks=8, block_size=4)
    tokens = list(range(5))
    first = testing.BlockTable(1, "tenant a")
    manager.attach(first, tokens)
    manager.allocate(first, 0, 5)
    manager.commit(first, tokens, 5)
    assert manager.find_prefix(testing.BlockTable(2, "tenant b"), tokens) == ([], None)
    assert manager.find_prefix(testing.BlockTable(2, "tenant a"), tokens)[0] == first.blocks[:1]


def test_a_forged_collision_gives_nobody_the_blocks_of_another() -> None:
    manager = testing.KvCacheManager(num_blocks=8, block_size=4, forge_collisions=True)
    first, second = testing.BlockTable(1), testing.BlockTable(2)
    manager.attach(first, [1, 2, 3, 4, 5])
    manager.allocate(first, 0, 5)
    manager.commit(first, [1, 2, 3, 4, 5], 5)
    other = [1, 2, 3, 9, 5]
    assert manager.find_prefix(second, other) == ([], None)
    manager.attach(second, other)
    manager.allocate(second, 0, 5)
    manager.commit(second, other, 5)
    assert second.num_cached == 0
    assert set(first.blocks).isdisjoint(second.blocks)
    manager.check_integrity([first, second])


@pytest.mark.parametrize("num_taken", [0, 1, 2, 3])
@pytest.mark.parametrize("windows", [[0, 2], [2, 0]])
def test_a_windowed_block_is_not_that_of_other_tokens_before_it(
    windows: list[int], num_taken: int
) -> None:
    """Chains of one hash, of which only what left the window differs, after as many evictions as
    make each kind of block go before the other."""
    manager = testing.KvCacheManager(7, 2, forge_collisions=True, windows=windows)
    first = computed(manager, 1, [1, 2, 7, 8])
    last = first.groups[windows.index(2)][1]
    manager.release(first)
    taken = testing.BlockTable(2)
    manager.attach(taken, [50])
    manager.allocate(taken, 0, num_taken * 2)
    is_evicted = last in [block for group in taken.groups for block in group]
    manager.release(taken)
    second = computed(manager, 3, [3, 4, 7, 8])
    assert is_evicted or second.groups[windows.index(2)][1] != last
    manager.check_integrity([second])


def test_hashes_outlive_the_blocks() -> None:
    manager = testing.KvCacheManager(num_blocks=8, block_size=4)
    table = testing.BlockTable(1)
    tokens = list(range(9))
    manager.attach(table, tokens)
    manager.allocate(table, 0, 9)
    manager.commit(table, tokens, 9)
    manager.release(table)
    assert table.blocks == []
    assert table.num_hashed == 2


def computed(manager: testing.KvCacheManager, owner: int, tokens: list[int]) -> testing.BlockTable:
    """A table whose tokens have run, two at a time."""
    table = testing.BlockTable(owner)
    manager.attach(table, tokens)
    for end in range(2, len(tokens) + 1, 2):
        manager.allocate(table, end - 2, 2)
        manager.commit(table, tokens, end)
    return table


def test_a_windowed_group_gives_back_what_left_its_window() -> None:
    manager = testing.KvCacheManager(
        num_blocks=20, block_size=2, windows=[0, 4], max_step_tokens=2, enable_prefix_caching=False
    )
    table = computed(manager, 1, list(range(12)))
    full, windowed = table.groups
    assert GONE not in full
    # The token at 12 looks at 9 to 12.
    assert [block == GONE for block in windowed] == [True] * 4 + [False] * 2
    assert manager.num_used_blocks == 6 + 2
    assert manager.num_blocks_for(12) == 6 + 3


def test_a_hit_needs_the_blocks_of_the_window_alone() -> None:
    manager = testing.KvCacheManager(num_blocks=10, block_size=2, windows=[0, 3])
    tokens = list(range(8))
    first = computed(manager, 1, tokens)
    manager.release(first)
    # Two of the four blocks that nobody needs make room: the least recently used are those that
    # left the window.
    other = testing.BlockTable(2)
    manager.attach(other, [50])
    manager.allocate(other, 0, 4)
    assert manager.num_evictions == 2
    again = testing.BlockTable(3)
    manager.attach(again, [*tokens, 9])
    full, windowed = again.groups
    assert len(full) == 4
    assert [block == GONE for block in windowed] == [True, True, True, False]
    manager.check_integrity([other, again])


def test_a_hit_ends_where_a_window_was_lost() -> None:
    manager = testing.KvCacheManager(num_blocks=12, block_size=2, windows=[0, 3])
    tokens = list(range(8))
    manager.release(computed(manager, 1, tokens))
    # All but one of the cached blocks are evicted in the order of their use.
    other = testing.BlockTable(2)
    manager.attach(other, [50])
    manager.allocate(other, 0, 8)
    blocks, _ = manager.find_prefix(testing.BlockTable(3), [*tokens, 9])
    assert blocks == []
    manager.check_integrity([other])
