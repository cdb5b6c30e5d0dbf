"""Token windows for training and the held-out documents."""

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from .conversation import END_OF_TEXT
from .corpus import documents

TRAIN_SEED = 1
HELD_OUT_SEED = 2_000_003
# uint16 holds every id of a 2048 vocabulary in two bytes.
_DTYPE = np.uint16
_DOCUMENTS_PER_CALL = 1000


@dataclass(frozen=True, slots=True)
class TokenStream:
    """Documents end to end, each closed by <|endoftext|>.

    tokens: [T] uint16. starts: [documents] int64, where each document begins.
    """

    tokens: NDArray[np.uint16]
    starts: NDArray[np.int64]

    def windows(self, step: int, num_windows: int, length: int) -> torch.Tensor:
        """Return [num_windows, length] int64 ids; each window starts with a document.

        The choice depends on `step` alone, so that a resumed training sees the same data.
        """
        rng = np.random.default_rng((TRAIN_SEED, step))
        usable = self.starts[self.starts + length <= len(self.tokens)]
        begins = rng.choice(usable, size=num_windows)
        rows = np.stack([self.tokens[begin : begin + length] for begin in begins])
        return torch.from_numpy(rows.astype(np.int64))


def repeat(ids: torch.Tensor, step: int) -> torch.Tensor:
    """Return `ids` [B, T] with each row replaced by repetitions of a shuffled piece of itself.

    All but the first piece can be guessed only by looking back. This teaches the attention to
    copy, and so to keep to the name of a story's hero, in far fewer tokens than stories alone.
    """
    rng = np.random.default_rng((TRAIN_SEED, step, 1))
    rows = []
    for row in ids:
        period = int(rng.integers(8, ids.shape[1] // 4))
        piece = row[torch.from_numpy(rng.permutation(period))]
        rows.append(piece.repeat(-(-ids.shape[1] // period))[: ids.shape[1]])
    return torch.stack(rows)


def encode_documents(
    tokenizer: PreTrainedTokenizerFast, num_tokens: int, path: Path
) -> TokenStream:
    """Generate and encode at least `num_tokens` tokens, or load them from `path` if it exists."""
    if not path.exists():
        parts: list[NDArray[np.uint16]] = []
        stream, total = documents(TRAIN_SEED), 0
        with tqdm(total=num_tokens, unit="tok", unit_scale=True, desc="corpus") as bar:
            while total < num_tokens:
                batch = list(itertools.islice(stream, _DOCUMENTS_PER_CALL))
                encoded = tokenizer([text + END_OF_TEXT for text in batch])["input_ids"]
                parts.extend(np.array(ids, dtype=_DTYPE) for ids in encoded)
                added = sum(map(len, encoded))
                total += added
                bar.update(added)
        np.save(path, np.concatenate(parts))
    tokens = np.load(path)
    ends = np.flatnonzero(tokens == tokenizer.convert_tokens_to_ids(END_OF_TEXT)) + 1
    return TokenStream(tokens, np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1]]))
