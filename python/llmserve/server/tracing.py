"""OpenTelemetry: a span a request, and in it what it was doing: queued, prefill, decode, stream.
They are made at the request's end, from times that are kept anyway: nothing is done per token."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.types import Scope

from llmserve.errors import NotSupported
from llmserve.server.running.activity import Run
from llmserve.server.settings import ServerSettings

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_FLUSH_MS = 3000


def open_tracing(settings: ServerSettings) -> "Tracing | None":
    """None where nothing is to be traced. Raises NotSupported without the extra."""
    if not settings.otlp_traces_endpoint:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise NotSupported(
            "otlp_traces_endpoint needs opentelemetry; pip install 'llmserve[otel]'"
        ) from error
    exporter = OTLPSpanExporter(endpoint=settings.otlp_traces_endpoint)
    return Tracing(BatchSpanProcessor(exporter))


class Tracing:
    """Spans of one server."""

    def __init__(self, processor: Any) -> None:
        """processor: an opentelemetry SpanProcessor."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "llmserve"}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("llmserve")
        self._propagator = TraceContextTextMapPropagator()

    def record(self, scope: Scope, run: Run, status: int) -> None:
        """The spans of a request that has ended."""
        from opentelemetry.trace import SpanKind

        job = run.job
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        clock = _Clock()
        root = self._tracer.start_span(
            f"{scope['method']} {scope['path']}",
            context=self._propagator.extract(headers),
            kind=SpanKind.SERVER,
            start_time=clock.from_seconds(run.arrived),
            attributes=_attributes(run, status),
        )
        for idx, stream in enumerate(run.streams):
            times = stream.record()
            if times is None:
                continue
            moments = [times.arrival_us, times.scheduled_us, times.first_token_us]
            moments.append(times.last_token_us)
            more: dict[str, Any] = {"llmserve.prompt_idx": idx} if len(run.streams) > 1 else {}
            for name, begin, end in zip(
                ("queued", "prefill", "decode"), moments, moments[1:], strict=False
            ):
                if begin:
                    # Where it ended meanwhile, the last one ends with it.
                    end_us = end or times.finished_us or time.monotonic_ns() // 1000
                    self._child(root, name, clock.from_us(begin), clock.from_us(end_us), more)
                if not end:
                    break
        if job.is_streamed and run.first_sent:
            begin_ns, end_ns = clock.from_seconds(run.first_sent), clock.from_seconds(run.last_sent)
            self._child(root, "stream", begin_ns, end_ns, {})
        root.end(clock.from_seconds(time.monotonic()))

    def _child(
        self, root: "Span", name: str, begin_ns: int, end_ns: int, attributes: Mapping[str, Any]
    ) -> None:
        from opentelemetry.trace import set_span_in_context

        span = self._tracer.start_span(
            name, set_span_in_context(root), start_time=begin_ns, attributes=attributes
        )
        span.end(max(begin_ns, end_ns))

    def close(self) -> None:
        """Sends what has not been sent, for a few seconds at most."""
        self._provider.force_flush(_FLUSH_MS)
        self._provider.shutdown()


class _Clock:
    """From the engine's clock and the loop's, both time.monotonic, to the epoch's nanoseconds."""

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def from_us(self, us: int) -> int:
        return us * 1000 + self._offset_ns

    def from_seconds(self, seconds: float) -> int:
        return int(seconds * 1e9) + self._offset_ns


def _attributes(run: Run, status: int) -> dict[str, Any]:
    """By OpenTelemetry's conventions for generative AI where they have a name."""
    states = [stream.state for stream in run.streams]
    params = states[0].params if states else None
    attributes: dict[str, Any] = {
        "gen_ai.system": "llmserve",
        "gen_ai.response.id": run.job.request_id,
        "gen_ai.request.model": run.job.model.name,
        "gen_ai.usage.input_tokens": sum(len(state.prompt.token_ids) for state in states),
        "gen_ai.usage.output_tokens": sum(state.num_generation_tokens for state in states),
        "http.response.status_code": status,
        "llmserve.cached_tokens": sum(state.num_cached_tokens for state in states),
        "llmserve.finish": run.cause or "done",
    }
    if params is not None and params.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = params.max_tokens
        attributes["gen_ai.request.temperature"] = params.temperature
    return attributes
