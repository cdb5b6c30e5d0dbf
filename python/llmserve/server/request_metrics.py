"""Distributions over requests that the engine does not keep: what they asked for, and what each
took as a whole. By the names of vLLM's dashboards."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.metrics_core import HistogramMetricFamily, Metric

from llmserve.server.running.activity import Run

_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_SECONDS = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 600.0)
_US_PER_S = 1e6
# Name, help, bounds of the buckets, in the order of the values that `note` has.
_FAMILIES = (
    ("request_params_n", "sequences that a request asks for", (1, 2, 5, 10, 20, 50, 100)),
    ("request_params_max_tokens", "new tokens that a request asks for at most", _COUNTS),
    ("request_max_num_generation_tokens", "new tokens of a request's longest sequence", _COUNTS),
    ("request_prefill_kv_computed_tokens", "prompt tokens that were not in the cache", _COUNTS),
    ("request_num_preemptions", "times that a request gave its blocks back", (0, 1, 2, 5, 10, 20)),
    ("request_inference_time_seconds", "from a request's first step to its last token", _SECONDS),
)
NAMES = tuple(name for name, _, _ in _FAMILIES)


class _Distribution:
    """Of one family and model. prometheus-client's own takes twenty times as long for a value."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """(bound, values up to it) and their sum."""
        names = [*(repr(float(bound)) for bound in self._bounds), "+Inf"]
        return list(zip(names, accumulate(self._counts), strict=True)), self._sum


class RequestMetrics:
    """Of one server. Used on the loop's thread, collected on any."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._by_model: dict[str, list[_Distribution]] = {}

    def note(self, run: Run) -> None:
        """A request has ended, whose prompts the engine took in."""
        name = run.job.model.name
        if name not in self._by_model:
            self._by_model[name] = [_Distribution(bounds) for _, _, bounds in _FAMILIES]
        for stream, record in zip(run.streams, run.records, strict=False):
            state = stream.state
            if state.pooling is not None or record is None or not record.scheduled_us:
                continue
            num_prompt = len(state.prompt.token_ids)
            room = run.job.model.llm.max_model_len - num_prompt
            values = (
                state.params.n,
                min(state.core_params.max_tokens, room),
                state.max_num_sample_tokens,
                num_prompt - record.num_cached_tokens,
                record.num_preemptions,
                max(record.last_token_us - record.scheduled_us, 0) / _US_PER_S,
            )
            for distribution, value in zip(self._by_model[name], values, strict=True):
                distribution.observe(value)

    def collect(self) -> Iterator[Metric]:
        """A family a distribution."""
        by_model = list(self._by_model.items())
        for idx, (name, text, _) in enumerate(_FAMILIES):
            family = HistogramMetricFamily(self._prefix + name, text, labels=["model_name"])
            for model_name, distributions in by_model:
                buckets, total = distributions[idx].buckets()
                family.add_metric([model_name], buckets, total)
            yield family
