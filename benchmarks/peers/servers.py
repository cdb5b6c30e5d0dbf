"""The same streamed requests to llmserve's server and to its peers', and what serving costs.

Every server is a process that runs from the start to the end; a round loads them one after another
with the client of `llmserve bench serve`, in changing order. The engine alone, a process without a
server, runs the same prompts in the same rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments import version_of
from http_server import PERCENTILES, SYSTEMS, HttpServer
from llmserve.bench.machine import MachineProbe
from llmserve.bench.serve import Load, Report
from offline import System, Worker, rotated
from page import heading, write_report
from random_models import write_checkpoint

ENGINE = "engine alone"
__all__ = ["SYSTEMS", "measure", "table_of"]
_METRICS = ("ttfb", "ttft", "itl")
_MIN_REQUESTS = 3


class EngineAlone:
    """llmserve's engine in a process without a server."""

    name = ENGINE

    def __init__(self, options: argparse.Namespace, checkpoint: Path) -> None:
        self._worker = Worker(System("llmserve", "bfloat16"), sys.executable, checkpoint, options)
        self.pid, self.close = self._worker.pid, self._worker.close

    def run(self, load: Load) -> float:
        """Seconds of the load's prompts, as many at once as the load has."""
        prompts, num = load.prompts(), load.max_concurrency or load.num_prompts
        total_s = 0.0
        for begin in range(0, len(prompts), num):
            batch = prompts[begin : begin + num]
            job = {"prompts": batch, "max_tokens": [load.output_len] * len(batch)}
            total_s += self._worker.run(json.dumps(job))["elapsed_s"]
        return total_s


@dataclass(frozen=True)
class Run:
    """What a load took of a system: wall time, processor time of its process, and of what in
    llmserve's is serving: the main thread, which is the event loop, and the lines that the engine's
    thread writes."""

    wall_s: float
    cpu_s: float
    serving_s: float
    report: Report | None

    @classmethod
    def of(cls, system: HttpServer | EngineAlone, load: Load) -> Run:
        """Of this load, once."""
        cpu_s, serving_s = -_process_cpu_s(system.pid), -_serving_s(system)
        result = system.run(load)
        cpu_s += _process_cpu_s(system.pid)
        serving_s += _serving_s(system)
        if isinstance(result, Report):
            return cls(result.duration_s, cpu_s, serving_s, result)
        return cls(result, cpu_s, serving_s, None)


Runs = dict[tuple[str, int], list[Run]]  # by system and number at once; one a round


def measure(options: argparse.Namespace) -> None:
    """Runs every load on every server and writes the report."""
    checkpoint = options.folder / "models" / options.shape
    print(f"checkpoint: {checkpoint}", flush=True)
    write_checkpoint(checkpoint, options.shape)
    probe = MachineProbe(options.threads)
    runs: Runs = defaultdict(list)
    starts = {}
    with ExitStack() as stack:
        running: list[HttpServer | EngineAlone] = [EngineAlone(options, checkpoint)]
        stack.callback(running[0].close)
        for name in options.systems:
            server = HttpServer(name, options, checkpoint)
            stack.callback(server.close)
            running.append(server)
            starts[name] = {"version": version_of(name), "start_s": server.start_s}
        for system in running:  # not counted: first touches, buffers
            system.run(_load(options, 1, 0))
        for round_idx in range(1, options.rounds + 1):
            for num in options.concurrency:
                for system in rotated(running, round_idx):
                    run = Run.of(system, _load(options, num, round_idx))
                    runs[system.name, num].append(run)
                    _show(round_idx, num, system.name, run)
                    probe.measure()
    measured = {
        "input_len": options.input_len,
        "output_len": options.output_len,
        "systems": starts,
        "rows": [_row(runs, n, s) for n in options.concurrency for s in options.systems],
        "serving": [_cost_row(runs, n, options.output_len) for n in options.concurrency],
    }
    write_report("servers", options, ["bfloat16"], probe, measured)


def _load(options: argparse.Namespace, num: int, seed: int) -> Load:
    """`num` requests that are all there at the start; one at a time, three of them. Each round has
    other prompts, so that nobody finds them cached."""
    return Load(
        options.input_len,
        options.output_len,
        max(num, _MIN_REQUESTS),
        float("inf"),
        max_concurrency=num,
        ignore_eos=True,
        seed=100 * seed + num,
    )


def _row(runs: Runs, num: int, name: str) -> dict[str, Any]:
    """Medians over the rounds."""
    pairs = zip(runs[name, num], runs["llmserve", num], strict=True)
    ratios = [run.wall_s / own.wall_s for run, own in pairs]
    reports = [run.report for run in runs[name, num] if run.report]
    return {
        "concurrency": num,
        "system": name,
        "seconds": [run.wall_s for run in runs[name, num]],
        "output_tokens_per_s": statistics.median(r.output_throughput for r in reports),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "latencies_ms": {
            f"{metric}_p{percent}": statistics.median(
                r.latencies_ms[metric][f"p{percent}"] for r in reports
            )
            for metric in _METRICS
            for percent in PERCENTILES
        },
    }


def _cost_row(runs: Runs, num: int, output_len: int) -> dict[str, Any]:
    """llmserve's server beside its engine alone: medians over the rounds, and each round."""
    pairs = list(zip(runs["llmserve", num], runs[ENGINE, num], strict=True))
    num_tokens = max(num, _MIN_REQUESTS) * output_len
    return {
        "concurrency": num,
        "share_more_time": statistics.median(s.wall_s / e.wall_s - 1 for s, e in pairs),
        "share_more_cpu": statistics.median(s.cpu_s / e.cpu_s - 1 for s, e in pairs),
        "loop_us_a_token": statistics.median(1e6 * s.serving_s / num_tokens for s, _ in pairs),
        "served": [[s.wall_s, s.cpu_s, s.serving_s] for s, _ in pairs],
        "alone": [[e.wall_s, e.cpu_s] for _, e in pairs],
    }


def _show(round_idx: int, num: int, name: str, run: Run) -> None:
    line = f"round {round_idx}, {num:>2} at once, {name:<12} {run.wall_s:6.1f} s"
    if report := run.report:
        line += (
            f" {report.output_throughput:8.1f} tokens/s"
            f"  first after {report.latencies_ms['ttft']['p50']:7.0f} ms"
            f", next after {report.latencies_ms['itl']['p50']:6.1f} ms"
        )
    print(line, flush=True)


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
        "| at once | time more than the engine alone | processor time more "
        "| event loop and lines, a token |",
        "| --- | --- | --- | --- |",
    ]
    for row in report["serving"]:
        lines.append(
            f"| {row['concurrency']} | {row['share_more_time']:+.1%} "
            f"| {row['share_more_cpu']:+.1%} | {row['loop_us_a_token']:.0f} µs |"
        )
    return "\n".join(lines)


def _process_cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _serving_s(system: HttpServer | EngineAlone) -> float:
    text = Path(f"/proc/{system.pid}/task/{system.pid}/schedstat").read_text(encoding="utf-8")
    line_s = system.line_s() if isinstance(system, HttpServer) else 0.0
    return int(text.split()[0]) / 1e9 + line_s
