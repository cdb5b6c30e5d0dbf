"""How many tokens are guessed: by acceptance and by what steps take, in simulated time."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from llmserve import _core
from llmserve import _core_testing as testing

MAX_TOKENS = 32
# A bf16 model of a billion weights on two cores: 67 ms for its weights, 5.2 ms a row.
STEP_US, ROW_US = 67_000.0, 5_200.0


def controller(num_sequences: int = 1, **settings: Any) -> testing.SpeculationController:
    config = _core.SpeculationConfig(**{"method": "ngram", "num_speculative_tokens": 8, **settings})
    return testing.SpeculationController(config, num_sequences)


class Replay:
    """A controller in company of sequences whose guesses are right by chance."""

    def __init__(self, num_sequences: int = 1, **settings: Any) -> None:
        self.controller = controller(num_sequences, **settings)
        self.num_sequences = num_sequences
        self.random = random.Random(1)

    def run(
        self,
        num_steps: int,
        rate: float | Callable[[int], float],
        step_us: float = STEP_US,
        row_us: float = ROW_US,
        draft_us: float = 0.0,
    ) -> tuple[float, list[int]]:
        """(speed by that of plain steps, guesses of the first sequence by step)."""
        num_tokens, elapsed_us, planned = 0, 0.0, []
        for _ in range(num_steps):
            accepted = [
                [
                    self.random.random() < (rate(place) if callable(rate) else rate)
                    for place in range(MAX_TOKENS)
                ]
                for _ in range(self.num_sequences)
            ]
            tokens, us = self.controller.step(accepted, step_us, row_us, draft_us)
            num_tokens, elapsed_us = num_tokens + tokens, elapsed_us + us
            planned.append(self.controller.planned()[0])
        plain_us = (step_us + row_us * self.num_sequences) / self.num_sequences
        return num_tokens / elapsed_us * plain_us, planned


def test_a_good_drafter_is_used_in_full_where_rows_are_nearly_free() -> None:
    speed, planned = Replay().run(400, 0.8)
    assert speed > 2.2
    assert max(planned) == 8


def test_a_hopeless_drafter_is_left_alone_at_hardly_any_cost() -> None:
    for num_sequences in (1, 16):
        speed, planned = Replay(num_sequences).run(2000, 0.0, draft_us=0.1 * STEP_US)
        assert speed > 0.98
        assert planned.count(0) > 0.9 * len(planned)


def test_guessing_ends_where_rows_are_dear() -> None:
    """A batch whose arithmetic is the bound: a row costs what a token gives."""
    speed, planned = Replay(32).run(400, 0.6, step_us=1000, row_us=5000)
    assert speed > 0.97
    assert sum(planned[100:]) / len(planned[100:]) < 0.5


def test_it_begins_again_when_guesses_are_right_again() -> None:
    replay = Replay()
    draft_us = 0.1 * STEP_US
    good, _ = replay.run(300, 0.8, draft_us=draft_us)
    bad, planned = replay.run(1000, 0.1, draft_us=draft_us)
    assert bad > 0.97
    assert planned[500:].count(0) > 450
    again, planned = replay.run(1200, 0.8, draft_us=draft_us)
    first = next(step for step, count in enumerate(planned) if count > 3)
    assert first <= 2 * 256 + 6  # the longest interval between two trials, twice
    assert good > 1.5
    assert again > 1


@pytest.mark.parametrize("k", [1, 3, 8])
def test_no_more_than_was_asked_for(k: int) -> None:
    _, planned = Replay(num_speculative_tokens=k).run(100, 0.95)
    assert max(planned) == k


def test_without_adapting_it_is_as_many_as_are_allowed() -> None:
    _, planned = Replay(adaptive=False).run(50, 0.0)
    assert set(planned) == {8}


def test_the_number_by_batch_size_holds() -> None:
    ranges = [[1, 4, 3], [5, 8, 1]]
    for num_sequences, most in ((2, 3), (6, 1), (9, 8)):
        settings = {"num_speculative_tokens_per_batch_size": ranges, "adaptive": False}
        _, planned = Replay(num_sequences, **settings).run(5, 0.9)
        assert set(planned) == {most}
    _, planned = Replay(4, disable_by_batch_size=3, adaptive=False).run(5, 0.9)
    assert set(planned) == {0}


def test_later_places_that_are_seldom_right_are_not_guessed() -> None:
    _, planned = Replay().run(600, lambda place: 0.9 if place < 2 else 0.0)
    assert sum(planned[300:]) / 300 < 4


def test_a_slow_draft_model_guesses_fewer_tokens() -> None:
    _, cheap = Replay().run(600, 0.7, draft_us=0.02 * STEP_US)
    _, dear = Replay().run(600, 0.7, draft_us=0.4 * STEP_US)
    assert sum(dear[300:]) < sum(cheap[300:])


@pytest.mark.parametrize("seed", range(12))
def test_a_step_that_was_held_up_does_not_keep_its_number_of_guesses_from_being_chosen(
    seed: int,
) -> None:
    """One step in ten takes up to eight times as long, whatever it runs. By the times that steps
    take undisturbed the best that can be is 2.6 times the speed of plain steps."""
    rng = random.Random(seed)
    guesser = controller(num_speculative_tokens=4)
    base_us, row_us, draft_us = 67.0, 3.0, 2.0
    num_tokens, undisturbed_us = 0, 0.0
    for _ in range(1500):
        accepted = [[rng.random() < 0.8 for _ in range(MAX_TOKENS)]]
        held_up = rng.choice([1.5, 3, 8]) if rng.random() < 0.1 else 1.0
        longer = held_up * (1 + abs(rng.gauss(0, 0.1)))
        tokens, _ = guesser.step(accepted, base_us * longer, row_us * longer, draft_us * longer)
        count = guesser.planned()[0]
        num_tokens += tokens
        undisturbed_us += base_us + row_us * (1 + count) + draft_us * count
    assert num_tokens / undisturbed_us * (base_us + row_us) > 2.1
