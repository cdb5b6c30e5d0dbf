"""The threads of the cpu backend: every index has one of them, also after they have slept."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from llmserve import InvalidArgument, ResourceExhausted, _core_testing

ThreadPool = _core_testing.ThreadPool
DEADLINE_S = 60.0


def wait_until_parked(pool: ThreadPool, num_threads: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while pool.num_parked < num_threads:
        assert time.monotonic() < deadline, "an idle pool sleeps"
        time.sleep(0.0001)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 7])
def test_every_index_has_one_thread_and_cuts_fall_on_the_grain(num_threads: int) -> None:
    pool = ThreadPool(num_threads)
    for count in (0, 1, 2, 5, 6, 7, 8, 63, 97, 1000):
        for grain in (1, 2, 3, 16, 97, 999, 2000):
            owners = pool.owners(count, grain)
            assert len(owners) == count
            assert owners == sorted(owners), "parts in the order of the threads"
            assert set(owners) <= set(range(num_threads))
            cuts = [i for i in range(1, count) if owners[i] != owners[i - 1]]
            assert all(cut % grain == 0 for cut in cuts)
            if count > grain:
                grains = Counter(owners[::grain])
                shares = [grains[thread] for thread in range(num_threads)]
                assert max(shares) - min(shares) <= 1
            assert pool.owners(count, grain) == owners, "a range is cut by its length alone"


def test_what_is_no_more_than_a_grain_is_the_callers() -> None:
    pool = ThreadPool(3)
    assert pool.owners(16, 16) == [0] * 16
    assert set(pool.owners(17, 16)) == {1, 2}


@pytest.mark.parametrize("num_threads", [1, 2, 3, 7])
def test_pieces_cover_every_index_once(num_threads: int) -> None:
    pool = ThreadPool(num_threads)
    for count in (0, 1, 5, 63, 97, 1000):
        for grain, max_piece in ((1, 1), (1, 8), (4, 32), (3, 30), (2000, 2000)):
            pieces = sorted(pool.pieces(count, grain, max_piece))
            assert [begin for begin, _, _ in pieces] == [0, *(end for _, end, _ in pieces)][:-1]
            assert sum(end - begin for begin, end, _ in pieces) == count
            if num_threads > 1 and count > grain:
                assert all(end - begin <= max_piece for begin, end, _ in pieces)
                short = [piece for piece in pieces if piece[1] - piece[0] < grain]
                assert len(short) <= num_threads, "one at the end of a part"


def test_a_thread_that_falls_behind_keeps_one_piece() -> None:
    pool = ThreadPool(3)
    for held_thread in range(3):
        for _ in range(50):
            pieces = pool.pieces(300, 4, 32, held_thread)
            own = [piece for piece in pieces if piece[2] == held_thread]
            if own:  # or the others were quicker altogether
                assert len(own) == 1
                assert pieces[-1] == own[0]


def test_threads_that_sleep_wake_for_their_parts() -> None:
    pool = ThreadPool(4)
    expected = [i // 25 for i in range(100)]
    for _ in range(30):
        wait_until_parked(pool, 3)
        assert pool.owners(100, 1) == expected
        assert pool.owners(100, 1) == expected, "while they are awake"


def test_more_threads_than_cores_finish_many_short_runs() -> None:
    pool = ThreadPool(9)
    for i in range(300):
        assert pool.owners(9, 1) == list(range(9)), i


def test_a_pool_ends_whether_its_threads_are_new_awake_or_asleep() -> None:
    for num_threads in (1, 2, 5):
        ThreadPool(num_threads)
        awake = ThreadPool(num_threads)
        awake.owners(10, 1)
        del awake
        asleep = ThreadPool(num_threads)
        wait_until_parked(asleep, num_threads - 1)
        del asleep


def test_a_pool_has_a_thread_at_least() -> None:
    with pytest.raises(InvalidArgument, match="num_threads must be at least 1, got 0"):
        ThreadPool(0)


@pytest.mark.parametrize("failing", [[0], [1], [2], [0, 1, 2]])
def test_what_a_part_throws_is_the_callers_once_all_are_done(failing: list[int]) -> None:
    pool = ThreadPool(3)
    for _ in range(20):
        with pytest.raises(ResourceExhausted, match="no more memory"):
            pool.fail(failing)
        assert pool.fail([]) == 3
    assert pool.owners(3, 1) == [0, 1, 2]
