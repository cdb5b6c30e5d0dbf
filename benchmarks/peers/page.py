"""What was measured: as a report in benchmarks/results, and as tables of docs/performance."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmserve.bench.machine import MachineProbe, Rates, describe_machine

Cpu = tuple[str, str | None]  # its name, and the numbers that it gives itself

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
TARGETS_PAGE = ROOT / "docs" / "performance.md"
PEERS_PAGE = ROOT / "docs" / "performance" / "peers.md"
SERVERS_PAGE = ROOT / "docs" / "performance" / "servers.md"
EXPERTS_PAGE = ROOT / "docs" / "experts.md"
GPU_PAGE = ROOT / "docs" / "performance" / "gpu.md"


def write_report(
    kind: str,
    options: argparse.Namespace,
    formats: list[str],
    probe: MachineProbe,
    measured: dict[str, Any],
) -> None:
    """KIND-SHAPE-FORMAT.json, unless the options name another file: how and where it was measured,
    and what."""
    rates = probe.rates()
    report = {
        **description(options, formats),
        "read_bytes_per_s": rates.read_bytes_per_s,
        "gemm_ops_per_s": rates.gemm_ops_per_s,
        **measured,
    }
    write_json(options.results or RESULTS / f"{kind}-{options.shape}-{formats[0]}.json", report)


def description(options: argparse.Namespace, formats: list[str]) -> dict[str, Any]:
    """How and where something is measured."""
    return {
        "command": " ".join(sys.argv).replace(str(options.folder), "FOLDER"),
        "machine": describe_machine(),
        "shape": options.shape,
        "formats": formats,
        "threads": options.threads,
        "rounds": options.rounds,
    }


def write_json(path: Path, report: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"written: {path}")


def update(path: Path, rendered: Callable[[str], str], *, check: bool) -> None:
    """Writes what `rendered` makes of the page; check: exits if that is not what is there."""
    text = path.read_text(encoding="utf-8")
    if not check:
        path.write_text(rendered(text), encoding="utf-8")
        print(f"written: {path}")
    elif rendered(text) != text:
        sys.exit(f"{path} is not what the results say: run this without --check")


def with_tables(page: str, kind: str, table_of: Callable[[dict[str, Any]], str]) -> str:
    """The page with every report of this kind, of files KIND-*.json, between its two markers."""
    reports = (
        json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(RESULTS.glob(f"{kind}-*.json"))
    )
    return with_section(page, kind, "".join(f"\n{table_of(report)}\n" for report in reports))


def with_section(page: str, name: str, text: str) -> str:
    """The page with this text between the two markers of that name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    head, _, rest = page.partition(begin)
    return f"{head}{begin}\n{text}{end}{rest.partition(end)[2]}"


def heading(report: dict[str, Any]) -> list[str]:
    """What was measured, where and on what, above a report's table; of several runs if it has."""
    runs = runs_of(report)
    machine = runs[0]["machine"]
    formats = dict.fromkeys(name for run in runs for name in run["formats"])
    versions = {
        name.split(",")[0]: system["version"]
        for run in runs
        for name, system in run["systems"].items()
    }
    systems = "; ".join(f"{name} {version}" for name, version in versions.items())
    rounds = " or ".join(map(str, sorted({run["rounds"] for run in runs})))
    commits = dict.fromkeys((run["machine"]["commit"] or "unknown")[:10] for run in runs)
    isa = f" with {isa_of(runs[0])}" if isa_of(runs[0]) else ""
    rates = f"; in the same run it {_rates_text(report)}" if "read_bytes_per_s" in report else ""
    return [
        f"### {report['shape']}, {', '.join(formats)}, {report['threads']} threads",
        "",
        f"{cpu_text(cpu_of(runs[0]))}{isa}, {machine['num_cpus']} cores{rates}. {rounds} rounds; "
        f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}. {systems}.",
        "",
    ]


def runs_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs that a report has gathered; one that has gathered none is a run itself."""
    runs: list[dict[str, Any]] = report.get("runs", [report])
    return runs


def cpu_of(run: dict[str, Any]) -> Cpu:
    """Where a run was made: the CPU's name, and its numbers if the run has them."""
    machine = run["machine"]
    return machine["cpu"], machine.get("cpu_model")


def isa_of(run: dict[str, Any]) -> str | None:
    """The instruction set that llmserve's kernels took; of old runs, it is not known."""
    isa: str | None = run.get("machine", {}).get("cpu_isa")
    return isa


def cpu_text(cpu: Cpu) -> str:
    """For people."""
    name, model = cpu
    return name if model is None else f"{name} ({model})"


def _rates_text(report: dict[str, Any]) -> str:
    read, f32 = report["read_bytes_per_s"], report.get("f32_flops_per_s")
    if f32 is not None:  # measured when a bound knew the rate of f32 multiply-adds alone
        return f"reads {read / 1e9:.1f} GB/s and does {f32 / 1e9:.0f} GFLOP/s in f32"
    return Rates(read, report["gemm_ops_per_s"]).text(report["formats"])
