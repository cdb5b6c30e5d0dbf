"""What llmserve is to reach on a CPU with AVX-512, bf16 and VNNI, or with AVX2 alone, and what was
measured of it.

A share is of the bound, a time that no program beats (workloads.py); a speed-up is over llmserve's
own bfloat16, both measured in one run; ahead means that the median ratio to each peer is over 1.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from page import RESULTS, Cpu, cpu_of, cpu_text, isa_of, runs_of

ISA = "avx512_bf16"
AVX2 = "avx2"
SHAPES = ("tinyllama-1.1b", "qwen3-0.6b")
KINDS = ("peers", "formats", "starts", "ops")  # of reports: KIND-*.json
_START_S, _START_SHAPE = 1.5, "tinyllama-1.1b"
_BEYOND_PLAN_BYTES = 150e6
_OVERHEAD_US = 30
_ATTENTION_SHARE = 0.85
_LATENT_SHARE = 0.6


@dataclass(frozen=True)
class Goal:
    """Of a work in a format: a share of its bound, or a speed-up over own bfloat16."""

    work: str
    form: str
    share: float = 0.0
    speedup: float = 0.0
    is_ahead: bool = True

    def __str__(self) -> str:
        least = (
            f"{self.share:.0%} of the bound" if self.share else f"{self.speedup:g} times bfloat16"
        )
        return f"≥ {least}" + ", ahead" * self.is_ahead


GOALS = (
    Goal("prefill of 512", "bfloat16", share=0.9),
    Goal("prefill of 512", "int8", speedup=1.7),
    Goal("prefill of 512", "int4", speedup=1.5),
    Goal("prefill of 2,048", "bfloat16", share=0.8),
    Goal("decode of 128 after 512", "bfloat16", share=0.9),
    Goal("decode of 128 after 512", "int8", speedup=1.8),
    Goal("decode of 128 after 512", "int4", speedup=3.0),
    Goal("32 requests, 64-256 in, 32-128 out", "bfloat16", share=0.9),
    Goal("32 requests, 64-256 in, 32-128 out", "int8", speedup=1.6),
    Goal("16 requests, 512 shared + 32 in, 32 out", "bfloat16", share=0.9, is_ahead=False),
)


@dataclass(frozen=True)
class Line:
    """One of the table: what was to be reached, and what was."""

    work: str
    goal: str
    measured: str
    is_held: bool
    beside: str = "-"

    def __str__(self) -> str:
        held = "held" if self.is_held else "**missed**"
        return f"| {self.work} | {self.goal} | {self.measured} | {self.beside} | {held} |"


def tables() -> str:
    """For each CPU, every goal of which something was measured there, as Markdown."""
    cpus = dict.fromkeys(cpu_of(run) for kind in KINDS for run in _runs(kind))
    parts = [f"{cpu_text(cpu)}:\n\n{table(cpu)}" for cpu in cpus]
    for cpu in dict.fromkeys(map(cpu_of, _runs("peers", AVX2))):
        if lines := [*_lines_with_avx2(cpu)]:
            parts.append(f"{cpu_text(cpu)}, with AVX2 alone:\n\n{_as_table(lines)}")
    return "\n\n".join(parts)


def table(cpu: Cpu) -> str:
    """Of one CPU with AVX-512, bf16 and VNNI."""
    lines = [line for shape in SHAPES for line in _lines_of_work(cpu, shape)]
    return _as_table([*lines, *_lines_of_start(cpu), *_lines_of_attention(cpu)])


def _as_table(lines: list[Line]) -> str:
    head = "| work | goal | measured | nearest peer | |\n| --- | --- | --- | --- | --- |\n"
    return head + "\n".join(map(str, lines))


def _lines_of_work(cpu: Cpu, shape: str) -> Iterator[Line]:
    rows = _rows("peers", cpu, shape)
    for goal in GOALS:
        own = rows.get((goal.work, f"llmserve, {goal.form}"))
        if own is None:
            continue
        peers = {
            system.partition(",")[0]: row["ratio"]
            for (work, system), row in rows.items()
            if work == goal.work and system.endswith(f", {goal.form}") and row is not own
        }
        nearest, ratio = _nearest(peers)
        for measured, reaches in _measured(goal, own, cpu, shape):
            yield Line(
                f"{shape}, {goal.form}: {goal.work}",
                str(goal),
                measured,
                reaches and (ratio > 1 or not goal.is_ahead),
                f"{nearest} {ratio:.2f}",
            )


def _measured(goal: Goal, own: dict[str, Any], cpu: Cpu, shape: str) -> Iterator[tuple[str, bool]]:
    """What there is of a goal, and whether it is enough: its share, or each speed-up."""
    if goal.share:
        share = own["bound_s"] / statistics.median(own["seconds"])
        yield f"{share:.0%}", share >= goal.share
        return
    for run in _runs_of("formats", cpu, shape):
        for row in run["rows"]:
            if (row["workload"], row["system"]) != (goal.work, f"llmserve, {goal.form}"):
                continue
            speedup = row["speed_beside_bfloat16"]
            text = f"{speedup:.2f} times"
            if row["limit"].endswith("GB/s"):  # it depends on what memory gives
                text += f" at {row['limit']}"
            yield text, speedup >= goal.speedup


def _lines_with_avx2(cpu: Cpu) -> Iterator[Line]:
    for shape in SHAPES:
        rows = _rows("peers", cpu, shape, AVX2)
        for (work, system), own in rows.items():
            name, _, form = system.partition(", ")
            peer = rows.get((work, f"llama.cpp, {form}"))
            if name == "llmserve" and peer is not None:
                share = own["bound_s"] / statistics.median(own["seconds"])
                yield Line(
                    f"{shape}, {form}: {work}",
                    "ahead of llama.cpp",
                    f"{share:.0%} of the bound",
                    peer["ratio"] > 1,
                    f"llama.cpp {peer['ratio']:.2f}",
                )


def _nearest(ratios: dict[str, float]) -> tuple[str, float]:
    """The fastest peer, and its time over llmserve's."""
    return min(ratios.items(), key=lambda item: item[1], default=("none", 0.0))


def _rows(kind: str, cpu: Cpu, shape: str, isa: str = ISA) -> dict[tuple[str, str], dict[str, Any]]:
    """By work and system."""
    return {
        (row["workload"], row["system"]): row
        for run in _runs_of(kind, cpu, shape, isa)
        for row in run["rows"]
    }


def _runs_of(kind: str, cpu: Cpu, shape: str, isa: str = ISA) -> list[dict[str, Any]]:
    runs = _runs(kind, isa)
    return [run for run in runs if (cpu_of(run), run["shape"]) == (cpu, shape)]


def _runs(kind: str, isa: str = ISA) -> list[dict[str, Any]]:
    """Those of reports of this kind that were made with this instruction set."""
    reports = (
        json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(RESULTS.glob(f"{kind}-*.json"))
    )
    runs = (run for report in reports for run in runs_of(report))
    return [run for run in runs if isa_of(run) == isa]


def _lines_of_start(cpu: Cpu) -> Iterator[Line]:
    for report in _runs("starts"):
        if (cpu_of(report), report["shape"]) == (cpu, _START_SHAPE):
            yield from _lines_of_one_start(report)


def _lines_of_one_start(report: dict[str, Any]) -> Iterator[Line]:
    rows = {row["system"]: row for row in report["rows"]}
    own = rows["llmserve, bfloat16"]
    nearest, ratio = _nearest(
        {
            name.partition(",")[0]: row["ratio"]
            for name, row in rows.items()
            if not name.startswith("llmserve")
        }
    )
    start_s = statistics.median(own["seconds"])
    yield Line(
        f"{_START_SHAPE}, bfloat16: start of the process to the first token of 16",
        f"≤ {_START_S} s, ahead",
        f"{start_s:.2f} s",
        start_s <= _START_S and ratio > 1,
        f"{nearest} {ratio:.2f}",
    )
    beyond = own["peak_bytes"] - own["planned_bytes"]
    yield Line(
        f"{_START_SHAPE}, bfloat16: most resident memory until then",
        f"≤ the plan + {_BEYOND_PLAN_BYTES / 1e6:.0f} MB",
        f"the plan {beyond / 1e6:+.0f} MB",
        beyond <= _BEYOND_PLAN_BYTES,
    )
    overhead = report["step"]["beyond_execution_us"]
    yield Line(
        f"{_START_SHAPE}, bfloat16: a step of 32 sequences beyond its execution",
        f"< {_OVERHEAD_US} µs",
        f"{overhead:.0f} µs",
        overhead < _OVERHEAD_US,
    )


def expert_ops() -> str:
    """What layers of experts and routers took by themselves, as Markdown."""
    parts = []
    for run in _runs("ops"):
        rows = [row for row in run["rows"] if "_experts " in row["name"]]
        if rows:
            parts.append(
                f"{cpu_text(cpu_of(run))} with {ISA}, {run['machine']['num_cpus']} cores:\n"
            )
            parts.append("| work | µs | share of the bound |\n| --- | --- | --- |")
            parts += [
                f"| {row['name'].partition(' ')[2]} | {_us(row)} | {_share(row)} |" for row in rows
            ]
    return "\n".join(parts)


def _us(row: dict[str, Any]) -> str:
    return f"{row['us']:,.0f}" if row["us"] >= 10 else f"{row['us']:.1f}"


def _share(row: dict[str, Any]) -> str:
    if not row["gemm_gflop_per_s"]:
        return ""  # a router's bytes are too few to bound it
    is_read = row["gb_per_s"] / row["read_gb_per_s"] >= row["share"] - 1e-9
    if is_read:
        return f"{row['share']:.0%} of {row['read_gb_per_s']:.1f} GB/s"
    unit = "GFLOP/s" if " bfloat16 " in row["name"] else "GOP/s"
    return f"{row['share']:.0%} of {row['gemm_gflop_per_s']:,.0f} {unit}"


def _lines_of_attention(cpu: Cpu) -> Iterator[Line]:
    for row in (row for run in _runs("ops") if cpu_of(run) == cpu for row in run["rows"]):
        isa, _, name = row["name"].partition(" ")
        is_of_goal = name.startswith("attention ") and name.endswith("context=4096")
        if isa == ISA and name.startswith("latent attention ") and "decode" in name:
            # So many heads read a row that arithmetic bounds it.
            yield Line(
                name,
                f"≥ {_LATENT_SHARE:.0%} of the rate of products",
                f"{row['share']:.0%} of {row['gemm_gflop_per_s']:.0f} GFLOP/s",
                row["share"] >= _LATENT_SHARE,
            )
        if isa == ISA and is_of_goal and "decode" in name:
            # Not the row's share of its bound, which may be that of arithmetic.
            rate = row["read_gb_per_s"]
            share = row["gb_per_s"] / rate
            yield Line(
                name,
                f"≥ {_ATTENTION_SHARE:.0%} of the read rate",
                f"{share:.0%} of {rate:.0f} GB/s",
                share >= _ATTENTION_SHARE,
            )
