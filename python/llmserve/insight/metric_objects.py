"""What an engine counts: a record, and a list of named metrics as scripts for vLLM read them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from llmserve import _core

_PREFIX = "vllm:"
# By the names that vLLM has for the same thing: the record's fields.
_GAUGES = {
    "num_requests_running": "num_requests_running",
    "num_requests_waiting": "num_requests_waiting",
}
_COUNTERS = {
    "num_preemptions": "num_preemptions",
    "prompt_tokens": "num_prompt_tokens",
    "generation_tokens": "num_generation_tokens",
    "prefix_cache_queries": "prefix_cache_queries",
    "prefix_cache_hits": "prefix_cache_hits",
    "spec_decode_num_drafts": "num_drafts",
    "spec_decode_num_draft_tokens": "num_draft_tokens",
    "spec_decode_num_accepted_tokens": "num_accepted_tokens",
}


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric by its name."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """A number that goes up and down."""

    value: float


@dataclass(frozen=True, slots=True)
class Vector(Metric):
    """Counters by position."""

    values: list[int]


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """A distribution."""

    count: int
    sum: float
    buckets: dict[str, int]  # by upper bound, "+Inf" the last: how many are at most that


class EngineMetrics:
    """Counters since the engine's start. Each is a field, which docs/observability.md lists; to
    iterate over them gives metrics with names, distributions as well."""

    def __init__(
        self,
        metrics: _core.EngineMetrics,
        histograms: Callable[[], _core.EngineHistograms],
        model: str,
    ) -> None:
        self._metrics = metrics
        self._histograms = histograms
        self._labels = {"model_name": model, "engine": "0"}

    def __getattr__(self, name: str) -> Any:
        """A field of the record."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._metrics, name)

    def __dir__(self) -> list[str]:
        return [name for name in dir(self._metrics) if not name.startswith("_")]

    def __repr__(self) -> str:
        return repr(self._metrics)

    def __iter__(self) -> Iterator[Metric]:
        metrics, labels = self._metrics, self._labels
        for name, field in _GAUGES.items():
            yield Gauge(_PREFIX + name, labels, getattr(metrics, field))
        used = metrics.num_blocks_used / max(metrics.num_blocks_total, 1)
        yield Gauge(_PREFIX + "kv_cache_usage_perc", labels, used)
        for name, field in _COUNTERS.items():
            yield Counter(_PREFIX + name, labels, getattr(metrics, field))
        by_position = metrics.num_accepted_per_pos
        yield Vector(_PREFIX + "spec_decode_num_accepted_tokens_per_pos", labels, by_position)
        histograms = self._histograms()
        for reason, count in histograms.num_finished.items():
            by_reason = {**labels, "finished_reason": reason}
            yield Counter(_PREFIX + "request_success", by_reason, count)
        for name, histogram in histograms.by_name.items():
            yield _histogram(_PREFIX + name, labels, histogram)


def _histogram(name: str, labels: dict[str, str], histogram: _core.Histogram) -> Histogram:
    total = 0
    buckets: dict[str, int] = {}
    for bound, count in zip([*histogram.bounds, "+Inf"], histogram.counts, strict=True):
        total += count
        buckets[str(bound)] = total
    return Histogram(name, labels, total, histogram.sum, buckets)
