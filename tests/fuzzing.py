"""Fuzzing by mutation: a reader's test is run on many files made from one good file."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CASES_A_SEED = 50  # a case takes less time than hypothesis takes for a seed


def fuzzed(num_cases: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs a test of `seed` until `mutations(..., seed)` has given so many cases."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        run = settings(
            max_examples=num_cases // CASES_A_SEED,
            deadline=None,
            suppress_health_check=[HealthCheck.function_scoped_fixture],
        )
        return run(given(seed=st.integers(0, 2**32 - 1))(test))

    return decorate


def mutations(mutate: Callable[[random.Random], bytes], seed: int) -> Iterator[bytes]:
    rng = random.Random(seed)
    for _ in range(CASES_A_SEED):
        yield mutate(rng)
