"""The same streamed requests to llmserve's server and to its peers', and what serving costs.

Every server is a process that runs from the start to the end; a round loads them one after another
with the client of `llmserve bench serve`, in changing order. What serving costs is measured beside
them, on llmserve's server and a process that has the engine alone: the same prompts in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bare_send import bare_send_us
from engines import System, Worker, rotated
from environments import machine_probe, version_of
from http_server import PERCENTILES, SYSTEMS, HttpServer
from llmserve.bench.serve import Load, Report
from page import heading, write_report
from random_models import write_checkpoint

__all__ = ["SYSTEMS", "measure", "table_of"]
_METRICS = ("ttfb", "ttft", "itl")
_MIN_REQUESTS = 3
_NUM_TURNS = 4  # a round, of one request
_SETTLE_S = 0.05  # for the loop to let go of connections that were just closed


class EngineAlone:
    """llmserve's engine in a process without a server."""

    def __init__(self, options: argparse.Namespace, checkpoint: Path) -> None:
        self._worker = Worker(System("llmserve", "bfloat16"), sys.executable, checkpoint, options)
        self.pid, self.close = self._worker.pid, self._worker.close

    def run(self, load: Load) -> float:
        """Seconds of the load's prompts, all at once."""
        prompts = load.prompts()
        job = {"prompts": prompts, "max_tokens": [load.output_len] * len(prompts)}
        seconds: float = self._worker.run(json.dumps(job))["elapsed_s"]
        return seconds


@dataclass(frozen=True)
class Cost:
    """What a load took of a process: wall time, processor time, and of what in llmserve's is
    serving: the main thread, which is the event loop, and the lines that the engine's thread
    writes."""

    wall_s: float
    cpu_s: float
    loop_s: float
    line_s: float

    @property
    def serving_s(self) -> float:
        """The event loop's and the lines'."""
        return self.loop_s + self.line_s

    @classmethod
    def of(cls, system: HttpServer | EngineAlone, load: Load) -> Cost:
        """Of this load, once."""
        line_s = -_line_s(system)  # first and last: asking for it is work of the loop's, too
        time.sleep(_SETTLE_S)
        cpu_s, loop_s = -_process_cpu_s(system.pid), -_loop_s(system.pid)
        result = system.run(load)
        time.sleep(_SETTLE_S)
        cpu_s += _process_cpu_s(system.pid)
        loop_s += _loop_s(system.pid)
        wall_s = result.duration_s if isinstance(result, Report) else result
        return cls(wall_s, cpu_s, loop_s, line_s + _line_s(system))


Reports = dict[tuple[str, int], list[Report]]  # by system and number at once; one a round
Pairs = dict[int, list[tuple[Cost, Cost]]]  # by number at once: served, and the engine alone


def measure(options: argparse.Namespace) -> None:
    """Runs every load on every server and writes the report."""
    checkpoint = options.folder / "models" / options.shape
    print(f"checkpoint: {checkpoint}", flush=True)
    write_checkpoint(checkpoint, options.shape)
    reports: Reports = defaultdict(list)
    pairs: Pairs = defaultdict(list)
    sends_us: dict[int, list[float]] = defaultdict(list)  # one a round
    with machine_probe(options, ["bfloat16"]) as probe, ExitStack() as stack:
        alone = EngineAlone(options, checkpoint)
        stack.callback(alone.close)
        servers: dict[str, HttpServer] = {}
        for name in options.systems:
            servers[name] = HttpServer(name, options, checkpoint)
            stack.callback(servers[name].close)
        for system in (alone, *servers.values()):  # not counted: first touches, buffers
            system.run(_load(options, 1, _MIN_REQUESTS, 0))
        for round_idx in range(1, options.rounds + 1):
            for num in options.concurrency:
                load = _load(options, num, max(num, _MIN_REQUESTS), 100 * round_idx + num)
                for name in rotated(list(servers), round_idx):
                    reports[name, num].append(servers[name].run(load))
                    _show(round_idx, num, name, reports[name, num][-1])
                    probe.measure()
                for turn in range(max(_NUM_TURNS // num, 1)):
                    seed = 10_000 * (turn + 1) + 100 * round_idx + num
                    load = _load(options, num, num, seed)
                    is_swapped = (round_idx + turn) % 2 == 1
                    pairs[num].append(_pair(servers["llmserve"], alone, load, is_swapped))
                sends_us[num].append(bare_send_us(num, options.threads))
    measured = {
        "input_len": options.input_len,
        "output_len": options.output_len,
        "systems": {
            name: {"version": version_of(name), "start_s": server.start_s}
            for name, server in servers.items()
        },
        "rows": [_row(reports, n, s) for n in options.concurrency for s in options.systems],
        "serving": [_cost_row(pairs, sends_us, n, options.output_len) for n in options.concurrency],
    }
    write_report("servers", options, ["bfloat16"], probe, measured)


def _load(options: argparse.Namespace, num: int, num_requests: int, seed: int) -> Load:
    """So many requests, `num` at a time. Another seed is other prompts, which nobody has cached."""
    return Load(
        options.input_len,
        options.output_len,
        num_requests,
        float("inf"),
        max_concurrency=num,
        ignore_eos=True,
        seed=seed,
    )


def _pair(
    served: HttpServer, alone: EngineAlone, load: Load, is_swapped: bool
) -> tuple[Cost, Cost]:
    """One right after the other: a machine that is slow for a while is slow for both."""
    if is_swapped:
        cost = Cost.of(alone, load)
        pair = Cost.of(served, load), cost
    else:
        pair = Cost.of(served, load), Cost.of(alone, load)
    ratio = pair[0].wall_s / pair[1].wall_s
    print(f"{load.num_prompts} served: {ratio:.3f} of the engine's time alone", flush=True)
    return pair


def _row(reports: Reports, num: int, name: str) -> dict[str, Any]:
    """Medians over the rounds."""
    own, mine = reports["llmserve", num], reports[name, num]
    ratios = [a.duration_s / b.duration_s for a, b in zip(mine, own, strict=True)]
    return {
        "concurrency": num,
        "system": name,
        "seconds": [report.duration_s for report in mine],
        "output_tokens_per_s": statistics.median(report.output_throughput for report in mine),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "latencies_ms": {
            f"{metric}_p{percent}": statistics.median(
                report.latencies_ms[metric][f"p{percent}"] for report in mine
            )
            for metric in _METRICS
            for percent in PERCENTILES
        },
    }


def _cost_row(
    pairs: Pairs, sends_us: dict[int, list[float]], num: int, output_len: int
) -> dict[str, Any]:
    """llmserve's server beside its engine alone, and its lines beside plain sends: medians, and
    each of the pairs."""
    num_tokens = num * output_len
    return {
        "concurrency": num,
        "share_more_time": statistics.median(s.wall_s / e.wall_s - 1 for s, e in pairs[num]),
        "share_more_cpu": statistics.median(s.cpu_s / e.cpu_s - 1 for s, e in pairs[num]),
        "loop_us_a_token": statistics.median(1e6 * s.serving_s / num_tokens for s, _ in pairs[num]),
        "line_us_a_token": statistics.median(1e6 * s.line_s / num_tokens for s, _ in pairs[num]),
        "bare_send_us": statistics.median(sends_us[num]),
        "served": [[s.wall_s, s.cpu_s, s.serving_s] for s, _ in pairs[num]],
        "alone": [[e.wall_s, e.cpu_s] for _, e in pairs[num]],
    }


def _show(round_idx: int, num: int, name: str, report: Report) -> None:
    print(
        f"round {round_idx}, {num:>2} at once, {name:<12} {report.duration_s:6.1f} s"
        f" {report.output_throughput:8.1f} tokens/s"
        f"  first after {report.latencies_ms['ttft']['p50']:7.0f} ms"
        f", next after {report.latencies_ms['itl']['p50']:6.1f} ms",
        flush=True,
    )


def table_of(report: dict[str, Any]) -> str:
    """A report as Markdown."""
    lines = [
        *heading(report),
        f"Prompts of {report['input_len']} tokens, {report['output_len']} generated; milliseconds "
        "as P50 / P99.",
        "",
        "| at once | server | output tokens/s | first byte | first token | between tokens "
        "| time / llmserve's (range over rounds) |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in report["rows"]:
        ratio = f"{row['ratio']:.2f} ({row['ratio_min']:.2f} to {row['ratio_max']:.2f})"
        pairs = " | ".join(
            f"{row['latencies_ms'][f'{metric}_p50']:,.0f}"
            f" / {row['latencies_ms'][f'{metric}_p99']:,.0f}"
            for metric in _METRICS
        )
        lines.append(
            f"| {row['concurrency']} | {row['system']} | {row['output_tokens_per_s']:.1f} "
            f"| {pairs} | {1 if row['system'] == 'llmserve' else ratio} |"
        )
    lines += [
        "",
        "| at once | time more than the engine alone (range over pairs) | processor time more "
        "| event loop and lines, a token | of which lines | a bare send |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in report["serving"]:
        shares = [s[0] / e[0] - 1 for s, e in zip(row["served"], row["alone"], strict=True)]
        lines.append(
            f"| {row['concurrency']} | {row['share_more_time']:+.1%} "
            f"({min(shares):+.0%} to {max(shares):+.0%}) "
            f"| {row['share_more_cpu']:+.1%} | {row['loop_us_a_token']:.0f} µs "
            f"| {_us(row.get('line_us_a_token'))} | {_us(row.get('bare_send_us'))} |"
        )
    return "\n".join(lines)


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} µs"


def _process_cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _loop_s(pid: int) -> float:
    """Of a process' main thread."""
    text = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text(encoding="utf-8")
    return int(text.split()[0]) / 1e9


def _line_s(system: HttpServer | EngineAlone) -> float:
    return system.line_s() if isinstance(system, HttpServer) else 0.0
