"""Kinds of numbers that weights can be, and how their scales lie.

Letters: N out, K in, G groups of a row.
"""

from dataclasses import dataclass
from typing import Literal

from llmserve.errors import NotSupported

Kind = Literal["int", "fp8", "nvfp4", "mxfp4"]
BLOCK = 128  # rows and columns that share a scale, where blocks do


@dataclass(frozen=True, slots=True)
class Grid:
    """A kind of numbers and how its scales lie.

    group_size: elements of K that share a scale; 0 is the whole row. is_block: a scale for 128 rows
    of a group of 128. Integers are signed: value = scale * (q - zero), zero 0 where is_symmetric.
    """

    kind: Kind
    bits: int
    group_size: int = 0
    is_symmetric: bool = True
    is_block: bool = False

    def num_groups(self, k: int) -> int:
        """G of rows of K elements."""
        return 1 if self.group_size == 0 else -(-k // self.group_size)

    def check_fits(self, name: str, k: int) -> None:
        """Raises NotSupported unless rows of K go in whole groups; blocks may be partial."""
        if self.group_size and not self.is_block and k % self.group_size:
            raise NotSupported(
                f"{name}: rows of {k} weights do not go in groups of {self.group_size}; pass "
                f"--group-size with a divisor, or --ignore {name.removesuffix('.weight')}"
            )

    def bits_per_weight(self, k: int) -> float:
        """Of codes and scales, of rows of K elements."""
        scale_bits = {"int": 16, "fp8": 16, "nvfp4": 8, "mxfp4": 8}[self.kind]
        if not self.is_symmetric:
            scale_bits += self.bits
        rows = BLOCK if self.is_block else 1
        return self.bits + scale_bits * self.num_groups(k) / k / rows

    @property
    def lowest(self) -> int:
        """Of signed integers."""
        return -(1 << (self.bits - 1))

    @property
    def highest(self) -> int:
        """Of signed integers."""
        return (1 << (self.bits - 1)) - 1
