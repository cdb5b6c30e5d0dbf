"""How well a model foresees a text: perplexity over windows of tokens, for `llmserve eval`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmserve.errors import InvalidArgument, LLMServeError
from llmserve.llm import LLM
from llmserve.prompts import TokensPrompt
from llmserve.sampling_params import SamplingParams

_AT_ONCE = 4  # windows handed over together, so that results are let go of as they are summed


@dataclass(frozen=True, slots=True)
class Perplexity:
    """exp of the mean negative log-probability of num_tokens tokens, in natural units.

    standard_error is that of mean_nll: the deviation of single tokens over the root of their
    number. Two runs over one text differ by far less, since hard tokens are hard for both.
    """

    mean_nll: float
    standard_error: float
    num_tokens: int

    @property
    def value(self) -> float:
        """The perplexity itself."""
        return math.exp(self.mean_nll)


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens [begin, end) of the text, of which those from `scored` on count."""

    begin: int
    end: int
    scored: int


def windows_of(num_tokens: int, context: int, stride: int) -> list[Window]:
    """Windows of `context` tokens, one every `stride`: each token but the first counts once, in the
    first window that holds it.

    >>> [(w.begin, w.end, w.scored) for w in windows_of(10, 6, 3)]
    [(0, 6, 1), (3, 9, 6), (6, 10, 9)]
    """
    windows, scored = [], 1
    for begin in range(0, num_tokens, stride):
        end = min(begin + context, num_tokens)
        if end > scored:
            windows.append(Window(begin, end, scored))
            scored = end
        if end == num_tokens:
            break
    return windows


def measure_perplexity(
    llm: LLM,
    token_ids: Sequence[int],
    *,
    context: int,
    stride: int,
    on_window: Callable[[int], None] = lambda _: None,
) -> Perplexity:
    """Perplexity of a text of at least two tokens.

    A window's tokens see at most the `context` tokens of it, and at least context - stride once the
    text has begun. on_window is called with the number of tokens that a window has scored. Raises
    InvalidArgument on sizes out of range, LLMServeError if a request fails.
    """
    if not context >= 2:
        raise InvalidArgument(f"context must be at least 2, got {context}")
    if not 1 <= stride < context:
        raise InvalidArgument(f"stride must be between 1 and context - 1, got {stride}")
    if len(token_ids) < 2:
        raise InvalidArgument(
            f"the text must have at least 2 tokens to foresee one, got {len(token_ids)}"
        )
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    windows = windows_of(len(token_ids), context, stride)
    losses: list[float] = []
    for first in range(0, len(windows), _AT_ONCE):
        part = windows[first : first + _AT_ONCE]
        prompts = [TokensPrompt(prompt_token_ids=token_ids[w.begin : w.end]) for w in part]
        for window, output in zip(part, llm.generate(prompts, params, use_tqdm=False), strict=True):
            if output.prompt_logprobs is None:
                raise LLMServeError(output.outputs[0].error or "the model gave no probabilities")
            before = len(losses)
            for position in range(window.scored - window.begin, window.end - window.begin):
                row = output.prompt_logprobs[position]
                assert row is not None  # the first token alone has none
                losses.append(-row[token_ids[window.begin + position]].logprob)
            on_window(len(losses) - before)
    mean = math.fsum(losses) / len(losses)
    variance = math.fsum((loss - mean) ** 2 for loss in losses) / max(1, len(losses) - 1)
    return Perplexity(mean, math.sqrt(variance / len(losses)), len(losses))
