"""A lower tier: what goes there, what comes back, and what a transfer's end means."""

from __future__ import annotations

from typing import Any

import pytest
from llmserve import _core_testing as testing
from llmserve import errors

TOKENS = [*range(8), 99]


def make(num_blocks: int = 12, **options: Any) -> testing.KvCacheManager:
    return testing.KvCacheManager(num_blocks, 2, **{"num_slots": 12, **options})


def computed(manager: testing.KvCacheManager, owner: int, tokens: list[int]) -> Any:
    """A table whose tokens have run at once, as the prefix cache has them."""
    table = testing.BlockTable(owner)
    manager.attach(table, tokens)
    start = len(table.blocks) * 2
    manager.allocate(table, start, len(tokens) - start)
    manager.commit(table, tokens, len(tokens))
    return table


def evict(manager: testing.KvCacheManager, num_blocks: int | None = None) -> None:
    """Somebody takes blocks of each group (all, where there is one) and gives them back."""
    table = testing.BlockTable(-1, "evict")
    if num_blocks is None:
        num_blocks = manager.num_free_blocks + manager.num_cached_blocks
    manager.allocate(table, 0, num_blocks * 2)
    manager.release(table)


def stored(manager: testing.KvCacheManager, tokens: list[int]) -> None:
    """Computed, stored, and evicted from the pool."""
    table = computed(manager, 1, tokens)
    for transfer in manager.take_transfers():
        manager.finish_transfer(transfer.id, True)
    manager.release(table)
    evict(manager)
    assert manager.find_prefix(testing.BlockTable(-1), tokens) == ([], None)


def test_a_full_block_goes_down_as_it_is_cached() -> None:
    manager = make()
    table = computed(manager, 1, TOKENS)
    (store,) = manager.take_transfers()
    assert not store.is_load
    assert [source for _, source, _ in store.moves] == table.blocks[:4]
    assert manager.take_transfers() == []  # handed out once
    assert manager.find_stored(testing.BlockTable(2), [*TOKENS, 7]) == 0  # the pool has as much
    assert table.is_moving
    assert manager.finish_transfer(store.id, True) is None
    assert not table.is_moving
    manager.check_integrity([table])


def test_what_the_pool_has_lost_is_loaded_into_new_blocks() -> None:
    manager = make()
    stored(manager, TOKENS)
    table = testing.BlockTable(2)
    assert manager.find_stored(table, TOKENS) == 4
    assert manager.load(table, TOKENS)
    (load,) = manager.take_transfers()
    assert load.is_load
    assert [to for _, _, to in load.moves] == table.blocks
    # Another request waits for it, as for one that computes them.
    assert manager.find_prefix(testing.BlockTable(3), TOKENS) == ([], 2)
    assert manager.finish_transfer(load.id, True) is table
    manager.commit(table, TOKENS, 8)
    assert manager.find_prefix(testing.BlockTable(3), TOKENS) == (table.blocks, None)
    assert manager.take_transfers() == []  # it is there already
    manager.check_integrity([table])


def test_only_what_the_pool_lacks_is_moved() -> None:
    manager = make()
    stored(manager, TOKENS)
    first = computed(manager, 2, TOKENS[:5])  # two blocks of the four
    table = testing.BlockTable(3)
    assert manager.load(table, TOKENS)
    (load,) = manager.take_transfers()
    assert [to for _, _, to in load.moves] == table.blocks[2:]
    assert table.blocks[:2] == first.blocks[:2]
    manager.check_integrity([first, table])


def test_after_a_load_that_failed_nobody_finds_what_should_have_come() -> None:
    manager = make()
    stored(manager, TOKENS)
    table = testing.BlockTable(2)
    assert manager.load(table, TOKENS)
    (load,) = manager.take_transfers()
    assert manager.finish_transfer(load.id, False) is table
    assert (table.blocks, table.is_moving) == ([], False)
    assert manager.find_stored(table, TOKENS) == 0
    assert manager.num_used_blocks == 0
    manager.check_integrity([])


def test_a_store_that_failed_is_tried_again_with_all_that_hangs_on_it() -> None:
    manager = make()
    table = testing.BlockTable(1)
    manager.attach(table, TOKENS)
    manager.allocate(table, 0, 4)
    manager.commit(table, TOKENS, 4)
    (store,) = manager.take_transfers()
    manager.finish_transfer(store.id, False)
    assert manager.num_stored_blocks == 0
    manager.allocate(table, 4, 4)
    manager.commit(table, TOKENS, 8)
    (store,) = manager.take_transfers()
    assert [source for _, source, _ in store.moves] == table.blocks
    manager.check_integrity([table])


def test_a_completion_after_the_abort_frees_what_it_held() -> None:
    manager = make()
    stored(manager, TOKENS)
    table = testing.BlockTable(2)
    assert manager.load(table, TOKENS)
    (load,) = manager.take_transfers()
    manager.release(table)
    assert manager.num_used_blocks == 4  # still written to
    manager.check_integrity([table])
    assert manager.finish_transfer(load.id, True) is None
    assert manager.finish_transfer(load.id, True) is None
    assert manager.num_used_blocks == 0
    assert manager.find_stored(table, TOKENS) == 4  # and can be loaded again
    manager.check_integrity([])


def test_no_more_blocks_are_on_the_way_down_than_allowed() -> None:
    manager = make(max_stores=2)
    table = computed(manager, 1, TOKENS)
    other = computed(manager, 2, [50, 51, 52, 53, 54])
    (store,) = manager.take_transfers()
    assert len(store.moves) == 2
    manager.finish_transfer(store.id, True)
    manager.commit(table, TOKENS, 9)  # the next ones
    (store,) = manager.take_transfers()
    assert [source for _, source, _ in store.moves] == table.blocks[2:4]
    manager.check_integrity([table, other])


def test_a_tier_smaller_than_a_sequence_holds_its_beginning() -> None:
    manager = make(num_slots=3)
    table = computed(manager, 1, TOKENS)
    (store,) = manager.take_transfers()
    assert [source for _, source, _ in store.moves] == table.blocks[:3]
    manager.finish_transfer(store.id, True)
    manager.commit(table, TOKENS, 9)
    assert manager.take_transfers() == []  # all slots are the table's own
    manager.release(table)
    evict(manager)
    assert manager.find_stored(testing.BlockTable(2), TOKENS) == 3


def test_the_groups_of_a_prefix_are_loaded_together_and_a_window_only_as_far_as_needed() -> None:
    manager = make(num_blocks=24, windows=[0, 3], num_slots=24)
    table = testing.BlockTable(1)
    manager.attach(table, TOKENS)
    for start in range(0, 8, 2):  # each block leaves the window after the next
        manager.allocate(table, start, 2)
        manager.commit(table, TOKENS, start + 2)
        for store in manager.take_transfers():
            assert [group for group, _, _ in store.moves] == [0, 1]
            manager.finish_transfer(store.id, True)
    manager.release(table)
    evict(manager, 12)
    loaded = testing.BlockTable(2)
    assert manager.load(loaded, TOKENS)
    (load,) = manager.take_transfers()
    assert [group for group, _, _ in load.moves] == [0, 0, 0, 0, 1]
    assert [block == -1 for block in loaded.groups[1]] == [True, True, True, False]
    assert manager.finish_transfer(load.id, False) is loaded
    assert manager.find_stored(loaded, TOKENS) == 0
    manager.check_integrity([loaded])


def test_a_block_that_the_pool_had_beside_one_that_was_loaded_is_the_tables_own() -> None:
    """Of one place the window's block comes from the tier, and the full group's was never gone."""
    manager = make(num_blocks=16, windows=[0, 3])
    table = computed(manager, 1, TOKENS[:8])
    (store,) = manager.take_transfers()
    manager.finish_transfer(store.id, True)
    manager.release(table)
    evict(manager, 6)  # 8 free blocks and the 4 of the window, which went first
    loaded = testing.BlockTable(2)
    assert manager.load(loaded, TOKENS)
    (load,) = manager.take_transfers()
    assert [group for group, _, _ in load.moves] == [1]
    assert manager.finish_transfer(load.id, True) is loaded
    manager.commit(loaded, TOKENS, 8, gives_back=False)
    assert manager.replaced == []
    manager.release(loaded)
    manager.check_integrity([])
    manager.give_back_replaced()
    manager.check_integrity([])
    evict(manager, 8)


def test_without_prefix_caching_there_is_no_tier() -> None:
    manager = make(enable_prefix_caching=False)
    table = computed(manager, 1, TOKENS)
    assert manager.take_transfers() == []
    assert not table.is_moving


def test_a_prefix_is_loaded_where_it_fits() -> None:
    manager = make(num_blocks=6)
    stored(manager, TOKENS)
    running = testing.BlockTable(2, "other")
    manager.allocate(running, 0, 4)
    assert not manager.load(testing.BlockTable(3), TOKENS)  # 5 blocks of 4
    assert manager.take_transfers() == []
    with pytest.raises(errors.InternalError):
        manager.attach(running, TOKENS)
    manager.check_integrity([running])
