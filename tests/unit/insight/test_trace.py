"""`LLM.trace()`: every moment of a request has a reason, in words and in Perfetto's format."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_requests import add_request
from llmserve import (
    LLM,
    AsyncLLM,
    InvalidArgument,
    NotSupported,
    SamplingParams,
    Trace,
    _core,
    _core_testing,
    cli,
)
from llmserve.insight.timeline import Timelines
from offline import DEADLINE_S, LONG, generate

VOCAB = 256


def make_engine(
    num_blocks: int = 64,
    step_us: int = 100,
    gate: _core_testing.StepGate | None = None,
    **scheduler: object,
) -> _core.Engine:
    defaults = {"max_model_len": 256, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    config = _core.EngineConfig(
        cache=_core.CacheConfig(num_blocks=num_blocks, block_size=8),
        scheduler=_core.SchedulerConfig(**{**defaults, **scheduler}),
    )
    options = _core_testing.OracleOptions(vocab_size=VOCAB, step_us=step_us)
    return _core_testing.oracle_engine(config, options, gate=gate)


def run(
    engine: _core.Engine,
    prompts: list[list[int]],
    gate: _core_testing.StepGate | None = None,
    **params: object,
) -> Trace:
    """The gate, if any, holds the first request's step until all the others have arrived; with
    max_tokens=None the first alone generates 32 tokens, and none is streamed."""
    fields = {"detokenize": False, "max_tokens": 8, **params}
    is_first_longest = fields["max_tokens"] is None
    for prompt in prompts:
        if is_first_longest:
            fields["max_tokens"] = 32 if prompt is prompts[0] else 4
        add_request(
            engine, prompt, _core.SamplingParams(**fields), is_streamed=not is_first_longest
        )
        if gate is not None and prompt is prompts[0]:
            gate.wait_until_held()
    if gate is not None:
        gate.open()
    deadline = time.monotonic() + DEADLINE_S
    while engine.metrics().num_requests_finished < len(prompts):
        assert time.monotonic() < deadline
        engine.wait_events(0.01)
    return trace_of(engine)


def trace_of(engine: _core.Engine) -> Trace:
    return Trace(engine.trace(), engine.request_records(), engine.metrics().num_blocks_total, {})


# What waits for seats, blocks, tokens, a prefix and a batch, and is chunked and preempted.
WORKLOADS: dict[str, tuple[dict[str, Any], list[list[int]], dict[str, Any]]] = {
    "seats": ({}, [[1, 2, 3 + i] for i in range(20)], {}),
    "blocks": ({"num_blocks": 12}, [[9 + i] * 30 for i in range(8)], {"max_tokens": 40}),
    "samples": ({"num_blocks": 24}, [[9 + i] * 20 for i in range(6)], {"n": 3, "max_tokens": 20}),
    "chunks": ({"max_num_batched_tokens": 16}, [[9 + i] * 60 for i in range(6)], {}),
    "pace": (
        {"max_stall_us": 1, "step_us": 500},
        [[9 + i] * 60 for i in range(6)],
        {"max_tokens": 40},
    ),
    "spread": (
        {"min_spread_tokens": 16},
        [[9] * 20, *([9 + i] * 60 for i in range(3))],
        {"max_tokens": None},
    ),
    "prefix": (
        {"max_num_seqs": 8},
        [[2, 1, 2], *([*range(1, 60), 60 + i] for i in range(6))],
        {},
    ),
    "batch": ({"policy": "static"}, [[1, 2, 3 + i] for i in range(10)], {}),
}
REASONS = {
    "seats": "all seats were taken",
    "blocks": "the KV pool was full",
    "samples": "all seats were taken",
    "chunks": "left for later steps",
    "pace": "left, since others decode (max_stall_ms)",
    "spread": "left, since others generate for longer",
    "prefix": "was computing the next blocks of its prompt",
    "batch": "the policy was filling a batch",
}


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_moment_of_every_request_has_a_reason(workload: str) -> None:
    options, prompts, params = WORKLOADS[workload]
    # A batch is filled before its first step begins.
    gate = None if workload == "batch" else _core_testing.StepGate(1)
    engine = make_engine(gate=gate, **options)
    trace = run(engine, prompts, gate, **params)
    reasons = ""
    for record in trace.requests:
        spans = trace.timeline(record.request_id)
        assert spans[0].start_us == record.arrival_us
        assert spans[-1].end_us == record.finished_us
        assert all(a.end_us == b.start_us for a, b in pairwise(spans))
        assert all(span.duration_us > 0 for span in spans)
        reasons += "".join(span.reason for span in spans)
    assert REASONS[workload] in reasons
    assert "nothing was said" not in reasons
    assert "forgotten" not in reasons
    engine.close()


def test_an_explanation_tells_the_life_of_a_request() -> None:
    engine = make_engine(max_num_seqs=1, step_us=1000)
    trace = run(engine, [[1, 2, 3], list(range(1, 101))])
    text = trace.explain(1)
    assert text.startswith("request 1: 100 prompt tokens, 8 generated, finished: length")
    assert "waiting" in text
    assert "all seats were taken (max_num_seqs, or fewer after a step that failed)" in text
    assert "64 tokens, 36 left for later steps" in text
    assert "a token a step" in text
    (first,) = [step for step in trace.steps_of(1) if step.num_prefill_tokens == 64]
    assert f"step {first.step_id}:" in text
    engine.close()


def test_others_are_called_by_the_names_that_their_users_know() -> None:
    for workload, wanted in (("seats", "behind request req-"), ("prefix", "request req-")):
        options, prompts, params = WORKLOADS[workload]
        gate = _core_testing.StepGate(1)
        engine = make_engine(gate=gate, **options)
        trace = run(engine, prompts, gate, **params)
        names = {record.request_id: f"req-{record.request_id}" for record in trace.requests}
        timelines = Timelines(list(trace), names)
        reasons = [span.reason for record in trace.requests for span in timelines.of(record)]
        assert any(reason.startswith(wanted) for reason in reasons)
        assert not any(re.search(r"request \d", reason) for reason in reasons)
        engine.close()


def step(step_id: int, start_us: int, num_prefill_tokens: int, **scheduled: int) -> Any:
    """A record of a step that took a millisecond; scheduled: tokens by request, as `r0=1`."""
    decisions = [
        SimpleNamespace(request_id=int(name[1:]), kind="scheduled", detail=num_tokens)
        for name, num_tokens in scheduled.items()
    ]
    return SimpleNamespace(
        step_id=step_id, start_us=start_us, draft_us=0, schedule_us=0, execute_us=1000, commit_us=0,
        num_prefill_tokens=num_prefill_tokens, decisions=decisions,
    )  # fmt: skip


def test_a_decode_tells_its_steps_times_and_whose_prompts_made_the_longest_one_long() -> None:
    steps = [
        step(4, 1000, 2, r0=2),
        step(5, 2000, 0, r0=1),
        step(6, 3000, 300, r0=1, r1=100, r2=200, r3=1),
        step(7, 9000, 9, r0=1, r2=9),
        step(8, 11_000, 0, r0=1),
    ]
    request: Any = SimpleNamespace(
        request_id=0, arrival_us=0, queued_us=0, first_token_us=2000, finished_us=12_000
    )

    def told(steps: list[Any]) -> str:
        *_, decode = Timelines(steps).of(request)
        assert decode.activity == "decode"
        return decode.reason

    assert told(steps) == (
        "a token a step; median 2.000 ms, longest 6.000 ms (step 6, with 300 prompt tokens of 2 "
        "others)"
    )
    assert told([steps[1], steps[4]]).endswith("longest 9.000 ms (step 5)")
    assert told(steps[:2]) == "a token a step"


def test_a_request_that_still_runs_is_explained_up_to_now() -> None:
    gate = _core_testing.StepGate(6)
    engine = make_engine(gate=gate)
    request = add_request(engine, [1, 2, 3], _core.SamplingParams(detokenize=False, max_tokens=200))
    gate.wait_until_held()
    text = trace_of(engine).explain(request)
    gate.open()
    assert "not finished" in text
    assert "decode" in text
    engine.close()


def test_unknown_requests_are_refused_with_those_there_are() -> None:
    engine = make_engine()
    trace = run(engine, [[1, 2], [3, 4]])
    for unknown in ("2", 2, "x"):
        with pytest.raises(InvalidArgument, match="it has the last 2, 0 to 1"):
            trace.explain(unknown)
    engine.close()


def test_the_oldest_requests_are_forgotten_first() -> None:
    engine = make_engine(step_us=0, max_num_seqs=64)
    trace = run(engine, [[1 + i % 200] for i in range(4100)], max_tokens=1)
    assert [record.request_id for record in trace.requests] == list(range(4, 4100))
    engine.close()


def test_records_of_requests_count_what_happened() -> None:
    engine = make_engine()
    prompt = list(range(1, 42))
    run(engine, [prompt])
    add_request(engine, prompt, _core.SamplingParams(detokenize=False, max_tokens=5, n=2))
    while engine.metrics().num_requests_finished < 2:
        time.sleep(0.001)
    _, record = trace_of(engine).requests
    assert (record.num_prompt_tokens, record.num_cached_tokens) == (41, 40)
    assert (record.num_generation_tokens, record.num_samples) == (10, 2)
    assert record.finish_reason == "length"
    times = [
        record.arrival_us,
        record.queued_us,
        record.scheduled_us,
        record.first_token_us,
        record.last_token_us,
        record.finished_us,
    ]
    assert times == sorted(times)
    engine.close()


def exported(trace: Trace, tmp_path: Path) -> list[dict[str, Any]]:
    path = tmp_path / "trace.json"
    trace.to_perfetto(path)

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    data = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    assert set(data) == {"traceEvents", "displayTimeUnit"}
    events: list[dict[str, Any]] = data["traceEvents"]
    return events


# Fields of each phase of event, and their types: the Trace Event Format.
SCHEMA: dict[str, dict[str, type]] = {
    "X": {"pid": int, "tid": int, "ts": int, "dur": int, "name": str, "args": dict},
    "i": {"pid": int, "tid": int, "ts": int, "name": str, "s": str},
    "C": {"pid": int, "ts": int, "name": str, "args": dict},
    "M": {"pid": int, "name": str, "args": dict},
}


def test_the_export_is_valid_trace_events_with_a_track_a_request(tmp_path: Path) -> None:
    engine = make_engine(num_blocks=12)
    trace = run(engine, [[9 + i] * 30 for i in range(8)], max_tokens=40)
    events = exported(trace, tmp_path)
    for event in events:
        for field, kind in SCHEMA[event["ph"]].items():
            assert isinstance(event[field], kind), event
        assert event.get("dur", 0) >= 0
        assert event["ph"] != "C" or all(isinstance(v, int) for v in event["args"].values())
    names = Counter((event["ph"], event["name"]) for event in events)
    assert names["X", "Prefill"] > 0
    assert names["X", "Decode"] > 0
    assert names["X", "execute"] == len(trace)
    assert names["i", "first token"] == names["i", "finished: length"] == 8
    for counter in ("running", "waiting", "KV blocks used", "tokens a step"):
        assert names["C", counter] == len(trace)
    tracks = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert tracks == named
    assert len(tracks) == 1 + 8


def test_the_command_explains_what_was_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = make_engine(num_blocks=12)
    trace = run(engine, [[9 + i] * 30 for i in range(8)], max_tokens=40)
    path = tmp_path / "trace.json"
    trace.to_perfetto(path)
    assert cli.main(["explain", str(path)]) == 0
    assert capsys.readouterr().out.count("30 prompt tokens") == 8
    assert cli.main(["explain", str(path), "3"]) == 0
    assert capsys.readouterr().out == trace.explain(3) + "\n"
    assert cli.main(["explain", str(path), "8"]) == 2
    assert "has no request '8'" in capsys.readouterr().err
    engine.close()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "No such file"),
        ("", "JSONDecodeError"),
        ("[]", "TypeError"),
        ('{"traceEvents": [{}]}', "KeyError"),
        ('{"traceEvents": [{"pid": 2, "tid": [], "name": "x", "ph": "X"}]}', "KeyError"),
        ("[" * 100_000, "RecursionError"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: str | None, message: str
) -> None:
    path = tmp_path / "trace.json"
    if data is not None:
        path.write_text(data)
    assert cli.main(["explain", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_slices_of_one_track_nest(tmp_path: Path) -> None:
    engine = make_engine(num_blocks=12)
    events = exported(run(engine, [[9 + i] * 30 for i in range(8)], max_tokens=40), tmp_path)
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in tracks.values():
        open_ends: list[int] = []
        for start, end in sorted(slices, key=lambda s: (s[0], -s[1])):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)
    engine.close()


def test_requests_are_known_by_their_users_names(checkpoint: Path) -> None:
    async def main() -> str:
        async with AsyncLLM(checkpoint, num_threads=1) as llm:
            async for _ in llm.generate("hello", LONG, "mine"):
                pass
            return llm.trace().explain("mine")

    assert asyncio.run(main()).startswith("request mine: 4 prompt tokens, 200 generated")


def test_the_trace_of_an_llm_is_a_sequence_of_steps(llm: LLM) -> None:
    generate(llm, "hello")
    trace = llm.trace()
    assert list(trace)[-1].step_id == trace[-1].step_id
    assert len(trace[:1]) == 1
    assert repr(trace).startswith(f"Trace({len(trace)} steps, ")
    assert trace[-1].num_running == 0
    assert trace[-2].num_running == 1
    assert trace[-2].num_blocks_used > 0


def test_a_plot_shows_tokens_sequences_and_the_pool() -> None:
    pytest.importorskip("matplotlib", reason="an extra")
    engine = make_engine()
    figure = run(engine, [[1, 2, 3 + i] for i in range(20)]).plot()
    labels = [axes.get_ylabel() for axes in figure.axes]
    assert labels == ["tokens a step", "sequences", "KV pool in use (%)"]
    figure.canvas.draw()
    engine.close()


def test_a_plot_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(NotSupported, match=r"pip install 'llmserve\[plot\]'"):
        Trace([], [], 1, {}).plot()


MARKUP = "<script>alert(1)</script> & <b>bold</b>"


def test_tables_show_markup_as_text(checkpoint: Path) -> None:
    with LLM(checkpoint, num_threads=1) as llm:
        outputs = generate(llm, [MARKUP, [5, 6]], SamplingParams(max_tokens=3, n=2, seed=1))
        pages = [
            outputs._repr_html_(),  # type: ignore[attr-defined]
            outputs[0]._repr_html_(),  # type: ignore[attr-defined]
            llm._repr_html_(),
            llm.trace()._repr_html_(),
        ]
    pages.append(llm._repr_html_())
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; &lt;b&gt;" in pages[0]
    for page in pages:
        assert page.startswith("<table>")
        assert page.endswith("</table>")
        assert "<script" not in page
        assert "<b>" not in page
    assert "2 outputs" in pages[0]
    assert "prefill" in pages[3]
    assert "LLM(closed)" in pages[4]


def test_an_output_is_still_a_list(llm: LLM) -> None:
    outputs = generate(llm, [[1], [2]])
    assert isinstance(outputs, list)
    assert outputs == list(outputs)
