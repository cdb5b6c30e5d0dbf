"""The engine's trace as Chrome trace events, which ui.perfetto.dev and chrome://tracing show.

Source: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence

from llmserve import _core
from llmserve.errors import CorruptFile, InvalidArgument
from llmserve.insight.timeline import Span

# Names and arguments of events: JSON values.
Event = dict[str, object]

_ENGINE, _REQUESTS, _WIRE = 1, 2, 3  # process ids: groups of tracks
_STEPS = 1  # the track of the first replica's slices
_EXCHANGES = 1  # the track of those of whole steps
_TRACK_PREFIX = "request "
_ARRIVAL = "arrival"


def engine_events(steps: Sequence[_core.StepRecord]) -> Iterator[Event]:
    """A slice a step, with its phases in it, and counters: tracks of their own for each replica."""
    replicas = sorted({step.replica for step in steps})
    of_replica = {
        replica: f" of replica {replica}" if len(replicas) > 1 else "" for replica in replicas
    }
    names = {_STEPS + replica: f"steps{which}" for replica, which in of_replica.items()}
    yield from _names(_ENGINE, "engine", names or {_STEPS: "steps"})
    for step in steps:
        which, track = of_replica[step.replica], _STEPS + step.replica
        phases = {
            "schedule": step.schedule_us,
            "execute": step.execute_us,
            "commit": step.commit_us,
        }
        arguments: Mapping[str, object] = {
            "step": step.step_id,
            "sequences": step.num_sequences,
            "tokens": step.num_tokens,
            "prefill tokens": step.num_prefill_tokens,
            "in flight": step.num_in_flight,
        }
        now_us = step.start_us
        yield _slice(
            _ENGINE, track, step.phase.capitalize(), now_us, sum(phases.values()), arguments
        )
        for name, duration_us in phases.items():
            yield _slice(_ENGINE, track, name, now_us, duration_us, {})
            now_us += duration_us
        num_decode_tokens = step.num_tokens - step.num_prefill_tokens
        yield _counter(
            f"tokens a step{which}",
            step.start_us,
            {"prefill": step.num_prefill_tokens, "decode": num_decode_tokens},
        )
        yield _counter(f"running{which}", now_us, {"sequences": step.num_running})
        yield _counter(f"waiting{which}", now_us, {"sequences": step.num_waiting})
        yield _counter(f"KV blocks used{which}", now_us, {"blocks": step.num_blocks_used})


def exchange_events(exchanges: Sequence[_core.ExchangeRecord]) -> Iterator[Event]:
    """A slice for each time that rank 0 waited for other nodes: a track for whole steps, and one
    for each half of those that run in two. What lies between is computed."""
    if not exchanges:
        return
    halves = sorted({exchange.half for exchange in exchanges})
    names = {
        _EXCHANGES + half: f"exchanges of half {half}" if half else "exchanges" for half in halves
    }
    yield from _names(_WIRE, "other nodes", names)
    for exchange in exchanges:
        track = _EXCHANGES + exchange.half
        yield _slice(_WIRE, track, exchange.name, exchange.start_us, exchange.duration_us, {})


def request_events(
    lives: Sequence[tuple[_core.RequestRecord, str, str, list[Span]]],
) -> Iterator[Event]:
    """A track a request: record, name, what it is in words, and its life."""
    yield from _names(
        _REQUESTS,
        "requests",
        {record.request_id + 1: f"{_TRACK_PREFIX}{name}" for record, name, _, _ in lives},
    )
    for record, _, summary, spans in lives:
        track = record.request_id + 1  # track 0 is no track
        yield _instant(track, _ARRIVAL, record.arrival_us, {"request": summary})
        for span in spans:
            arguments = {"reason": span.reason, "steps": list(span.steps)}
            name = span.activity.capitalize()
            yield _slice(_REQUESTS, track, name, span.start_us, span.duration_us, arguments)
        if record.first_token_us > 0:
            yield _instant(track, "first token", record.first_token_us, {})
        if record.finished_us > 0:
            yield _instant(track, f"finished: {record.finish_reason}", record.finished_us, {})


def read_lives(path: str | os.PathLike[str]) -> dict[str, tuple[str, list[Span]]]:
    """By request: what describe_life() takes, from a file that Trace.to_perfetto wrote. Raises
    InvalidArgument for a file that cannot be opened, CorruptFile for any other."""
    names: dict[int, str] = {}
    summaries: dict[int, str] = {}
    spans: dict[int, list[Span]] = {}
    try:
        with open(path, encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
        for event in events:
            if event["pid"] != _REQUESTS or "tid" not in event:
                continue
            track, arguments = event["tid"], event.get("args", {})
            if event["name"] == "thread_name":
                names[track] = arguments["name"].removeprefix(_TRACK_PREFIX)
            elif event["name"] == _ARRIVAL:
                summaries[track] = arguments["request"]
            elif event["ph"] == "X":
                start_us = event["ts"]
                span = Span(
                    start_us,
                    start_us + event["dur"],
                    event["name"].lower(),
                    arguments["reason"],
                    tuple(arguments["steps"]),
                )
                spans.setdefault(track, []).append(span)
        return {name: (summaries[track], spans.get(track, [])) for track, name in names.items()}
    except OSError as error:
        raise InvalidArgument(f"{os.fspath(path)}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFile(
            f"{os.fspath(path)}: not a trace of llmserve: {type(error).__name__}: {error}; "
            f"write one with LLM.trace().to_perfetto(path)"
        ) from error


def _slice(
    process: int, track: int, name: str, start_us: int, duration_us: int, args: Mapping[str, object]
) -> Event:
    return {
        "ph": "X",
        "pid": process,
        "tid": track,
        "ts": start_us,
        "dur": duration_us,
        "name": name,
        "args": dict(args),
    }


def _instant(track: int, name: str, time_us: int, args: Mapping[str, object]) -> Event:
    return {
        "ph": "i",
        "pid": _REQUESTS,
        "tid": track,
        "ts": time_us,
        "name": name,
        "s": "t",
        "args": dict(args),
    }


def _counter(name: str, time_us: int, values: Mapping[str, int]) -> Event:
    return {"ph": "C", "pid": _ENGINE, "ts": time_us, "name": name, "args": dict(values)}


def _names(process: int, name: str, tracks: Mapping[int, str]) -> Iterator[Event]:
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
    for track, track_name in tracks.items():
        yield {
            "ph": "M",
            "pid": process,
            "tid": track,
            "name": "thread_name",
            "args": {"name": track_name},
        }
        yield {
            "ph": "M",
            "pid": process,
            "tid": track,
            "name": "thread_sort_index",
            "args": {"sort_index": track},
        }
