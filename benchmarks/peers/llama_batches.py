"""llama.cpp through its C API, as its server runs it: a sequence a request, in common batches.

Imports nothing but llama_cpp and NumPy. The Python API of llama_cpp would run one sequence at a
time, and the server a prefix that prompts share once for each of them: a program over the C API
can do better, and so does this one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import llama_cpp
import numpy as np

_BATCH_TOKENS = 512
# Shorter prefixes than this are computed for each prompt.
_MIN_SHARED = 64


@dataclass
class _Sequence:
    """A request: what is left of its prompt, or the token to run next."""

    seq_id: int
    prompt: list[int]
    max_tokens: int
    num_run: int = 0
    tokens: list[int] = field(default_factory=list)

    def take(self, limit: int) -> list[int]:
        """The tokens to run next, at most so many."""
        if self.tokens:
            return self.tokens[-1:]
        return self.prompt[self.num_run : self.num_run + limit]

    @property
    def is_decoding(self) -> bool:
        return bool(self.tokens)

    @property
    def is_done(self) -> bool:
        return len(self.tokens) == self.max_tokens


class LlamaCpp:
    """A model and a context that fits the job at hand; kept while the next one is alike."""

    def __init__(self, path: str, num_threads: int) -> None:
        llama_cpp.llama_log_set(_QUIET, None)
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self._num_threads = num_threads
        self._batch = llama_cpp.llama_batch_init(_BATCH_TOKENS, 0, 1)
        self._context: Any = None
        self._fits = (0, 0, False)

    def generate(
        self, prompts: list[list[int]], max_tokens: list[int]
    ) -> tuple[list[list[int]], float]:
        """Greedy tokens of all, and when the first was known."""
        sequences = [
            _Sequence(idx, prompt, n)
            for idx, (prompt, n) in enumerate(zip(prompts, max_tokens, strict=True))
        ]
        num_shared = _num_shared(prompts)
        length = max(len(s.prompt) + s.max_tokens for s in sequences)
        self._prepare(len(sequences), length, num_shared > 0)
        if num_shared:
            self._share(sequences, num_shared)
        first = 0.0
        while True:
            running = [s for s in sequences if not s.is_done]
            if not running:
                return [s.tokens for s in sequences], first
            self._step(running)
            if not first and any(s.tokens for s in running):
                first = time.perf_counter()

    def _prepare(self, num_sequences: int, length: int, is_shared: bool) -> None:
        """An empty context. One buffer for all sequences is slower, but where they share."""
        fits = (num_sequences, length, is_shared)
        if fits != self._fits:
            if self._context:
                llama_cpp.llama_free(self._context)
            params = llama_cpp.llama_context_default_params()
            params.n_ctx = num_sequences * -(-length // 256) * 256
            params.n_batch = params.n_ubatch = _BATCH_TOKENS
            params.n_seq_max = num_sequences
            params.n_threads = params.n_threads_batch = self._num_threads
            params.kv_unified = is_shared
            self._context = llama_cpp.llama_init_from_model(self._model, params)
            if not self._context:
                raise SystemExit(f"llama.cpp has no context of {num_sequences} x {length} tokens")
            self._fits = fits
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)

    def _share(self, sequences: list[_Sequence], num_shared: int) -> None:
        """Runs the prefix once and gives it to all."""
        head = _Sequence(0, sequences[0].prompt[:num_shared], 1)
        while head.num_run < num_shared:
            self._step([head], has_logits=False)
        memory = llama_cpp.llama_get_memory(self._context)
        for sequence in sequences:
            sequence.num_run = num_shared
            if sequence.seq_id != 0:
                llama_cpp.llama_memory_seq_cp(memory, 0, sequence.seq_id, 0, num_shared)

    def _step(self, running: list[_Sequence], has_logits: bool = True) -> None:
        """One batch: a token of each that decodes, then prompts while there is room."""
        batch = self._batch
        batch.n_tokens = 0
        drawing: list[tuple[_Sequence, int]] = []
        for sequence in sorted(running, key=lambda s: not s.is_decoding):
            ids = sequence.take(_BATCH_TOKENS - batch.n_tokens)
            for token in ids:
                at = batch.n_tokens
                batch.token[at] = token
                batch.pos[at] = sequence.num_run
                batch.n_seq_id[at] = 1
                batch.seq_id[at][0] = sequence.seq_id
                batch.logits[at] = False
                batch.n_tokens += 1
                sequence.num_run += 1
            if ids and has_logits and sequence.num_run >= len(sequence.prompt):
                batch.logits[batch.n_tokens - 1] = True
                drawing.append((sequence, batch.n_tokens - 1))
        status = llama_cpp.llama_decode(self._context, batch)
        if status != 0:
            raise SystemExit(f"llama_decode answered {status}")
        for sequence, at in drawing:
            logits = llama_cpp.llama_get_logits_ith(self._context, at)
            values = np.ctypeslib.as_array(logits, (self._vocab_size,))
            sequence.tokens.append(int(np.argmax(values)))


def _num_shared(prompts: list[list[int]]) -> int:
    """Tokens that all start with, but for the last, whose logits are wanted; 0 if too few."""
    if len(prompts) == 1:
        return 0
    rows = zip(*(prompt[:-1] for prompt in prompts), strict=False)
    num_shared = len(list(takewhile(lambda ids: len(set(ids)) == 1, rows)))
    return num_shared if num_shared >= _MIN_SHARED else 0


@llama_cpp.llama_log_callback
def _QUIET(_level: int, _text: bytes, _data: object) -> None:
    """Takes llama.cpp's log and keeps none of it."""
