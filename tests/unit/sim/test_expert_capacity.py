"""Experts on several devices, in numbers: capacity, replicas, balance."""

from __future__ import annotations

import random

import pytest
from checkpoints import checkpoint
from llmserve import LLM, SamplingParams
from llmserve.errors import InvalidArgument
from llmserve.plan import load_balance
from llmserve.sim.experts import ExpertTraffic, simulate_experts


def test_each_token_is_given_so_many_experts_and_popular_ones_more() -> None:
    even = ExpertTraffic(16, 3, 200).steps(5)
    skewed = ExpertTraffic(16, 3, 200, skew=1.2).steps(5)
    for steps in (even, skewed):
        assert [sum(loads) for loads in steps] == [600] * 5
        assert max(max(loads) for loads in steps) <= 200  # once a token at most
    assert all(load_balance(a) < load_balance(b) for a, b in zip(even, skewed, strict=True))
    assert ExpertTraffic(16, 3, 200, skew=1.2).steps(5) == skewed
    assert ExpertTraffic(16, 3, 200, skew=1.2).steps(5, seed=1) != skewed
    assert ExpertTraffic(4, 4, 7, skew=2.0).steps(1) == [[7] * 4]


def test_the_excess_of_a_busy_expert_goes_to_replicas() -> None:
    # An even share is 25 rows, the room 30: 60 more go to two copies beside the first.
    found = simulate_experts([[90, 4, 3, 3]], num_devices=2, factor=1.2)
    assert found.copies == (3, 1, 1, 1)
    assert (found.num_replicas, found.num_moved, found.num_rows) == (2, 60, 100)
    # The devices have 34 and 6 rows of their own; a replica goes to where fewer are by then.
    assert found.balance == found.worst_balance == pytest.approx(64 / 50)
    alone = simulate_experts([[90, 4, 3, 3]], num_devices=2, factor=None)
    assert alone.balance == pytest.approx(94 / 50)
    assert (alone.num_replicas, alone.num_moved) == (0, 0)


@pytest.mark.parametrize("seed", range(20))
def test_no_row_is_left_out_and_no_copy_is_fuller_than_its_room(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.randint(1, 40)
    steps = [[int(rng.expovariate(0.05)) for _ in range(n)] for _ in range(rng.randint(1, 4))]
    factor = rng.choice([1.0, 1.2, 1.25, 1.5, 3.0])
    devices = rng.randint(1, n)
    found = simulate_experts(steps, devices, factor)
    assert found.num_rows == sum(map(sum, steps))
    assert 1.0 <= found.balance <= found.worst_balance <= devices + 1e-9
    for loads in steps:
        room = -(-sum(loads) * factor // n)
        assert all(copies * room >= load for copies, load in zip(found.copies, loads, strict=True))
    if devices == 1:
        assert found.worst_balance == pytest.approx(1.0)


def test_a_smaller_factor_evens_out_more_and_takes_more_replicas() -> None:
    steps = ExpertTraffic(64, 8, 256, skew=1.0).steps(8)
    found = [simulate_experts(steps, 8, factor) for factor in (None, 2.0, 1.5, 1.2)]
    balances = [each.balance for each in found]
    assert balances == sorted(balances, reverse=True)
    replicas = [each.num_replicas for each in found]
    assert replicas == sorted(replicas)
    assert found[-1].balance < 1.2 < found[0].balance


def test_what_a_model_counted_may_be_simulated() -> None:
    options = {"num_threads": 1, "num_gpu_blocks_override": 32}
    with LLM(checkpoint("olmoe"), count_expert_loads=True, **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, detokenize=False, ignore_eos=True)
        llm.generate([[5, 9, 200, 31]], params, use_tqdm=False)
        layers = [*llm.expert_loads().values()]
    found = simulate_experts(layers, num_devices=2, factor=1.2)
    assert found.num_rows == 3 * 7 * len(layers)


def test_steps_without_rows_are_even() -> None:
    assert simulate_experts([[0, 0]], 2).balance == 1.0


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: simulate_experts([], 1), "steps: expected"),
        (lambda: simulate_experts([[1, 2], [1]], 1), "steps: expected 2 experts in each, got 1"),
        (lambda: simulate_experts([[1, -2]], 1), "steps"),
        (lambda: simulate_experts([[1, 2]], 3), "num_devices"),
        (lambda: simulate_experts([[1, 2]], 1, 0.5), "factor: expected at least 1"),
        (lambda: ExpertTraffic(4, 5, 1), "experts_per_token"),
        (lambda: ExpertTraffic(4, 2, 1, skew=-1.0), "skew"),
    ],
)
def test_what_makes_no_sense_is_refused(call, match) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises((InvalidArgument, ValueError), match=match):
        call()
