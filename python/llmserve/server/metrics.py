"""What the engine counts, in Prometheus' format. Read when asked for: no request pays for it but
with a count of its answer."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from llmserve import _core
from llmserve.insight.metric_objects import EngineMetrics
from llmserve.llm_insight import ReplicaState
from llmserve.server import request_metrics
from llmserve.server.models import Models, ServedModel
from llmserve.server.request_metrics import RequestMetrics
from llmserve.server.running.activity import Activity

PREFIX = "llmserve:"
# Names that vLLM has, too, with the same meaning.
VLLM_NAMES = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
    *("prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens"),
    *("generation_tokens", "request_success", "time_to_first_token_seconds"),
    *("inter_token_latency_seconds", "request_time_per_output_token_seconds"),
    *("e2e_request_latency_seconds", "request_queue_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens"),
    *("request_generation_tokens", "iteration_tokens_total"),
    *("prompt_tokens_cached", "prompt_tokens_by_source", "num_requests_waiting_by_reason"),
    *("spec_decode_num_drafts", "spec_decode_num_draft_tokens"),
    *("spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos"),
    *("engine_sleep_state", "cache_config_info", *request_metrics.NAMES),
)
# Values by their labels, the model's name first.
_Values = (
    Mapping[tuple[str], float]
    | Mapping[tuple[str, str], float]
    | Mapping[tuple[str, str, str], float]
)
_HELP = {
    "time_to_first_token_seconds": "from a request's arrival to its first token",
    "inter_token_latency_seconds": "between two tokens of a sequence",
    "request_time_per_output_token_seconds": "mean of a sequence's tokens after its first",
    "e2e_request_latency_seconds": "from a request's arrival to its end",
    "request_queue_time_seconds": "from a request's arrival to its first step",
    "request_prefill_time_seconds": "from a request's first step to its first token",
    "request_decode_time_seconds": "from a request's first token to its last",
    "request_prompt_tokens": "tokens of a prompt",
    "request_generation_tokens": "new tokens of a request",
    "iteration_tokens_total": "tokens of a step",
    "iteration_sequences": "sequences of a step: the batch size",
    "step_time_seconds": "a step as a whole",
}


class EngineCollector(Collector):
    """The engines' own counters, and the server's."""

    def __init__(
        self,
        models: Models,
        activity: Activity,
        requests: RequestMetrics,
        has_vllm_names: bool,
    ) -> None:
        self._models = models
        self._activity = activity
        self._requests = requests
        self._has_vllm_names = has_vllm_names

    def collect(self) -> Iterator[Metric]:
        """One family a name, a label a model."""
        families: dict[str, Metric] = {}
        for model in self._models:
            for family in _of_model(model, self._activity):
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples += family.samples
        of_requests = self._requests.collect()
        for family in (*families.values(), *of_requests, *_of_server(self._activity)):
            yield family
            name = family.name.removeprefix(PREFIX)
            if self._has_vllm_names and name in VLLM_NAMES:
                yield _renamed(family, "vllm:" + name)


def _renamed(family: Metric, name: str) -> Metric:
    renamed = Metric(name, family.documentation, family.type)
    renamed.samples = [
        sample._replace(name=sample.name.replace(family.name, name, 1)) for sample in family.samples
    ]
    return renamed


def _gauge(name: str, help: str, values: _Values, *labels: str) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, help, labels=["model_name", *labels])
    for key, value in values.items():
        family.add_metric(list(key), value)
    return family


def _counter(name: str, help: str, values: _Values, *labels: str) -> Metric:
    family = CounterMetricFamily(PREFIX + name, help, labels=["model_name", *labels])
    for key, value in values.items():
        family.add_metric(list(key), value)
    return family


def _of_model(model: ServedModel, activity: Activity) -> Iterator[Metric]:
    name, llm = model.name, model.llm
    metrics, distributions, memory = llm.get_metrics(), llm.get_histograms(), llm.get_memory_use()
    used = metrics.num_blocks_used / max(metrics.num_blocks_total, 1)
    is_up = llm.failure is None
    for key, text, value in (
        ("num_requests_running", "sequences that run", metrics.num_requests_running),
        ("num_requests_waiting", "sequences that wait", metrics.num_requests_waiting),
        (
            "num_seats",
            "sequences that may run, fewer after a failed step and with boost-off",
            metrics.num_seats,
        ),
        ("kv_cache_usage_perc", "share of the KV cache in use, 1 is all", used),
        ("engine_up", "1 while the engine runs", is_up),
        ("engine_hung", "1 while a step hangs", activity.watchdog.is_hung(model)),
    ):
        yield _gauge(key, text, {(name,): float(value)})
    is_sleeping = llm.engine_is_sleeping
    states = {(name, "awake"): not is_sleeping, (name, "asleep"): is_sleeping}
    yield _gauge("engine_sleep_state", "1 for the state that it is in", states, "sleep_state")
    waiting = {(name, "capacity"): metrics.num_requests_waiting, (name, "deferred"): 0}
    text = "sequences that wait for room; none waits for anything else"
    yield _gauge("num_requests_waiting_by_reason", text, waiting, "reason")
    yield _cache_config(model, metrics.num_blocks_total)
    blocks = {
        (name, "used"): metrics.num_blocks_used,
        (name, "cached"): metrics.num_blocks_cached,
        (name, "free"): metrics.num_blocks_free,
    }
    yield _gauge("kv_blocks", "blocks of the KV cache", blocks, "state")
    parts = {
        (name, "weights"): memory.weight_bytes,
        (name, "workspace"): memory.workspace_bytes,
        (name, "kv_cache"): memory.kv_cache_bytes,
    }
    if memory.graph_bytes > 0:
        parts[name, "graphs"] = memory.graph_bytes
    yield _gauge("memory_bytes", "memory that the engine holds", parts, "part")
    if memory.pool_reserved_bytes > 0:
        pool = {
            (name, "used"): memory.pool_used_bytes,
            (name, "used_high"): memory.pool_used_high_bytes,
            (name, "reserved"): memory.pool_reserved_bytes,
            (name, "reserved_high"): memory.pool_reserved_high_bytes,
        }
        yield _gauge("device_pool_bytes", "the GPU's memory pool", pool, "state")
    for key, text, value in (
        ("num_preemptions", "sequences that gave their blocks back", metrics.num_preemptions),
        (
            "rank_failures",
            "steps that a rank failed, and that ran again",
            metrics.num_rank_failures,
        ),
        (
            "overlapped_steps",
            "steps that began while another one was in flight",
            metrics.num_overlapped_steps,
        ),
        (
            "nccl_errors",
            "failures of what GPUs exchange, each counted once for all of them",
            metrics.num_nccl_errors,
        ),
        ("prompt_tokens", "prompt tokens of admitted requests", metrics.num_prompt_tokens),
        ("prefill_tokens", "prompt tokens that were computed", metrics.num_prefill_tokens),
        ("recomputed_tokens", "of those, after a preemption", metrics.num_recomputed_tokens),
        ("generation_tokens", "tokens that were generated", metrics.num_generation_tokens),
        ("prefix_cache_queries", "prompt tokens looked up", metrics.prefix_cache_queries),
        ("prefix_cache_hits", "of those, found", metrics.prefix_cache_hits),
        ("prefix_cache_evictions", "blocks forgotten", metrics.prefix_cache_evictions),
        ("stream_lines", "lines of streams written without Python", metrics.num_lines),
        ("stream_line_seconds", "processor time that they took", metrics.line_us / 1e6),
        ("spec_decode_num_drafts", "steps of a sequence with guesses", metrics.num_drafts),
        ("spec_decode_num_draft_tokens", "guesses that were run", metrics.num_draft_tokens),
        ("spec_decode_num_accepted_tokens", "of those, right", metrics.num_accepted_tokens),
        ("spec_decode_draft_seconds", "time that guessing took", metrics.draft_us / 1e6),
        ("graph_captures", "shapes of steps recorded as CUDA graphs", metrics.num_graph_captures),
        ("graph_replays", "steps that were one launch of such a graph", metrics.num_graph_replays),
    ):
        yield _counter(key, text, {(name,): value})
    by_position = {
        (name, str(place)): count
        for place, count in enumerate(metrics.num_accepted_per_pos)
        if count > 0 or place == 0
    }
    text = "guesses that were right, by their place"
    yield _counter("spec_decode_num_accepted_tokens_per_pos", text, by_position, "position")
    yield from _hand_overs(name, metrics)
    hits = metrics.prefix_cache_hits
    sources = {
        (name, "local_cache_hit"): hits,
        (name, "local_compute"): metrics.num_prompt_tokens - hits,
        (name, "external_kv_transfer"): 0,
    }
    yield _counter("prompt_tokens_cached", "prompt tokens from the cache", {(name,): hits})
    yield _counter("prompt_tokens_by_source", "where prompts come from", sources, "source")
    finished = {(name, reason): count for reason, count in distributions.num_finished.items()}
    yield _counter("request_success", "finished requests", finished, "finished_reason")
    steps = {
        (name, "prefill"): metrics.num_prefill_steps,
        (name, "decode"): metrics.num_decode_steps,
    }
    yield _counter("steps", "steps", steps, "phase")
    for key, histogram in distributions.by_name.items():
        yield _histogram(key, name, histogram)
    yield from _of_replicas(name, llm.replicas())
    if layers := llm.expert_rank_rows():
        rows = {
            (name, str(layer), str(rank)): float(count)
            for layer, counts in layers.items()
            for rank, count in enumerate(counts)
        }
        text = "rows of experts that the rank ran"
        yield _counter("expert_rank_rows", text, rows, "layer", "rank")


def _of_replicas(name: str, replicas: Sequence[ReplicaState]) -> Iterator[Metric]:
    """Of each engine, where there are several; all else is of all together."""
    if not replicas:
        return

    def values(value: Callable[[ReplicaState], float]) -> dict[tuple[str, str], float]:
        return {(name, str(state.replica)): float(value(state)) for state in replicas}

    for key, text, value in (
        ("up", "1 while the replica runs", lambda state: state.failure is None),
        (
            "requests_running",
            "sequences that run",
            lambda state: state.metrics.num_requests_running,
        ),
        (
            "requests_waiting",
            "sequences that wait",
            lambda state: state.metrics.num_requests_waiting,
        ),
        (
            "kv_cache_usage_perc",
            "share of the KV cache in use, 1 is all",
            lambda state: state.metrics.num_blocks_used / max(state.metrics.num_blocks_total, 1),
        ),
    ):
        yield _gauge("replica_" + key, text, values(value), "replica")
    for key, text, value in (
        ("routed", "requests that the replica was given", lambda state: state.num_routed),
        (
            "hit_tokens",
            "tokens of their prompts that it was thought to have",
            lambda state: state.num_hit_tokens,
        ),
        (
            "taken_over",
            "requests that it went on with, since another one could not execute them",
            lambda state: state.num_taken_over,
        ),
        (
            "generation_tokens",
            "tokens that it generated",
            lambda state: state.metrics.num_generation_tokens,
        ),
    ):
        yield _counter("replica_" + key, text, values(value), "replica")


def _hand_overs(name: str, metrics: EngineMetrics) -> Iterator[Metric]:
    text = "blocks that are kept for other engines to fetch"
    yield _gauge("hand_over_leased_blocks", text, {(name,): metrics.num_leased_blocks})
    for key, text, value in (
        ("hand_overs_sent", "prompts that others fetched", metrics.num_hand_overs_sent),
        ("hand_overs_lapsed", "prompts that nobody fetched", metrics.num_hand_overs_lapsed),
        ("hand_overs_received", "prompts that others computed", metrics.num_hand_overs_received),
        ("hand_over_sent_bytes", "what others fetched", metrics.hand_over_sent_bytes),
        ("hand_over_received_bytes", "what was fetched", metrics.hand_over_received_bytes),
        (
            "hand_over_receive_seconds",
            "time that prompts took to come",
            metrics.hand_over_receive_us / 1e6,
        ),
    ):
        yield _counter(key, text, {(name,): value})
    failed = {(name, cause): n for cause, n in metrics.num_hand_overs_failed.items()}
    text = "prompts that did not come, and were computed here"
    yield _counter("hand_overs_failed", text, failed, "cause")


def _cache_config(model: ServedModel, num_blocks: int) -> Metric:
    labels = {
        "model_name": model.name,
        "block_size": str(model.llm.num_kv_tokens // max(num_blocks, 1)),
        "num_gpu_blocks": str(num_blocks),  # vLLM's name, wherever the blocks are
    }
    family = GaugeMetricFamily(
        PREFIX + "cache_config_info", "the KV cache, in labels", labels=list(labels)
    )
    family.add_metric(list(labels.values()), 1.0)
    return family


def _histogram(name: str, model_name: str, histogram: _core.Histogram) -> Metric:
    family = HistogramMetricFamily(PREFIX + name, _HELP[name], labels=["model_name"])
    total = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip([*histogram.bounds, float("inf")], histogram.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else repr(bound), total))
    family.add_metric([model_name], buckets, histogram.sum)
    return family


def _of_server(activity: Activity) -> Iterator[Metric]:
    ended = CounterMetricFamily(
        PREFIX + "requests_ended_early", "requests that were ended, by cause", labels=["cause"]
    )
    for cause, count in sorted(activity.ended.items()):
        ended.add_metric([cause], count)
    yield ended
    refused = CounterMetricFamily(
        PREFIX + "requests_refused", "requests that were not let in", labels=["reason"]
    )
    refused.add_metric(["queue_full"], sum(a.num_refused for a in activity.admissions.values()))
    refused.add_metric(["quota"], activity.quotas.num_refused)
    for reason, count in activity.watchdog.num_refused.items():
        refused.add_metric([reason], count)
    yield refused
    coalesced = CounterMetricFamily(
        PREFIX + "requests_coalesced", "requests that shared the run of an identical one"
    )
    coalesced.add_metric([], activity.coalescer.num_coalesced)
    yield coalesced
    runs = GaugeMetricFamily(PREFIX + "http_requests_active", "requests being answered")
    runs.add_metric([], len(activity.runs))
    yield runs
    total, available = _machine_memory()
    memory = GaugeMetricFamily(
        PREFIX + "machine_memory_usage_perc", "share of the machine's memory in use, 1 is all"
    )
    memory.add_metric([], 1 - available / total if total else 0.0)
    yield memory


def _machine_memory() -> tuple[int, int]:
    """(total, available) in KiB, zeros where the machine does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = {line.split(":")[0]: line.split()[1] for line in file}
        return int(fields["MemTotal"]), int(fields["MemAvailable"])
    except (OSError, KeyError, ValueError):
        return 0, 0


class ServerMetrics:
    """The registry of one server."""

    def __init__(self, models: Models, activity: Activity, has_vllm_names: bool) -> None:
        self.registry = CollectorRegistry()
        self.requests = RequestMetrics(PREFIX)
        self.registry.register(EngineCollector(models, activity, self.requests, has_vllm_names))
        ProcessCollector(registry=self.registry)
        self._answers = Counter(
            PREFIX + "http_responses", "answers by status", ["status"], registry=self.registry
        )
        # A rate sees no first one where there was no 0 before it.
        self._answers_by_status: dict[int, Counter] = {
            status: self._answers.labels(str(status)) for status in (200, 400, 429, 500, 503)
        }
        # People read 4 to 13 tokens a second: a stream below that keeps its reader waiting.
        self.delivery = Histogram(
            PREFIX + "stream_delivery_tokens_per_second",
            "tokens a second that a stream delivered after its first",
            registry=self.registry,
            buckets=(1, 2, 4, 8, 13, 20, 40, 80, 160, 320, 640),
        )

    def count_answer(self, status: int) -> None:
        """One more answer of this status."""
        counter = self._answers_by_status.get(status)
        if counter is None:
            counter = self._answers_by_status[status] = self._answers.labels(str(status))
        counter.inc()
