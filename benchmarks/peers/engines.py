"""Workloads on whole engines, each system a process that loads one checkpoint."""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from environments import (
    gguf_of,
    llama_cpp_build,
    machine_probe,
    openvino_of,
    ready_python,
    vllm_variables,
)
from line_process import LineProcess
from llmserve.bench.machine import Rates, describe_machine, medians
from page import RESULTS, cpu_of, description, heading, isa_of, runs_of, write_json
from random_models import SHAPES, write_checkpoint
from workloads import FORMATS, GGUF_FORMATS, WORKLOADS, Workload, chosen

Item = TypeVar("Item")

HERE = Path(__file__).resolve().parent
_FLOATS = ("float32", "bfloat16")
_REST_S = 0.5  # after each job
# What each runs.
FORMS_OF = {
    "llmserve": tuple(FORMATS),
    "transformers": _FLOATS,
    "llama.cpp": tuple(FORMATS),
    "vllm-cpu": _FLOATS,
    "openvino": ("bfloat16", "int8", "int4"),
}
SYSTEMS = tuple(FORMS_OF)


@dataclass(frozen=True)
class System:
    name: str
    form: str
    keeps_packed: bool = False  # llmserve with packed_cache_bytes

    def __str__(self) -> str:
        return f"{self.name}, {self.form}" + self.keeps_packed * ", packed weights kept"

    def arguments(self) -> dict[str, Any]:
        """LLM's, as worker.py gives them."""
        if self.form in _FLOATS:
            return {"dtype": self.form}
        if self.form in GGUF_FORMATS:  # the file has it
            return {"dtype": "bfloat16"}
        return {"dtype": "bfloat16", "quantization": self.form}


class Worker(LineProcess):
    """A system's process; one job at a time. Between jobs it stands still with all its processes:
    some look for work all the time, and would take it from the system that runs."""

    def __init__(
        self, system: System, python: str, model: Path, options: Any, packs_at_load: bool = False
    ) -> None:
        threads = str(options.threads)
        variables = {
            "OMP_NUM_THREADS": threads,
            "LLAMA_CPP_LIB_PATH": str(llama_cpp_build(options.folder, options.isa)),
        }
        if system.name == "llmserve":
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
            # Modules are compiled once, as the peers' were by pip; the tree need not be writable.
            variables["PYTHONDONTWRITEBYTECODE"] = ""
            variables["PYTHONPYCACHEPREFIX"] = str(options.folder / "cache" / "python")
        if system.name == "vllm-cpu":
            variables |= vllm_variables(options.folder, options.threads)
        if system.keeps_packed:
            variables["XDG_CACHE_HOME"] = str(options.folder / "cache")
            variables["KEEPS_PACKED"] = "1"
        if packs_at_load:
            variables["PACKS_AT_LOAD"] = "1"
        super().__init__(
            str(system),
            [python, str(HERE / "worker.py"), system.name, str(model), system.form, threads],
            variables,
            leads_group=True,
        )
        ready = self.answer()
        self.version, self.load_s = ready["version"], ready["load_s"]
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        self._signal(signal.SIGCONT)

    def run(self, job: str) -> dict[str, Any]:
        self.wake()
        answer: dict[str, Any] = self.ask(job)
        # What a system leaves to idle moments it does now, not in the next job.
        time.sleep(_REST_S)
        self._signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        super().close()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it may have ended, and said why
            os.killpg(self.pid, number)


def measure(options: argparse.Namespace) -> None:
    """Runs the work on every system and adds a run to the report; what it measures anew of a work
    and a format takes the place of what the report had."""
    held_to = f"-{options.isa}" if options.isa else ""
    path = options.results or RESULTS / f"peers-{options.shape}{held_to}.json"
    earlier = _earlier_runs(path, options.threads)
    if "num_drawn_layers" in SHAPES[options.shape] and not set(options.formats) <= set(
        GGUF_FORMATS
    ):
        raise SystemExit(f"{options.shape} repeats layers in GGUF files: use --formats of those")
    folder = options.folder / "models" / options.shape
    print(f"checkpoint: {folder}", flush=True)
    write_checkpoint(folder, options.shape)
    vocab_size = SHAPES[options.shape]["vocab_size"]
    rows: list[dict[str, Any]] = []
    with machine_probe(options, options.formats) as probe, ExitStack() as stack:
        workers: dict[System, Worker] = {}
        for system, worker in start_workers(options):
            workers[system] = worker
            stack.callback(worker.close)
        systems = {str(s): {"version": w.version, "load_s": w.load_s} for s, w in workers.items()}
        run = {**description(options, options.formats), "systems": systems, "rows": rows}
        for workload in chosen(options.work):
            seconds: dict[System, list[float]] = {system: [] for system in workers}
            tokens: dict[System, list[list[int]]] = {}
            measured: list[Rates] = []
            for system, worker in workers.items():  # not counted: first touches, buffers
                tokens[system] = worker.run(workload.job(vocab_size, 0))["tokens"]
            for round_idx in range(1, options.rounds + 1):
                job = workload.job(vocab_size, round_idx)
                for system in rotated(list(workers), round_idx):
                    seconds[system].append(workload.seconds(workers[system].run(job)))
                    measured.append(probe.measure())
            for system in workers:
                demand = workload.demand(SHAPES[options.shape], system.form)
                rows.append(row_of(workload, system, seconds, tokens, demand, medians(measured)))
            show(rows[-len(workers) :])
            runs = [*_without(earlier, rows), run]  # kept even if the next work is interrupted
            write_json(path, {"shape": options.shape, "threads": options.threads, "runs": runs})


def _earlier_runs(path: Path, num_threads: int) -> list[dict[str, Any]]:
    """Those of a report that this one adds to, if there is one."""
    if not path.exists():
        return []
    report = json.loads(path.read_text(encoding="utf-8"))
    places = [(*cpu_of(run), isa_of(run), run["threads"]) for run in runs_of(report)]
    here_run = {"machine": describe_machine()}
    here = (*cpu_of(here_run), isa_of(here_run), num_threads)
    if any(place != here for place in places):
        raise SystemExit(f"{path} is of {places}, this is {here}: name another with --results")
    return runs_of(report)


def _without(runs: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs without what these rows have measured anew, and without those that had no more."""
    anew = {_work_of(row) for row in rows}
    rest = [{**run, "rows": [r for r in run["rows"] if _work_of(r) not in anew]} for run in runs]
    return [run for run in rest if run["rows"]]


def _work_of(row: dict[str, Any]) -> tuple[str, str]:
    """Its work and format, of which all systems are measured together."""
    return row["workload"], row["system"].partition(", ")[2]


def start_workers(options: argparse.Namespace) -> Iterator[tuple[System, Worker]]:
    for system in systems_of(options):
        # What is left to pack after a first job would go on while others are measured.
        worker = Worker(system, *model_of(system, options), options, packs_at_load=True)
        print(f"{system}, {worker.version}: loaded in {worker.load_s:.1f} s", flush=True)
        yield system, worker


def systems_of(options: argparse.Namespace) -> Iterator[System]:
    """Those asked for, in every format asked for that they run."""
    for form in options.formats:
        yield from (System(name, form) for name in options.systems if form in FORMS_OF[name])


def model_of(system: System, options: argparse.Namespace) -> tuple[str, Path]:
    """The interpreter that runs the system, and what it loads."""
    if system.name == "llmserve":
        model = options.folder / "models" / options.shape
        if system.form in GGUF_FORMATS:
            model = gguf_of(options.folder, options.shape, system.form)
        return sys.executable, model
    python = str(ready_python(options.folder, system.name))
    if system.name == "llama.cpp":
        return python, gguf_of(options.folder, options.shape, system.form)
    if system.name == "openvino":
        return python, openvino_of(options.folder, options.shape, system.form)
    return python, options.folder / "models" / options.shape


def row_of(
    workload: Workload,
    system: System,
    seconds: dict[System, list[float]],
    tokens: dict[System, list[list[int]]],
    demand: tuple[float, float],
    rates: Rates,
) -> dict[str, Any]:
    """What a system took, beside llmserve and the bound of what the work demands."""
    own = System("llmserve", system.form)
    ratios = [peer / mine for peer, mine in zip(seconds[system], seconds[own], strict=True)]
    pairs = list(zip(tokens[system], tokens[own], strict=True))
    row = {
        "workload": workload.name,
        "system": str(system),
        "seconds": seconds[system],
        "bound_s": rates.bound_s(*demand, system.form),
        "limit": rates.limit(*demand, system.form),
        "read_bytes_per_s": rates.read_bytes_per_s,
        "gemm_ops_per_s": rates.gemm_ops_per_s,
        "tokens_per_s": workload.num_tokens / statistics.median(seconds[system]),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        # Systems round bf16 at different places, and random weights have close calls.
        "share_of_same_first_tokens": sum(a[0] == b[0] for a, b in pairs) / len(pairs),
    }
    bfloat16 = System("llmserve", "bfloat16")
    if system.name == "llmserve" and bfloat16 in seconds:
        row["speed_beside_bfloat16"] = statistics.median(
            wide / mine for wide, mine in zip(seconds[bfloat16], seconds[system], strict=True)
        )
    return row


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        print(
            f"{row['workload']:<40} {row['system']:<22} {row['tokens_per_s']:9.1f} tokens/s  "
            f"{row['ratio']:6.2f} ({row['ratio_min']:.2f}-{row['ratio_max']:.2f})  "
            f"same first tokens {row['share_of_same_first_tokens']:.0%}",
            flush=True,
        )


def table_of(report: dict[str, Any]) -> str:
    """A report as Markdown."""
    lines = [
        *heading(report),
        "| work | system | tokens/s | share of the bound | time / llmserve's (range over rounds) |",
        "| --- | --- | --- | --- | --- |",
    ]
    works = [workload.name for workload in WORKLOADS]
    rows = [row for run in runs_of(report) for row in run["rows"]]
    # Within both as they were measured.
    rows.sort(key=lambda row: (works.index(row["workload"]), list(FORMATS).index(_work_of(row)[1])))
    for row in rows:
        is_own = row["system"].startswith("llmserve")
        ratio = f"{row['ratio']:.2f} ({row['ratio_min']:.2f} to {row['ratio_max']:.2f})"
        lines.append(
            f"| {row['workload']} | {row['system']} | {row['tokens_per_s']:.1f} "
            f"| {_share_of(row)} | {1 if is_own else ratio} |"
        )
    return "\n".join(lines)


def _share_of(row: dict[str, Any]) -> str:
    if row["bound_s"] is None:
        return "-"
    share = f"{row['bound_s'] / statistics.median(row['seconds']):.0%}"
    return f"{share} of {row['limit']}" if "limit" in row else share


def rotated(items: Sequence[Item], by: int) -> list[Item]:
    return [*items[by % len(items) :], *items[: by % len(items)]]
