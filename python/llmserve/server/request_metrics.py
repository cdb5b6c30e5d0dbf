"""Distributions over requests that the engine does not keep: what they asked for, and what each
took as a whole. By the names of vLLM's dashboards."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.metrics_core import Metric

from llmserve.server.running.activity import Run

_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_SECONDS = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 600.0)
_US_PER_S = 1e6
# name, help, buckets
_FAMILIES = (
    ("request_params_n", "sequences that a request asks for", (1, 2, 5, 10, 20, 50, 100)),
    ("request_params_max_tokens", "new tokens that a request asks for at most", _COUNTS),
    ("request_max_num_generation_tokens", "new tokens of a request's longest sequence", _COUNTS),
    ("request_prefill_kv_computed_tokens", "prompt tokens that were not in the cache", _COUNTS),
    ("request_num_preemptions", "times that a request gave its blocks back", (0, 1, 2, 5, 10, 20)),
    ("request_inference_time_seconds", "from a request's first step to its last token", _SECONDS),
)
NAMES = tuple(name for name, _, _ in _FAMILIES)


class RequestMetrics:
    """Of one server. Used on the loop's thread, collected on any."""

    def __init__(self, prefix: str) -> None:
        self._registry = CollectorRegistry()
        self._by_name = {
            name: Histogram(
                prefix + name, text, ["model_name"], buckets=buckets, registry=self._registry
            )
            for name, text, buckets in _FAMILIES
        }

    def note(self, run: Run) -> None:
        """A request has ended, whose prompts the engine took in."""
        for stream in run.streams:
            state, record = stream.state, stream.record()
            if state.pooling is not None or record is None or not record.scheduled_us:
                continue
            num_prompt = len(state.prompt.token_ids)
            room = run.job.model.llm.max_model_len - num_prompt
            took_us = record.last_token_us - record.scheduled_us
            values: dict[str, float] = {
                "request_params_n": state.params.n,
                "request_params_max_tokens": min(state.core_params.max_tokens, room),
                "request_max_num_generation_tokens": state.max_num_sample_tokens,
                "request_prefill_kv_computed_tokens": num_prompt - record.num_cached_tokens,
                "request_num_preemptions": record.num_preemptions,
                "request_inference_time_seconds": max(took_us, 0) / _US_PER_S,
            }
            for name, value in values.items():
                self._by_name[name].labels(run.job.model.name).observe(value)

    def collect(self) -> Iterator[Metric]:
        """A family a distribution."""
        yield from self._registry.collect()
