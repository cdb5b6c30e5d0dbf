"""What a capacity factor gives where experts lie on several devices: how much the busiest device
has to do, and how many replicas that takes.

A step gives each expert its rows. Every copy of an expert takes at most `capacity` of them, the
capacity factor times an even share, and what is beyond goes to a replica: no row is left out. A
device waits for the busiest one, so that a step lasts as its rows over those of the mean.

>>> traffic = ExpertTraffic(num_experts=64, experts_per_token=8, num_tokens=512, skew=0.6)
>>> steps = traffic.steps(num_steps=20)
>>> whole, bounded = (simulate_experts(steps, 8, factor) for factor in (None, 1.25))
>>> whole.num_rows == bounded.num_rows == 20 * 512 * 8
True
>>> bounded.balance < whole.balance
True
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from llmserve.common.arguments import integer
from llmserve.errors import InvalidArgument
from llmserve.plan.experts import expert_capacity, replicas_needed


@dataclass(frozen=True, slots=True)
class ExpertTraffic:
    """Steps of `num_tokens` tokens that are given `experts_per_token` different experts each.

    The expert of rank r is as popular as (r + 1)^-skew: 0 is even, 1 is Zipf's law.
    """

    num_experts: int
    experts_per_token: int
    num_tokens: int
    skew: float = 0.0

    def __post_init__(self) -> None:
        integer("num_experts", self.num_experts, 1, 1 << 16)
        integer("experts_per_token", self.experts_per_token, 1, self.num_experts)
        integer("num_tokens", self.num_tokens, 1, 1 << 20)
        if not 0.0 <= self.skew <= 10.0:
            raise InvalidArgument(f"skew: expected 0 to 10, got {self.skew}")

    def steps(self, num_steps: int, seed: int = 0) -> list[list[int]]:
        """Rows of each expert [X] in each step. Which experts are popular depends on the seed."""
        integer("num_steps", num_steps, 1, 1 << 20)
        rng = random.Random(seed)
        order = list(range(self.num_experts))
        rng.shuffle(order)
        weights = [0.0] * self.num_experts
        for rank, expert in enumerate(order):
            weights[expert] = (rank + 1.0) ** -self.skew
        return [self._step(weights, rng) for _ in range(num_steps)]

    def _step(self, weights: Sequence[float], rng: random.Random) -> list[int]:
        loads = [0] * self.num_experts
        if self.skew == 0:
            for _ in range(self.num_tokens):
                for expert in rng.sample(range(self.num_experts), self.experts_per_token):
                    loads[expert] += 1
            return loads
        # The k largest of log(u) / w are k draws without putting back (Efraimidis, Spirakis 2006).
        for _ in range(self.num_tokens):
            keys = [(math.log(1.0 - rng.random()) / w, i) for i, w in enumerate(weights)]
            for _, expert in heapq.nlargest(self.experts_per_token, keys):
                loads[expert] += 1
        return loads


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """What `simulate_experts` found."""

    num_devices: int
    num_rows: int  # of all steps, none left out
    num_moved: int  # rows that went to a replica
    copies: tuple[int, ...]  # of each expert, those that the fullest step needs; 1 at least
    balance: float  # rows of the busiest device over those of the mean, on average over steps
    worst_balance: float  # of the worst step

    @property
    def num_replicas(self) -> int:
        """Copies beside the first of each expert, which take memory of their own."""
        return sum(self.copies) - len(self.copies)


def simulate_experts(
    steps: Sequence[Sequence[int]],
    num_devices: int,
    factor: float | None = 1.25,
    min_capacity: int = 1,
) -> ExpertPlacement:
    """Places the experts of `steps` (rows of each expert [X] in each step, such as those of
    `LLM.expert_loads()`, a layer at a time) on devices and adds up what each has to do.

    Experts lie on the devices in blocks, as expert parallelism has them. `factor` is the capacity
    factor, 1.2 to 1.5 as a rule; rows beyond an expert's room go to replicas, each on the device
    that has the fewest rows of the step. None: there are no replicas. `min_capacity` is room that
    every copy has: `enable_eplb` of an LLM gives 16 rows, below which a replica would only read
    the weights once more.

    Raises InvalidArgument, naming what is wrong.
    """
    if not steps or not steps[0]:
        raise InvalidArgument("steps: expected the rows of each expert in each step, got none")
    num_experts = len(steps[0])
    integer("num_devices", num_devices, 1, num_experts)
    integer("min_capacity", min_capacity, 1, 1 << 30)
    copies = [1] * num_experts
    balances = []
    num_moved = num_rows = 0
    for loads in steps:
        if len(loads) != num_experts:
            raise InvalidArgument(
                f"steps: expected {num_experts} experts in each, got {len(loads)}"
            )
        total = sum(integer("steps", load, 0, 2**62) for load in loads)
        num_rows += total
        if not total:
            continue
        # Rows, not tokens, are spread: an even share of them is that of one expert a row.
        capacity = total
        if factor is not None:
            capacity = max(min_capacity, expert_capacity(num_experts, 1, total, factor))
        needed = replicas_needed(loads, capacity)
        copies = [max(most, now) for most, now in zip(copies, needed, strict=True)]
        excess = [max(0, load - capacity) for load in loads]
        num_moved += sum(excess)
        balances.append(_balance(loads, excess, capacity, num_devices))
    mean = sum(balances) / len(balances) if balances else 1.0
    worst = max(balances, default=1.0)
    return ExpertPlacement(num_devices, num_rows, num_moved, tuple(copies), mean, worst)


def _balance(loads: Sequence[int], excess: Sequence[int], capacity: int, num_devices: int) -> float:
    """Rows of the busiest device over those of the mean."""
    bounds = list(
        accumulate([0] + [_share(len(loads), num_devices, d) for d in range(num_devices)])
    )
    own = [load - more for load, more in zip(loads, excess, strict=True)]
    rows = [(sum(own[a:b]), d) for d, (a, b) in enumerate(pairwise(bounds))]
    heapq.heapify(rows)
    # A replica is as full as an expert may be, but the last of each.
    for left in sorted(excess, reverse=True):
        while left > 0:
            part = min(left, capacity)
            fewest, device = heapq.heappop(rows)
            heapq.heappush(rows, (fewest + part, device))
            left -= part
    return max(rows)[0] * num_devices / sum(loads)


def _share(num_experts: int, num_devices: int, device: int) -> int:
    """Experts of a device: blocks that differ by one at most."""
    return num_experts // num_devices + (device < num_experts % num_devices)
