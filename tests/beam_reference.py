"""Beam search in a page of Python, to compare the engine's with: vLLM's algorithm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# The most likely next tokens after a context, best first: (token id, logprob).
NextTokens = Callable[[list[int], int], Sequence[tuple[int, float]]]


@dataclass(frozen=True, slots=True)
class Found:
    tokens: list[int]  # generated
    cum_logprob: float
    score: float
    is_ended: bool = False


def score(num_tokens: int, cum_logprob: float, length_penalty: float) -> float:
    return float(cum_logprob / num_tokens**length_penalty)


def search(
    next_tokens: NextTokens,
    prompt: list[int],
    beam_width: int,
    max_tokens: int,
    *,
    eos: int = -1,
    length_penalty: float = 1.0,
) -> list[Found]:
    """The best continuations, best first; sorts are stable."""
    beams = [Found([], 0.0, 0.0)]
    ended: list[Found] = []
    for _ in range(max_tokens):
        going_on = []
        for beam in beams:
            context = prompt + beam.tokens
            for token, logprob in next_tokens(context, 2 * beam_width):
                cum_logprob = beam.cum_logprob + logprob
                is_end = token == eos
                num_tokens = len(context) + (0 if is_end else 1)
                found = Found(
                    [*beam.tokens, token],
                    cum_logprob,
                    score(num_tokens, cum_logprob, length_penalty),
                    is_end,
                )
                (ended if is_end else going_on).append(found)
        beams = sorted(going_on, key=lambda found: found.score, reverse=True)[:beam_width]
        if not beams:
            break
    return sorted(ended + beams, key=lambda found: found.score, reverse=True)[:beam_width]
