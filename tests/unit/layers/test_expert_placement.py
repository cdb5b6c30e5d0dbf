"""On which ranks experts run, and which rank runs which row: every row, evenly, and alike."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from llmserve import _core_testing
from llmserve.plan import expert_capacity, load_balance
from llmserve.sim.experts import ExpertTraffic, simulate_experts

MIN_ROWS = 16  # that a copy has room for in any step


def blocks(num_experts: int, num_ranks: int) -> list[list[int]]:
    return _core_testing.place_experts(num_experts, num_ranks, [])


def test_experts_begin_in_blocks_that_differ_by_one_at_most() -> None:
    assert blocks(7, 3) == [[0], [0], [0], [1], [1], [2], [2]]
    assert blocks(4, 4) == [[0], [1], [2], [3]]


def test_loads_that_are_even_move_nothing() -> None:
    assert _core_testing.place_experts(12, 3, [[10] * 12]) == blocks(12, 3)
    assert _core_testing.place_experts(5, 2, [[0] * 5]) == blocks(5, 2)


def test_crowded_experts_are_spread_over_ranks_and_the_others_stay() -> None:
    placed = _core_testing.place_experts(8, 2, [[90, 80, 5, 5, 5, 5, 5, 5]])
    rows = Counter[int]()
    for load, (rank,) in zip([90, 80, 5, 5, 5, 5, 5, 5], placed, strict=True):
        rows[rank] += load
    assert max(rows.values()) <= 105
    assert placed[0] == [0]
    assert placed[1] == [1]
    # Later loads count from the blocks on again: what needs no other place goes home.
    assert _core_testing.place_experts(8, 2, [[90, 80] + [5] * 6, [10] * 8]) == blocks(8, 2)


def test_redundant_copies_are_of_the_busiest_experts_on_ranks_of_their_own() -> None:
    placed = _core_testing.place_experts(6, 3, [[300, 30, 30, 30, 30, 30]], 2)
    assert sorted(placed[0]) == [0, 1, 2]
    assert all(len(copies) == 1 for copies in placed[1:])
    everywhere = _core_testing.place_experts(3, 2, [[1, 1, 1]], 3)
    assert [sorted(copies) for copies in everywhere] == [[0, 1]] * 3


@pytest.mark.parametrize("seed", range(60))
def test_every_row_runs_on_one_rank_and_no_copy_is_fuller_than_its_room(seed: int) -> None:
    rng = random.Random(seed)
    num_experts = rng.randint(1, 40)
    num_ranks = rng.randint(1, min(5, num_experts))
    num_rows = rng.choice([0, 1, 7, 64, 900, 4000])
    weights = [rng.expovariate(1.0) ** 2 for _ in range(num_experts)]
    ids = rng.choices(range(num_experts), weights, k=num_rows)
    loads = [int(100 * w) for w in weights] if rng.random() < 0.7 else []
    redundant = rng.choice([0, 1, 5]) if loads else 0
    factor = rng.choice([0.0, 1.0, 1.2, 1.25, 1.5])
    copies, ranks = _core_testing.assign_rows(ids, num_experts, num_ranks, loads, redundant, factor)
    assert len(ranks) == num_rows
    assert all(0 <= rank < num_ranks for rank in ranks)
    assert all(len(set(of)) == len(of) >= 1 for of in copies)
    spread = sum(map(len, copies)) - num_experts
    assert spread == min(redundant, num_experts * (num_ranks - 1))
    again = _core_testing.assign_rows(ids, num_experts, num_ranks, loads, redundant, factor)
    assert again == (copies, ranks)
    for expert, of in enumerate(copies):
        mine = [rank for id, rank in zip(ids, ranks, strict=True) if id == expert]
        share = len(mine) // len(of)
        if factor == 0.0:  # copies share rows evenly, in their order
            assert [mine.count(rank) - share in (0, 1) for rank in of] == [True] * len(of)
            assert mine == [rank for rank in of for _ in range(mine.count(rank))]
        else:
            room = max(MIN_ROWS, expert_capacity(num_experts, 1, num_rows, factor))
            assert all(mine.count(rank) >= min(share, room) for rank in of)


@pytest.mark.parametrize("skew", [0.0, 0.8, 1.5])
@pytest.mark.parametrize("factor", [1.2, 1.5])
def test_ranks_are_as_even_as_the_simulator_says(skew: float, factor: float) -> None:
    """Parts of an excess are the same, and so is where they go."""
    (loads,) = ExpertTraffic(24, 3, 400, skew=skew).steps(1)
    ids = [expert for expert, load in enumerate(loads) for _ in range(load)]
    random.Random(1).shuffle(ids)
    _, ranks = _core_testing.assign_rows(ids, 24, 4, [], 0, factor)
    told = simulate_experts([loads], 4, factor, min_capacity=MIN_ROWS)
    assert load_balance([ranks.count(rank) for rank in range(4)]) == pytest.approx(told.balance)


@pytest.mark.parametrize(("num_experts", "num_ranks"), [(8, 2), (7, 3), (9, 4)])
def test_experts_move_to_places_that_ranks_have_room_for(num_experts: int, num_ranks: int) -> None:
    rng = random.Random(num_experts)
    loads = [[rng.randrange(100) for _ in range(num_experts)] for _ in range(6)]
    loads.append([0] * num_experts)
    homes = blocks(num_experts, num_ranks)
    places: list[list[int]] = [
        [e for e in range(num_experts) if homes[e] == [rank]] for rank in range(num_ranks)
    ]
    packings = _core_testing.move_experts(num_experts, num_ranks, loads, 0)
    for homes, moves, tables in packings:
        before = [list(of) for of in places]
        for from_rank, from_place, to_rank, to_place in moves:
            assert before[from_rank][from_place] >= 0
            places[to_rank][to_place] = before[from_rank][from_place]
        assert sum(len(ranks) for ranks in homes) <= num_experts
        for expert, ranks in enumerate(homes):
            assert len(set(ranks)) == len(ranks) >= 1
            for rank in range(num_ranks):
                count, copy, place = tables[rank][3 * expert : 3 * expert + 3]
                assert count == len(ranks)
                if rank in ranks:
                    assert ranks[copy] == rank
                    assert places[rank][place] == expert
                else:
                    assert (copy, place) == (-1, -1)
    assert any(moves for _, moves, _ in packings)


def test_experts_that_stay_where_they_run_do_not_move() -> None:
    loads = [10, 20, 30, 40, 50, 60, 70, 80]
    (_, first, _), (_, again, _) = _core_testing.move_experts(8, 2, [loads, loads], 0)
    assert len(first) > 0
    assert again == []
