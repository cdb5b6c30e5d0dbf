"""Reports of benchmarks/peers gather runs, and the page shows each work and format once."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from llmserve.bench.machine import describe_machine

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(PEERS.parent))
    monkeypatch.syspath_prepend(str(PEERS))
    import engines

    return engines


def row(workload: str, system: str, seconds: float) -> dict[str, Any]:
    return {
        "workload": workload,
        "system": system,
        "seconds": [seconds],
        "bound_s": 1.0,
        "limit": "40.0 GB/s",
        "tokens_per_s": 128 / seconds,
        "ratio": seconds / 2,
        "ratio_min": seconds / 2,
        "ratio_max": seconds / 2,
    }


def run(*rows: dict[str, Any], commit: str = "0123456789ab", threads: int = 2) -> dict[str, Any]:
    return {
        "machine": {**describe_machine(), "num_cpus": 2, "commit": commit},
        "shape": "tiny",
        "formats": sorted({row["system"].partition(", ")[2] for row in rows}),
        "threads": threads,
        "rounds": 5,
        "systems": {row["system"]: {"version": "1.0"} for row in rows},
        "rows": list(rows),
    }


DECODE, PREFILL = "decode of 128 after 512", "prefill of 512"


def test_what_is_measured_anew_takes_the_place_of_all_systems_in_that_work_and_format(
    engines: ModuleType,
) -> None:
    earlier = [
        run(row(DECODE, "llmserve, int8", 2), row(DECODE, "llama.cpp, int8", 3)),
        run(row(DECODE, "llmserve, int4", 2), row(PREFILL, "llmserve, int8", 2)),
    ]
    kept = engines._without(earlier, [row(DECODE, "llmserve, int8", 4)])
    assert [r["rows"] for r in kept] == [earlier[1]["rows"]]


def test_a_report_of_several_runs_is_one_table_in_the_order_of_the_work(
    engines: ModuleType,
) -> None:
    runs = [
        run(row(DECODE, "llmserve, int4", 2), row(DECODE, "openvino, int4", 3), commit="b" * 40),
        run(row(PREFILL, "llmserve, int8", 2), row(DECODE, "llmserve, int8", 2)),
    ]
    lines = engines.table_of({"shape": "tiny", "threads": 2, "runs": runs}).splitlines()
    assert lines[0] == "### tiny, int4, int8, 2 threads"
    assert "5 rounds; commits bbbbbbbbbb, 0123456789. llmserve 1.0; openvino 1.0." in lines[2]
    assert [line.split(" | ")[:2] for line in lines[6:]] == [
        [f"| {PREFILL}", "llmserve, int8"],
        [f"| {DECODE}", "llmserve, int8"],
        [f"| {DECODE}", "llmserve, int4"],
        [f"| {DECODE}", "openvino, int4"],
    ]
    assert lines[-1].endswith("| 42.7 | 33% of 40.0 GB/s | 1.50 (1.50 to 1.50) |")


def test_a_report_takes_no_run_with_other_threads(engines: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert engines._earlier_runs(path, 2) == []
    runs = [run(row(DECODE, "llmserve, int8", 2))]
    path.write_text(json.dumps({"shape": "tiny", "threads": 2, "runs": runs}))
    assert engines._earlier_runs(path, 2) == runs
    with pytest.raises(SystemExit, match="--results"):
        engines._earlier_runs(path, 1)
