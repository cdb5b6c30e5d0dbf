"""Models side by side: what each loses of the first, what it takes, and how fast it is."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmserve.bench.divergence import Divergence, measure_divergence
from llmserve.bench.perplexity import measure_perplexity
from llmserve.bench.speed import measure_speed
from llmserve.llm import LLM

CONTEXT = 512  # tokens of a window: the logits of two models for as many are in memory


@dataclass(frozen=True, slots=True)
class Candidate:
    """A row: what it is called, and LLM's arguments."""

    name: str
    model: Any
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """Shares and nats beside the base, whose own row has change, kl and same_top of None. Bytes are
    those of the weights in memory."""

    name: str
    perplexity: float
    change: float | None
    change_error: float | None
    mean_kl: float | None
    kl_99: float | None
    same_top: float | None
    num_tokens: int
    weight_bytes: int
    prefill_per_s: float
    decode_per_s: float
    description: str


def compare_models(
    candidates: Sequence[Candidate],
    text: str,
    *,
    max_tokens: int | None = None,
    context: int | None = None,
    on_tokens: Callable[[str, int], None] = lambda *_: None,
) -> list[ComparisonRow]:
    """A row for each, in order; the first is the base. Two models are in memory at a time, the base
    and another one. on_tokens is called with a name and the number of tokens scored."""
    rows = []
    base = candidates[0]
    with LLM(base.model, **base.arguments) as base_llm:
        token_ids = base_llm.get_tokenizer().encode(text)[:max_tokens]
        window = min(context or CONTEXT, base_llm.max_model_len - 1)
        sizes = {"context": window, "stride": max(1, window // 2)}
        own = measure_perplexity(
            base_llm, token_ids, **sizes, on_window=lambda n: on_tokens(base.name, n)
        )
        rows.append(_row(base.name, base_llm, None, own.value, own.num_tokens))
        for candidate in candidates[1:]:
            with LLM(candidate.model, **candidate.arguments) as llm:
                divergence = measure_divergence(
                    base_llm,
                    llm,
                    token_ids,
                    **sizes,
                    on_window=lambda n, name=candidate.name: on_tokens(name, n),  # type: ignore[misc]
                )
                rows.append(
                    _row(
                        candidate.name,
                        llm,
                        divergence,
                        divergence.other.value,
                        divergence.other.num_tokens,
                    )
                )
    return rows


def _row(
    name: str, llm: LLM, divergence: Divergence | None, perplexity: float, num_tokens: int
) -> ComparisonRow:
    speed = measure_speed(llm)
    return ComparisonRow(
        name=name,
        perplexity=perplexity,
        change=None if divergence is None else divergence.change,
        change_error=None if divergence is None else divergence.change_error,
        mean_kl=None if divergence is None else divergence.mean_kl,
        kl_99=None if divergence is None else divergence.kl_99,
        same_top=None if divergence is None else divergence.same_top,
        num_tokens=num_tokens,
        weight_bytes=llm.get_memory_use().weight_bytes,
        prefill_per_s=speed.prefill_per_s,
        decode_per_s=speed.decode_per_s,
        description=llm.description,
    )
