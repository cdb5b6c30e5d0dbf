"""Mixtures of experts in numbers: how many are read, how evenly they are used, how much room an
expert's share of a step takes.

A token is given k of n experts, and none is ever left out: what an expert cannot take goes to a
replica.
"""

from collections.abc import Sequence

from llmserve.common.arguments import integer
from llmserve.errors import InvalidArgument


def active_experts(num_experts: int, experts_per_token: int, num_tokens: int) -> float:
    """Experts that a step of so many tokens reads on average, if all are equally likely and tokens
    are given theirs independently: n (1 - (1 - k / n)^T).

    >>> [round(active_experts(128, 8, tokens)) for tokens in (1, 4, 8, 16)]
    [8, 29, 52, 82]
    """
    n, k = _counts(num_experts, experts_per_token)
    tokens = integer("num_tokens", num_tokens, 0, 2**63 - 1)
    return n * (1.0 - (1.0 - k / n) ** tokens)


def expert_capacity(
    num_experts: int, experts_per_token: int, num_tokens: int, factor: float = 1.25
) -> int:
    """Rows that an expert has room for in a step: `factor` times its share of an even spread,
    rounded up. 1.2 to 1.5 are usual.

    >>> expert_capacity(128, 8, 512, factor=1.25)
    40
    """
    n, k = _counts(num_experts, experts_per_token)
    tokens = integer("num_tokens", num_tokens, 0, 2**63 - 1)
    if not 1.0 <= factor < float("inf"):
        raise InvalidArgument(f"factor: expected at least 1, got {factor}")
    share = tokens * k
    rows = int(share * factor / n)
    return rows if rows * n >= share * factor else rows + 1


def replicas_needed(loads: Sequence[int], capacity: int) -> list[int]:
    """Copies of each expert that its rows fill at most to `capacity`: the excess goes to a replica,
    and no row is left out. An idle expert needs none.

    >>> replicas_needed([40, 41, 0, 100], capacity=40)
    [1, 2, 0, 3]
    """
    most = integer("capacity", capacity, 1, 2**63 - 1)
    return [-(-integer("loads", load, 0, 2**63 - 1) // most) for load in loads]


def load_balance(loads: Sequence[int]) -> float:
    """The busiest expert's rows over those of the mean: 1 is even, n is one expert for all. 1 where
    there are no rows.

    >>> load_balance([10, 30, 20, 20])
    1.5
    """
    total = sum(integer("loads", load, 0, 2**63 - 1) for load in loads)
    return max(loads) * len(loads) / total if total else 1.0


def _counts(num_experts: int, experts_per_token: int) -> tuple[int, int]:
    n = integer("num_experts", num_experts, 1, 2**31 - 1)
    return n, integer("experts_per_token", experts_per_token, 1, n)
