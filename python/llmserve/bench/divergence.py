"""How far a model's predictions are from another one's: KL divergence and the share of equal first
choices, over windows of a text. Both see the same tokens."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmserve.bench.perplexity import Perplexity, windows_of
from llmserve.errors import InvalidArgument, LLMServeError
from llmserve.llm import LLM
from llmserve.prompts import TokensPrompt


@dataclass(frozen=True, slots=True)
class Divergence:
    """Of `other` from `base`, over the same positions. mean_kl and kl_99 (of the position that 99%
    are below) are KL(base || other) in nats; same_top is a share. change_error is the standard
    error of the difference of the two mean_nll: far less than either's own."""

    base: Perplexity
    other: Perplexity
    change_error: float
    mean_kl: float
    kl_99: float
    same_top: float

    @property
    def change(self) -> float:
        """Of the perplexity, as a share of base's."""
        return math.expm1(self.other.mean_nll - self.base.mean_nll)


def measure_divergence(
    base: LLM,
    other: LLM,
    token_ids: Sequence[int],
    *,
    context: int,
    stride: int,
    on_window: Callable[[int], None] = lambda _: None,
) -> Divergence:
    """Over a text of at least two tokens, in windows as measure_perplexity has them. The logits of
    a window, two of [context, V] floats, are in memory at a time. Raises InvalidArgument for
    vocabularies that differ, LLMServeError if a request fails."""
    base_losses: list[npt.NDArray[np.float64]] = []
    other_losses: list[npt.NDArray[np.float64]] = []
    divergences: list[npt.NDArray[np.float64]] = []
    is_same: list[npt.NDArray[np.bool_]] = []
    for window in windows_of(len(token_ids), context, stride):
        ids = list(token_ids[window.begin : window.end])
        rows = slice(window.scored - window.begin - 1, len(ids) - 1)
        targets = np.array(ids[window.scored - window.begin :])
        p = _log_probabilities(base, ids, rows)
        q = _log_probabilities(other, ids, rows)
        if p.shape != q.shape:
            raise InvalidArgument(
                f"the models have vocabularies of {p.shape[1]} and {q.shape[1]}, so that their "
                f"predictions cannot be compared"
            )
        at = np.arange(len(targets))
        base_losses.append(-p[at, targets].astype(np.float64))
        other_losses.append(-q[at, targets].astype(np.float64))
        divergences.append(np.sum(np.exp(p) * (p - q), axis=-1, dtype=np.float64))
        is_same.append(p.argmax(-1) == q.argmax(-1))
        on_window(len(targets))
    if not base_losses:
        raise InvalidArgument(f"the text must have at least 2 tokens, got {len(token_ids)}")
    before, after = np.concatenate(base_losses), np.concatenate(other_losses)
    kl = np.maximum(np.concatenate(divergences), 0)
    return Divergence(
        base=_perplexity(before),
        other=_perplexity(after),
        change_error=_standard_error(after - before),
        mean_kl=float(kl.mean()),
        kl_99=float(np.quantile(kl, 0.99)),
        same_top=float(np.concatenate(is_same).mean()),
    )


def _log_probabilities(llm: LLM, ids: list[int], rows: slice) -> npt.NDArray[np.float32]:
    (output,) = llm.encode(
        [TokensPrompt(prompt_token_ids=ids)], pooling_task="token_logits", use_tqdm=False
    )
    if output.outputs.data is None:
        raise LLMServeError(output.error or "the model gave no logits")
    logits = np.asarray(output.outputs.data.__array__())[rows]
    logits = logits - logits.max(-1, keepdims=True)
    return np.asarray(logits - np.log(np.exp(logits).sum(-1, keepdims=True)), np.float32)


def _perplexity(losses: npt.NDArray[np.float64]) -> Perplexity:
    return Perplexity(float(losses.mean()), _standard_error(losses), len(losses))


def _standard_error(values: npt.NDArray[np.float64]) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0
