"""From a process' start to its first token, the memory that it takes at its peak, and what the
engine adds to the execution of a step.

The files are in the page cache. A start is one process, from its creation (interpreter and imports
with it) to the first token of a prompt of 16, measured alike for all. llmserve starts as it does by
default, and once more with its packed weights kept from an earlier start.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from engines import System, Worker, model_of, systems_of
from environments import machine_probe, version_of
from llmserve import LLM, SamplingParams
from page import heading, write_report
from random_models import write_checkpoint
from step_times import decode_times

_JOB = json.dumps({"prompts": [list(range(10, 26))], "max_tokens": [1]})
_NUM_SEQUENCES, _NUM_STEPS = 32, 48


def measure(options: argparse.Namespace) -> None:
    """Starts every system once a round, in shuffled order, and writes the report."""
    checkpoint = options.folder / "models" / options.shape
    print(f"checkpoint: {checkpoint}", flush=True)
    write_checkpoint(checkpoint, options.shape)
    systems = list(systems_of(options))
    kept = [replace(system, keeps_packed=True) for system in systems if system.name == "llmserve"]
    for system in kept:
        _start(system, options)  # not counted: it packs and keeps
    systems += kept
    seconds: dict[System, list[float]] = {system: [] for system in systems}
    peaks: dict[System, list[int]] = {system: [] for system in systems}
    # Not in turns: who starts pays for the memory that the one before gave back, and that would
    # always be the same one's.
    orders = random.Random(0)
    with machine_probe(options, options.formats) as probe:
        for round_idx in range(1, options.rounds + 1):
            for system in orders.sample(systems, len(systems)):
                start_s, peak_bytes = _start(system, options)
                seconds[system].append(start_s)
                peaks[system].append(peak_bytes)
                print(f"round {round_idx}, {system}: {start_s:.2f} s, {peak_bytes / 1e9:.2f} GB",
                      flush=True)  # fmt: skip
                probe.measure()
    measured = {
        "systems": {str(system): {"version": version_of(system.name)} for system in systems},
        "rows": [_row(system, seconds, peaks, checkpoint, options.threads) for system in systems],
        "step": _step_us(checkpoint, options.threads),
    }
    write_report("starts", options, options.formats, probe, measured)


def _start(system: System, options: argparse.Namespace) -> tuple[float, int]:
    """Seconds from the process' creation to its first token, and its peak of resident memory."""
    python, model = model_of(system, options)
    weights = [model] if model.is_file() else [*model.glob("*.safetensors"), *model.glob("*.bin")]
    if system.keeps_packed:
        weights += (options.folder / "cache").rglob("*.safetensors")
    for path in weights:
        with path.open("rb") as file:  # into the page cache
            while file.read(2**24):
                pass
    began = time.perf_counter()
    worker = Worker(system, python, model, options)
    try:
        worker.wake()
        worker.ask(_JOB)  # without the rest that follows a run
        return time.perf_counter() - began, _peak_bytes(worker.pid)
    finally:
        worker.close()


def _peak_bytes(pid: int) -> int:
    """Of the process and of those that it started."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    lines = dict(line.split(":", 1) for line in status.splitlines())
    children = [
        int(child)
        for path in Path(f"/proc/{pid}/task").glob("*/children")
        for child in path.read_text(encoding="utf-8").split()
    ]
    return 1024 * int(lines["VmHWM"].split()[0]) + sum(map(_peak_bytes, children))


def _row(
    system: System,
    seconds: dict[System, list[float]],
    peaks: dict[System, list[int]],
    checkpoint: Path,
    num_threads: int,
) -> dict[str, Any]:
    own = seconds[System("llmserve", system.form)]
    ratios = [peer / mine for peer, mine in zip(seconds[system], own, strict=True)]
    planned = None
    if system.name == "llmserve":
        # Of the KV pool a first token touches next to nothing.
        plan = LLM.plan(str(checkpoint), num_threads=num_threads, **system.arguments())
        planned = plan.weight_bytes + plan.workspace_bytes
    return {
        "system": str(system),
        "seconds": seconds[system],
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "peak_bytes": statistics.median(peaks[system]),
        "planned_bytes": planned,
    }


def _step_us(checkpoint: Path, num_threads: int) -> dict[str, float]:
    """Medians over the steps in which all sequences decode, of the engine's own trace."""
    prompts = [[10 + idx, 11, 12, 13] for idx in range(_NUM_SEQUENCES)]
    params = SamplingParams(
        temperature=0.0, max_tokens=_NUM_STEPS, ignore_eos=True, detokenize=False
    )
    with LLM(
        str(checkpoint), dtype="bfloat16", num_threads=num_threads, defer_packing=False
    ) as llm:
        llm.generate(prompts, params, use_tqdm=False)
        steps = list(llm.trace())
    return {"num_sequences": _NUM_SEQUENCES, **decode_times(steps, _NUM_SEQUENCES)}


def table_of(report: dict[str, Any]) -> str:
    """A report as Markdown."""
    lines = [
        *heading(report),
        "| system | start to first token, s | time / llmserve's (range over rounds) "
        "| peak memory, GB | planned |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in report["rows"]:
        is_own = row["planned_bytes"] is not None
        is_compared_with = is_own and "kept" not in row["system"]
        ratio = f"{row['ratio']:.2f} ({row['ratio_min']:.2f} to {row['ratio_max']:.2f})"
        planned = f"{row['planned_bytes'] / 1e9:.2f}" if is_own else "-"
        lines.append(
            f"| {row['system']} | {statistics.median(row['seconds']):.2f} "
            f"| {1 if is_compared_with else ratio} | {row['peak_bytes'] / 1e9:.2f} | {planned} |"
        )
    step = report["step"]
    lines += [
        "",
        f"A step of {step['num_sequences']} decoding requests executes for "
        f"{step['execute_us'] / 1e3:,.1f} ms; the engine adds {step['beyond_execution_us']:.0f} µs "
        f"({step['schedule_us']:.0f} to schedule, {step['commit_us']:.0f} to commit).",
    ]
    return "\n".join(lines)
