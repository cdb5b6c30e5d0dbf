"""OpenTelemetry spans: what they say of a request, and where they go."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from llmserve import AsyncLLM
from llmserve.cli import main
from llmserve.errors import NotSupported
from llmserve.server.settings import ServerSettings
from llmserve.server.tracing import Tracing, open_tracing
from serving import DEADLINE_S, RunningServer, events, running_server

pytest.importorskip("opentelemetry.sdk")

COMPLETIONS = "/v1/completions"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Spans:
    """A server that keeps its spans."""

    def __init__(self, server: RunningServer, exporter: Any) -> None:
        self.server = server
        self._exporter = exporter

    def of(self, num_requests: int) -> list[Any]:
        """Those of the last requests, roots last, as soon as they are there."""

        def roots() -> int:
            return sum(span.name.startswith("POST") for span in self._exporter.get_finished_spans())

        self.server.wait_until(lambda: roots() >= num_requests, "the spans")
        spans = list(self._exporter.get_finished_spans())
        self._exporter.clear()
        return spans


@pytest.fixture
def spans(demo: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[Spans]:
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    tracing = Tracing(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("llmserve.server.app.open_tracing", lambda _: tracing)
    with running_server(demo) as server:
        yield Spans(server, exporter)


def test_a_stream_is_queued_prefilled_decoded_and_sent(spans: Spans) -> None:
    body = {"prompt": "Once", "max_tokens": 8, "ignore_eos": True, "stream": True}
    list(events(spans.server.open_stream(COMPLETIONS, **body)))
    *children, root = spans.of(1)
    assert [child.name for child in children] == ["queued", "prefill", "decode", "stream"]
    assert {child.parent.span_id for child in children} == {root.context.span_id}
    assert root.attributes["gen_ai.usage.output_tokens"] == 8
    assert root.attributes["http.response.status_code"] == 200
    assert root.attributes["gen_ai.response.id"].startswith("cmpl-")
    queued, prefill, decode, _ = children
    assert queued.start_time <= queued.end_time == prefill.start_time <= prefill.end_time
    assert prefill.end_time == decode.start_time < decode.end_time <= root.end_time
    assert root.parent is None


def test_a_traceparent_is_honoured(spans: Spans) -> None:
    body = {"prompt": "Once", "max_tokens": 2}
    for flags, is_sampled in (("01", True), ("00", False)):
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-{flags}"}
        assert spans.server.request("POST", COMPLETIONS, body, headers)[0] == 200
        if is_sampled:
            *children, root = spans.of(1)
            assert f"{root.context.trace_id:032x}" == TRACE
            assert f"{root.parent.span_id:016x}" == PARENT
            assert {child.context.trace_id for child in children} == {root.context.trace_id}
    assert spans.server.request("POST", COMPLETIONS, body, {"traceparent": "nonsense"})[0] == 200
    (root,) = [span for span in spans.of(1) if span.name.startswith("POST")]
    assert root.parent is None  # and nothing of the one whose caller did not want it


def test_prompts_have_spans_of_their_own_and_one_without_tokens_ends_early(spans: Spans) -> None:
    body: dict[str, Any] = {"prompt": ["Once", "There"], "max_tokens": 2}
    assert spans.server.post(COMPLETIONS, **body)[0] == 200
    children = spans.of(1)[:-1]
    assert [child.attributes["llmserve.prompt_idx"] for child in children] == [0, 0, 0, 1, 1, 1]
    body = {"input": "Once"}
    assert spans.server.post("/v1/embeddings", **body)[0] == 200
    assert spans.of(1)[0].name == "queued"
    # What was refused before it ran has no spans.
    assert spans.server.post(COMPLETIONS, prompt="x", temperature=-1)[0] == 400


def test_spans_are_sent_by_otlp_over_http(demo: AsyncLLM) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    received: list[str] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.path == "/v1/traces"
            for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
                for scope in resource.scope_spans:
                    received.extend(span.name for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    collector = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=collector.serve_forever, daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    with running_server(demo, otlp_traces_endpoint=endpoint) as server:
        assert server.post(COMPLETIONS, prompt="Once", max_tokens=2)[0] == 200
    collector.shutdown()
    thread.join(DEADLINE_S)
    collector.server_close()
    assert received == ["queued", "prefill", "decode", f"POST {COMPLETIONS}"]


def test_without_the_extra_the_flag_is_refused_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    settings = ServerSettings(otlp_traces_endpoint="http://127.0.0.1:4318/v1/traces")
    with pytest.raises(NotSupported, match=r"llmserve\[otel\]"):
        open_tracing(settings)
    assert open_tracing(ServerSettings()) is None
    flags = ["--otlp-traces-endpoint", settings.otlp_traces_endpoint, "--port", "0"]
    assert main(["serve", "/nowhere", *flags]) == 2
    assert "llmserve[otel]" in capsys.readouterr().err


def test_nothing_of_opentelemetry_is_imported_unasked() -> None:
    import subprocess

    code = (
        "import sys, llmserve.server.app, llmserve.server.tracing; "
        "print([m for m in sys.modules if m.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
