"""Runs a model of the extension's testing module on sequences, laying out blocks and slots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llmserve import _core_testing


class PagedRunner:
    """Sequences in one paged cache; blocks are handed out in a scrambled order on purpose."""

    def __init__(self, path: Path, *, block_size: int = 16, num_blocks: int = 64, **options: Any):
        self.model = _core_testing.Model(
            str(path), block_size=block_size, num_blocks=num_blocks, **options
        )
        self._block_size = block_size
        order = np.random.default_rng(0).permutation(num_blocks)
        self._free = [int(block) for block in order]
        self._tables: list[list[int]] = []
        self._lengths: list[int] = []

    def add_sequence(self) -> int:
        self._tables.append([])
        self._lengths.append(0)
        return len(self._tables) - 1

    def step(
        self,
        parts: Sequence[tuple[int, Sequence[int]]],
        wanted_layers: Sequence[int] = (),
        wanted_tokens: Sequence[int] = (),
    ) -> tuple[np.ndarray, np.ndarray]:
        """Runs (sequence, tokens) parts as one ragged batch; hidden [T, E] and logits [T, V]."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for sequence, tokens in parts:
            table = self._tables[sequence]
            for token in tokens:
                position = self._lengths[sequence]
                if position == len(table) * self._block_size:
                    table.append(self._free.pop())
                token_ids.append(token)
                positions.append(position)
                block = table[position // self._block_size]
                slots.append(block * self._block_size + position % self._block_size)
                self._lengths[sequence] += 1
            starts.append(len(token_ids))
        tables = [self._tables[sequence] for sequence, _ in parts]
        width = max(len(table) for table in tables)
        return self.model.forward(
            token_ids,
            positions,
            slots,
            starts,
            [self._lengths[sequence] for sequence, _ in parts],
            np.array([table + [0] * (width - len(table)) for table in tables], dtype=np.int32),
            list(range(len(token_ids))),
            list(wanted_layers),
            list(wanted_tokens),
        )

    def run(self, tokens: Sequence[int], chunks: Sequence[int] = ()) -> np.ndarray:
        """Logits [T, V] of a new sequence, whole or in chunks of the given lengths."""
        sequence = self.add_sequence()
        rows = []
        begin = 0
        for length in [*chunks, len(tokens) - sum(chunks)]:
            rows.append(self.step([(sequence, tokens[begin : begin + length])])[1])
            begin += length
        return np.concatenate(rows)
