"""What speculation gives, from how often drafts are accepted and what the passes cost.

A round drafts tokens, runs the target once over all of them, and keeps those on the longest path
that the target agrees with, and one token more, which is the target's own. How many that are on
average follows from the acceptance; how long it takes, from the passes of drafter and target.
With 10 ms a draft, 40 ms a pass of the target and three of four drafts accepted, chains of 3 are
best, ahead of 25 tokens a second without drafts:

>>> speculation = Speculation(acceptance=0.75, draft_ms=10, target_ms=40)
>>> [round(speculation.chain(k).tokens_per_s, 2) for k in range(7)]
[25.0, 35.0, 38.54, 39.06, 38.13, 36.53, 34.66]
>>> speculation.best_chain().num_drafted
3
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmserve.common.plotting import axes_or_new
from llmserve.errors import InvalidArgument


@dataclass(frozen=True)
class Round:
    """The drafted tokens of a round as a tree, and what the round gives on average.

    `parents[i]` is the drafted token that token i follows, -1 for the last token that is certain,
    and `ranks[i]` says which of its parent's drafts it is: 0 for the most probable one.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    num_draft_passes: int
    tokens: float  # expected: those accepted, and the target's own
    ms: float

    @property
    def num_drafted(self) -> int:
        return len(self.parents)

    @property
    def num_accepted(self) -> float:
        """Expected drafts that are kept."""
        return self.tokens - 1

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.ms * 1e3


@dataclass(frozen=True)
class Speculation:
    """A drafter and a target.

    `acceptance` is the probability that the drafter's first choice is what the target takes, given
    that all before it was; or a sequence of them by rank, whose sum is at most 1: (0.75, 0.1) is a
    drafter whose second choice is right in another tenth of the cases. `draft_ms` is a pass of the
    drafter, `target_ms` one of the target over a single row, `row_ms` what each drafted row adds.
    """

    acceptance: float | Sequence[float]
    draft_ms: float
    target_ms: float
    row_ms: float = 0.0

    def __post_init__(self) -> None:
        by_rank = self.acceptance_by_rank
        if not by_rank or min(by_rank) < 0 or sum(by_rank) > 1:
            raise InvalidArgument(
                "acceptance must be a probability, or probabilities by rank whose sum is at most 1;"
                f" got {self.acceptance}"
            )
        for name, least in (("draft_ms", 0.0), ("target_ms", 1e-9), ("row_ms", 0.0)):
            value = getattr(self, name)
            if not value >= least:
                raise InvalidArgument(f"{name} must be at least {least:g}; got {value}")

    @property
    def acceptance_by_rank(self) -> tuple[float, ...]:
        if isinstance(self.acceptance, (int, float)):
            return (float(self.acceptance),)
        return tuple(float(p) for p in self.acceptance)

    def chain(self, num_tokens: int) -> Round:
        """One draft after another; `num_tokens` = 0 is decoding without drafts. With the acceptance
        a, a chain of k gives (1 - a^(k+1)) / (1 - a) tokens."""
        _check_at_least("num_tokens", num_tokens, 0)
        return self._round(range(-1, num_tokens - 1), [0] * num_tokens, num_tokens)

    def tree(self, num_branches: int = 2, num_levels: int = 3) -> Round:
        """Each draft has `num_branches` drafts after it, down to `num_levels`: 2 and 3 make 14
        drafts and 8 leaves. A level is one pass of the drafter."""
        _check_at_least("num_branches", num_branches, 1)
        _check_at_least("num_levels", num_levels, 1)
        if num_branches**num_levels > 1 << 16:
            raise InvalidArgument("num_branches ** num_levels must be at most 65536")
        parents: list[int] = []
        ranks: list[int] = []
        level = [-1]
        for _ in range(num_levels):
            grown = []
            for parent in level:
                for rank in range(num_branches):
                    grown.append(len(parents))
                    parents.append(parent)
                    ranks.append(rank)
            level = grown
        return self._round(parents, ranks, num_levels)

    def dynamic_tree(self, num_tokens: int, num_levels: int = 3) -> Round:
        """The `num_tokens` drafts that are most probably accepted, down to `num_levels`, as EAGLE-2
        chooses them: by the product of the acceptances along their paths."""
        _check_at_least("num_tokens", num_tokens, 1)
        _check_at_least("num_levels", num_levels, 1)
        by_rank = self.acceptance_by_rank
        parents: list[int] = []
        ranks: list[int] = []
        depth = 0
        heap = [(-p, -1, rank, 1) for rank, p in enumerate(by_rank)]
        heapq.heapify(heap)
        while heap and len(parents) < num_tokens:
            probability, parent, rank, level = heapq.heappop(heap)
            if level < num_levels:
                for next_rank, p in enumerate(by_rank):
                    heapq.heappush(heap, (probability * p, len(parents), next_rank, level + 1))
            parents.append(parent)
            ranks.append(rank)
            depth = max(depth, level)
        return self._round(parents, ranks, depth)

    def best_chain(self, max_tokens: int = 16) -> Round:
        """The chain that gives most tokens a second; of equals the shortest."""
        return max(
            (self.chain(k) for k in range(max_tokens + 1)), key=lambda chain: chain.tokens_per_s
        )

    def simulate(self, drafted: Round, num_rounds: int = 10_000, seed: int = 0) -> float:
        """Tokens a round on average over `num_rounds` drawn ones: what the formula says, by another
        way. A choice of the target falls on one of a token's drafts, by rank, or on none."""
        _check_at_least("num_rounds", num_rounds, 1)
        children: dict[tuple[int, int], int] = {
            key: i for i, key in enumerate(zip(drafted.parents, drafted.ranks, strict=True))
        }
        by_rank = self.acceptance_by_rank
        source = random.Random(seed)
        tokens = 0
        for _ in range(num_rounds):
            at: int | None = -1
            while at is not None:
                tokens += 1  # the target's choice after `at`
                draw = source.random()
                rank = 0
                while rank < len(by_rank) and draw >= by_rank[rank]:
                    draw -= by_rank[rank]
                    rank += 1
                at = children.get((at, rank))
        return tokens / num_rounds

    def plot(self, max_tokens: int = 8, *, axes: Any = None) -> Any:
        """Tokens a second over the length of a chain, beside trees of as many drafts and decoding
        without drafts. Returns matplotlib's axes; raises NotSupported without matplotlib."""
        _check_at_least("max_tokens", max_tokens, 1)
        axes = axes_or_new(axes)
        lengths = list(range(1, max_tokens + 1))
        axes.plot(lengths, [self.chain(k).tokens_per_s for k in lengths], marker="o", label="chain")
        if len(self.acceptance_by_rank) > 1:
            trees = [self.dynamic_tree(k).tokens_per_s for k in lengths]
            axes.plot(lengths, trees, marker="s", label="tree of 3 levels")
        best = self.best_chain(max_tokens)
        if best.num_drafted > 0:
            axes.annotate(f"best: {best.num_drafted}", (best.num_drafted, best.tokens_per_s))
        axes.axhline(self.chain(0).tokens_per_s, linestyle="--", linewidth=1, label="no drafts")
        axes.set_xlabel("drafted tokens a round")
        axes.set_ylabel("tokens a second")
        axes.legend()
        return axes

    def _round(self, parents: Sequence[int], ranks: Sequence[int], num_draft_passes: int) -> Round:
        by_rank = self.acceptance_by_rank
        reached: list[float] = []  # probability that a draft and all before it are accepted
        for parent, rank in zip(parents, ranks, strict=True):
            before = 1.0 if parent < 0 else reached[parent]
            reached.append(before * (by_rank[rank] if rank < len(by_rank) else 0.0))
        return Round(
            parents=tuple(parents),
            ranks=tuple(ranks),
            num_draft_passes=num_draft_passes,
            tokens=1 + sum(reached),
            ms=num_draft_passes * self.draft_ms + self.target_ms + len(reached) * self.row_ms,
        )


def _check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise InvalidArgument(f"{name} must be at least {least}; got {value}")
