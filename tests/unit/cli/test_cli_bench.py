"""`llmserve bench`: complete results, beside a bound; not how fast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llmserve import cli
from llmserve.bench.run import Workload


def run(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    out = tmp_path / "result.json"
    assert cli.main(["bench", *arguments, "--output-json", str(out), "--num-threads", "1"]) == 0
    result = json.loads(out.read_text())
    assert result["rates"]["read_bytes_per_s"] > 0
    assert result["machine"]["num_cpus"] > 0
    assert all(value > 0 for value in result["figures"].values())
    return result


SMALL = ("--input-len", "8", "--output-len", "4", "--disable-tqdm")


def test_latency_repeats_and_reports_percentiles(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = ("--num-iters", "3", "--num-iters-warmup", "1", "--batch-size", "2")
    result = run(tmp_path, "latency", "--model", str(checkpoint), *SMALL, *rounds)
    assert len(result["runs_s"]) == 3
    figures = result["figures"]
    assert figures["p10_latency_s"] <= figures["p50_latency_s"] <= figures["p99_latency_s"]
    assert figures["share_of_bound"] <= 1
    assert result["settings"]["num_prompts"] == 2
    assert "measured in the same run" in capsys.readouterr().out


def test_throughput_counts_tokens(tmp_path: Path, checkpoint: Path) -> None:
    result = run(tmp_path, "throughput", "--model", str(checkpoint), *SMALL, "--num-prompts", "3")
    figures = result["figures"]
    assert figures["output_tokens_per_s"] == pytest.approx(12 / figures["elapsed_s"])
    assert figures["total_tokens_per_s"] == pytest.approx(36 / figures["elapsed_s"])
    assert figures["requests_per_s"] == pytest.approx(3 / figures["elapsed_s"])


def test_startup_times_import_load_and_first_token(tmp_path: Path, checkpoint: Path) -> None:
    result = run(
        tmp_path, "startup", "--model", str(checkpoint), "--num-iters", "1", "--disable-tqdm"
    )
    figures = result["figures"]
    assert figures["weight_read_s"] + figures["weight_pack_s"] < figures["load_s"]
    assert figures["load_s"] < figures["first_token_s"]
    assert figures["import_s"] > 0
    assert result["form"] == "float32"


def test_startup_says_what_quantizing_takes(tmp_path: Path) -> None:
    options = ("--quantization", "int4", "--num-iters", "2", "--disable-tqdm")
    result = run(tmp_path, "startup", *options)
    figures = result["figures"]
    assert figures["weight_read_s"] + figures["weight_pack_s"] < figures["load_s"]
    assert result["settings"]["quantization"] == "int4"
    assert result["form"] == "int8"
    assert len(result["runs_s"]) == 2


def test_a_workload_is_the_same_every_time() -> None:
    assert Workload(3, 5, 1).prompts(100) == Workload(3, 5, 1).prompts(100)
    assert Workload(3, 5, 1).prompts(100) != Workload(3, 5, 1, seed=1).prompts(100)


ERRORS = [
    (("latency", "--input-len", "0"), "--input-len must be between 1"),
    (("latency", "--batch-size", "0"), "--batch-size must be between 1"),
    (("throughput", "--input-len", "5000"), "max_model_len is"),
    (("startup", "--model", "/nowhere"), "model must be a checkpoint directory"),
]


@pytest.mark.parametrize(("arguments", "message"), ERRORS)
def test_a_users_error_is_one_line_and_exits_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert cli.main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert len(captured.err.splitlines()) == 1
    assert message in captured.err
