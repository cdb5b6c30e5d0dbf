"""Recipes for a server that is not well: symptom, cause, action, from its live metrics."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from llmserve.insight.gpu_telemetry import THROTTLE_REASONS, XID_MEANINGS
from llmserve.insight.live_metrics import LiveMetrics

# Limits of the recipes; those of docs/monitoring/alerts.yml are the same.
_MAX_TTFT_S = 1.0
_MAX_ITL_S = 0.2
_MIN_HIT_SHARE = 0.6
# Of the requests: beyond it the p99 of every latency is that of one which was computed again.
_MAX_PREEMPTED = 0.01
_MAX_KV_USAGE = 0.95
_MAX_MEMORY, _CRITICAL_MEMORY = 0.80, 0.95
_MIN_GPU_USE = 0.5
# Resident memory that grows this much between two looks; what a server still fills at its start is
# more than a leak gives.
_MAX_GROWTH, _MAX_GROWTH_BYTES = 0.05, 2**26
# Guessed tokens that were right: below it no step is shorter for them.
_MIN_ACCEPTED, _MIN_GUESSES = 0.2, 1000
_MIN_READING_RATE = 4.0  # tokens a second: people read 4 to 13


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it should be."""

    symptom: str
    cause: str
    action: str

    def lines(self) -> list[str]:
        """For people."""
        return [
            f"symptom  {self.symptom}",
            f"cause    {self.cause}",
            f"action   {self.action}",
        ]


def examine(metrics: LiveMetrics, earlier: LiveMetrics | None = None) -> list[Finding]:
    """What the recipes find; nothing is good. earlier: a reading before, to tell what climbs.

    >>> examine(LiveMetrics.parse("llmserve:engine_up 1"))
    []
    """
    models = metrics.by_model
    return [
        *(
            replace(finding, symptom=f"{name}: {finding.symptom}") if len(models) > 1 else finding
            for name, of_model in models.items()
            for finding in _model(of_model)
        ),
        *_gpus(metrics),
        *_memory(metrics),
        *_growth(metrics, earlier),
        *_requests(metrics),
    ]


def _model(metrics: LiveMetrics) -> Iterator[Finding]:
    """Of one model's metrics."""
    yield from _engine(metrics)
    yield from _kv_cache(metrics)
    yield from _latency(metrics)
    yield from _speculation(metrics)
    if (failed := metrics.value("request_success_total", finished_reason="error")) > 0:
        yield Finding(
            f"{failed:.0f} requests failed in the engine",
            "a step failed, perhaps for lack of memory, or their logits were not finite",
            "read the server's log. Out of memory: lower --gpu-memory-utilization, "
            "--kv-cache-dtype fp8, fewer --max-num-seqs. Not finite: a dtype of small range",
        )


def _engine(metrics: LiveMetrics) -> Iterator[Finding]:
    up = [v for (name, _), v in metrics.samples.items() if name == "engine_up"]
    if up and min(up) < 1:
        yield Finding(
            "an engine has stopped",
            "three steps in a row failed",
            "read the server's log for the error and restart it",
        )
    if metrics.value("engine_hung") > 0:
        yield Finding(
            "a step hangs",
            "the machine is swapping or stopped, or a kernel does not return",
            "look at memory and load of the machine; restart the server",
        )


def _speculation(metrics: LiveMetrics) -> Iterator[Finding]:
    drafted = metrics.value("spec_decode_num_draft_tokens_total")
    accepted = metrics.value("spec_decode_num_accepted_tokens_total")
    if drafted >= _MIN_GUESSES and accepted < _MIN_ACCEPTED * drafted:
        yield Finding(
            f"{accepted / drafted:.0%} of the guessed tokens are right",
            "the draft is of another model or another kind of text; guesses are made all the same "
            "only to see whether that changes, and where adaptive is false",
            "another --speculative-config (a draft model of the same family, ngram for text that "
            "repeats its prompt), or none",
        )


def _gpus(metrics: LiveMetrics) -> Iterator[Finding]:
    gpus = metrics.by_gpu
    is_busy = metrics.value("num_requests_running") > 0
    for index, gpu in gpus.items():
        yield from _gpu(gpu, "the GPU" if len(gpus) == 1 else f"GPU {index}", is_busy)


def _gpu(metrics: LiveMetrics, it: str, is_busy: bool) -> Iterator[Finding]:
    held = [
        reason
        for reason in THROTTLE_REASONS.values()
        if metrics.value("gpu_throttled", reason=reason) > 0
    ]
    clock, best = metrics.value("gpu_sm_clock_hertz"), metrics.value("gpu_max_sm_clock_hertz")
    if held:
        at = f" at {clock / 1e6:.0f} of {best / 1e6:.0f} MHz" if clock and best else ""
        is_hot = any("thermal" in reason for reason in held)
        yield Finding(
            f"{it} is throttled{at}: {', '.join(held)}",
            "it is too hot" if is_hot else "it reaches its power limit, or its supply is short",
            "better cooling, or a lower power limit"
            if is_hot
            else "a higher power limit "
            "(`nvidia-smi -pl`) where the supply allows it; else nothing is wrong",
        )
    use = [v for (name, _), v in metrics.samples.items() if name == "gpu_utilization_perc"]
    if use and max(use) < _MIN_GPU_USE and is_busy:
        yield Finding(
            f"{it} computes {max(use):.0%} of the time",
            "small batches, or kernels that are not fused: each step waits for the host",
            "more requests at a time (--max-num-seqs), larger --max-num-batched-tokens; see "
            "whether decode steps are CUDA graphs (graph_replays_total)",
        )
    total = metrics.value("gpu_memory_total_bytes")
    if total and metrics.value("gpu_memory_used_bytes") > _CRITICAL_MEMORY * total:
        yield Finding(
            f"{it}'s memory is {metrics.value('gpu_memory_used_bytes') / total:.0%} full",
            "weights, KV cache and other programs together; the next allocation may fail",
            "lower --gpu-memory-utilization, --kv-cache-dtype fp8, or end other programs",
        )
    errors = {
        "memory errors that cannot be corrected": metrics.value("gpu_ecc_uncorrected_errors_total"),
        "packets sent again over PCIe": metrics.value("gpu_pcie_replays_total"),
        "packets sent again over NVLink": metrics.value("gpu_nvlink_replays_total"),
    }
    if found := [f"{count:.0f} {what}" for what, count in errors.items() if count > 0]:
        yield Finding(
            f"{it} reports {', '.join(found)}",
            "memory or a link of the machine fails",
            "drain the server, reset the GPU, check its slot and bridges; replace it if they "
            "return",
        )
    xids = {
        dict(labels)["xid"]: value
        for (name, labels), value in metrics.samples.items()
        if name == "gpu_xid_errors_total" and value > 0
    }
    if xids:
        known = [f"Xid {xid} ({XID_MEANINGS.get(int(xid), 'unknown')})" for xid in sorted(xids)]
        yield Finding(
            f"the driver reports errors of {it}: {', '.join(known)}",
            "a kernel's mistake, or the GPU, its memory or a link of it fails",
            "read `dmesg`; where it is not a program's error, drain the server and reset the GPU",
        )
    if metrics.value("gpu_clock_swings") > 0:
        yield Finding(
            f"{it}'s clock goes up and down",
            "it boosts, is held down, and boosts again",
            "lock a clock that it holds (`nvidia-smi --lock-gpu-clocks=0,MHZ`)",
        )


def _kv_cache(metrics: LiveMetrics) -> Iterator[Finding]:
    preemptions = metrics.value("num_preemptions_total")
    requests = metrics.value("request_success_total") + metrics.value("num_requests_running")
    if preemptions > _MAX_PREEMPTED * requests:
        yield Finding(
            f"{preemptions:.0f} preemptions in {requests:.0f} requests: sequences gave their KV "
            f"blocks back",
            "the KV cache is smaller than what runs at once needs",
            "more KV memory (--kv-cache-memory-bytes), half of it a token (--kv-cache-dtype "
            "fp8), smaller --max-num-batched-tokens or --max-model-len, fewer --max-num-seqs",
        )
    elif (usage := metrics.value("kv_cache_usage_perc")) > _MAX_KV_USAGE:
        yield Finding(
            f"the KV cache is {usage:.0%} full",
            "what runs at once nearly fills it; preemptions come next",
            "more KV memory (--kv-cache-memory-bytes) or fewer --max-num-seqs",
        )


def _memory(metrics: LiveMetrics) -> Iterator[Finding]:
    if (share := metrics.value("machine_memory_usage_perc")) > _MAX_MEMORY:
        what = "nearly full" if share > _CRITICAL_MEMORY else "high"
        yield Finding(
            f"the machine's memory is {what}: {share:.0%}",
            "model, KV cache and other programs together; or a leak, if it climbs",
            "lower --gpu-memory-utilization or --kv-cache-memory-bytes; compare "
            "process_resident_memory_bytes with memory_bytes over time",
        )


def _growth(metrics: LiveMetrics, earlier: LiveMetrics | None) -> Iterator[Finding]:
    if earlier is None:
        return
    name = "process_resident_memory_bytes"
    before, now = earlier.value(name), metrics.value(name)
    if now - before > max(_MAX_GROWTH * before, _MAX_GROWTH_BYTES):
        yield Finding(
            f"the server's memory climbs: {(now - before) / 2**20:.0f} MiB more than before",
            "the model's file is still being read in, in the first minutes; or a leak",
            "look again with a longer --interval at even load; report it if it goes on",
        )


def _latency(metrics: LiveMetrics) -> Iterator[Finding]:
    ttft = metrics.quantile("time_to_first_token_seconds", 0.95)
    queued = metrics.quantile("request_queue_time_seconds", 0.95) or 0.0
    if ttft is not None and ttft > _MAX_TTFT_S:
        if queued > ttft / 2:
            cause = "most of it is the queue: more comes than the engine serves"
            action = "more --max-num-seqs, another replica, or less admitted (--max-waiting-tokens)"
        else:
            cause = "most of it is prefill: long prompts"
            action = "share prefixes, larger --max-num-batched-tokens, more threads"
        yield Finding(f"time to first token: p95 {ttft:.2f} s", cause, action)
        yield from _prefix_cache(metrics)
    itl = metrics.quantile("inter_token_latency_seconds", 0.95)
    if itl is not None and itl > _MAX_ITL_S:
        yield Finding(
            f"time between tokens: p95 {1e3 * itl:.0f} ms",
            "long prompts in the same steps (head-of-line blocking), or too many sequences a step",
            "smaller --max-num-batched-tokens or --max-stall-ms, fewer --max-num-seqs; send long "
            "prompts to a replica of their own",
        )


def _prefix_cache(metrics: LiveMetrics) -> Iterator[Finding]:
    """Where first tokens are late: prompts that have nothing in common are well without hits, as
    long as they are computed in time."""
    queries = metrics.value("prefix_cache_queries_total")
    hits = metrics.value("prefix_cache_hits_total")
    if hits < _MIN_HIT_SHARE * queries:
        yield Finding(
            f"the prefix cache finds {hits / queries:.0%} of the prompt tokens",
            "prompts differ early: another template, tokenizer or a date at their start; or the "
            "cache forgets (see prefix_cache_evictions_total)",
            "put what is common first; send equal prefixes to one replica; more KV memory. Prompts "
            "that have nothing in common need no cache",
        )


def _requests(metrics: LiveMetrics) -> Iterator[Finding]:
    if (refused := metrics.value("requests_refused_total")) > 0:
        yield Finding(
            f"{refused:.0f} requests were refused",
            "more came than runs and may wait, or too many failed",
            "another replica, or more --max-waiting-requests if they may wait longer",
        )
    if (timeouts := metrics.value("requests_ended_early_total", cause="timeout")) > 0:
        yield Finding(
            f"{timeouts:.0f} requests ran out of time",
            "they are longer than --request-timeout allows at this speed",
            "a larger --request-timeout, or `timeout` in the request; smaller max_tokens",
        )
    if (slow := metrics.value("requests_ended_early_total", cause="slow_client")) > 0:
        yield Finding(
            f"{slow:.0f} clients were cut since they did not read",
            "a slow network, or a program that stopped reading",
            "larger --stream-buffer-tokens or --stream-grace, if they deserve it",
        )
    rate = metrics.quantile("stream_delivery_tokens_per_second", 0.5)
    if rate is not None and rate < _MIN_READING_RATE:
        yield Finding(
            f"half of the streams deliver fewer than {rate:.1f} tokens a second",
            "too many sequences at once, or a model that is too large for this machine",
            "fewer --max-num-seqs, --dtype bfloat16, a smaller model",
        )
