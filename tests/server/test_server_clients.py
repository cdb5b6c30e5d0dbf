"""The commands that look at a server from outside: bench serve, doctor, top."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from llmserve import AsyncLLM, InvalidArgument
from llmserve.bench.http_stream import Measured
from llmserve.bench.serve import Load, report
from llmserve.cli import main
from llmserve.insight.doctor import examine
from llmserve.insight.live_metrics import LiveMetrics
from serving import RunningServer, running_server


def test_bench_serve_counts_what_the_server_did(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = server.llm.get_metrics()
    path = tmp_path / "run.json"
    command = (
        f"bench serve --base-url http://127.0.0.1:{server.port} --num-prompts 6 --input-len 20 "
        f"--output-len 5 --ignore-eos --max-concurrency 3 --request-rate 200 --burstiness 0.5 "
        f"--metric-percentiles 50,99 --goodput ttft:60000 e2el:60000 --save-result {path} "
        f"--disable-tqdm"
    )
    assert main(command.split()) == 0
    result = json.loads(path.read_text("utf-8"))
    assert (result["completed"], result["failed"]) == (6, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (120, 30)
    assert result["request_goodput"] == result["request_throughput"]
    after = server.llm.get_metrics()
    assert after.num_generation_tokens - before.num_generation_tokens == 30
    for metric in ("ttfb", "ttft", "tpot", "itl", "e2el"):
        figures = result["latencies_ms"][metric]
        if metric == "itl" and not figures:
            continue  # every answer's tokens have come together
        assert 0 <= figures["p50"] <= figures["p99"]
        assert figures["p50"] == figures["median"]
    means = [result["latencies_ms"][metric]["mean"] for metric in ("ttfb", "ttft", "e2el")]
    assert means[0] > 0
    assert means == sorted(means)
    assert "6 requests in" in capsys.readouterr().out


def test_a_result_without_a_name_is_saved_under_the_date(
    server: RunningServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"http://127.0.0.1:{server.port}"
    command = f"bench serve --save-result --base-url {url} --num-prompts 1 --output-len 2"
    assert main([*command.split(), "--disable-tqdm"]) == 0
    (path,) = tmp_path.glob("bench-serve-????????-??????.json")
    assert json.loads(path.read_text("utf-8"))["completed"] == 1
    assert f"saved in {path.name}" in capsys.readouterr().out


def test_arrivals_have_their_rate_and_burstiness() -> None:
    poisson = Load(1, 1, 20_000, request_rate=50.0).delays_s()
    even = Load(1, 1, 20_000, request_rate=50.0, burstiness=100.0).delays_s()
    # Of n gamma variates the mean is within 4 standard errors: 4 / sqrt(20000) = 2.8%.
    assert statistics.mean(poisson) == pytest.approx(0.02, rel=0.03)
    assert statistics.stdev(poisson) == pytest.approx(0.02, rel=0.05)  # exponential
    assert statistics.stdev(even) == pytest.approx(0.002, rel=0.05)
    assert Load(1, 1, 3, request_rate=float("inf")).delays_s() == [0.0] * 3


def test_the_figures_are_those_of_the_arrivals() -> None:
    good = Measured(10.0, 4, 3, 10.1, [10.5, 10.7, 10.9], 11.0)
    slow = Measured(10.0, 4, 2, 10.3, [12.0, 12.4], 12.5)
    lost = Measured(10.0, 4, error="status 429")
    load = Load(4, 3, 3, float("inf"))
    found = report(load, "m", [good, slow, lost], 2.5, [100], {"ttft": 1000.0})
    assert (found.completed, found.failed, found.errors) == (2, 1, ["status 429"])
    assert found.latencies_ms["ttfb"]["mean"] == pytest.approx(200)
    assert found.latencies_ms["ttft"]["mean"] == pytest.approx(1250)
    assert found.latencies_ms["tpot"]["p100"] == pytest.approx(400)
    assert found.latencies_ms["itl"]["median"] == pytest.approx(200)
    assert found.latencies_ms["e2el"]["p100"] == pytest.approx(2500)
    assert found.request_goodput == pytest.approx(0.4)
    assert found.output_throughput == pytest.approx(2.0)


@pytest.mark.parametrize(
    "flags",
    ["--request-rate 0", "--burstiness 0", "--goodput itl:5", "--percentile-metrics x"],
)
def test_bad_flags_are_refused_by_name(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--disable-tqdm", *flags.split()]) == 2
    assert flags.split()[0] in capsys.readouterr().err


def test_without_a_server_the_commands_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    url = "http://127.0.0.1:1"
    assert main(["bench", "serve", "--base-url", url, "--disable-tqdm"]) == 2
    assert main(["doctor", url]) == 2
    assert main(["top", url, "--count", "1"]) == 2
    assert "llmserve serve" in capsys.readouterr().err


def test_top_shows_the_figures(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{server.port}"
    assert main(["top", url, "--count", "1", "--interval", "0.1"]) == 0
    assert "0 running, 0 waiting" in capsys.readouterr().out


def test_doctor_examines_a_real_server(demo: AsyncLLM, capsys: pytest.CaptureFixture[str]) -> None:
    with running_server(demo) as server:

        def examined() -> tuple[int, str]:
            code = main(["doctor", f"http://127.0.0.1:{server.port}", "--interval", "0"])
            # What else the machine runs is not the server's.
            parts = capsys.readouterr().out.split("\n\n")
            return code, "\n".join(part for part in parts if "machine's memory" not in part)

        code, text = examined()
        assert text.strip() in ("nothing is wrong", "")
        assert code == 0 or "nothing" not in text
        for admission in server.activity.admissions.values():
            admission.num_refused += 3
        code, text = examined()
        assert "3 requests were refused" in text
        assert code == 1


SICK = {
    "llmserve:engine_up 0": "stopped",
    "llmserve:engine_hung 1": "hangs",
    'llmserve:request_success_total{finished_reason="stop"} 600\n'
    "llmserve:num_preemptions_total 7": "7 preemptions in 600 requests",
    'llmserve:gpu_utilization_perc{gpu="G"} 0.4\nllmserve:num_requests_running 3': (
        "40% of the time"
    ),
    'llmserve:gpu_memory_used_bytes{gpu="G"} 97\nllmserve:gpu_memory_total_bytes{gpu="G"} 100': (
        "GPU's memory is 97% full"
    ),
    'llmserve:gpu_ecc_uncorrected_errors_total{gpu="G"} 2': "2 memory errors",
    'llmserve:gpu_pcie_replays_total{gpu="G"} 9': "9 packets sent again over PCIe",
    "llmserve:kv_cache_usage_perc 0.97": "97% full",
    "llmserve:machine_memory_usage_perc 0.85": "is high: 85%",
    "llmserve:machine_memory_usage_perc 0.96": "nearly full",
    'llmserve:inter_token_latency_seconds_bucket{le="0.3"} 0\n'
    'llmserve:inter_token_latency_seconds_bucket{le="0.6"} 9\n'
    'llmserve:inter_token_latency_seconds_bucket{le="+Inf"} 9': "time between tokens",
    'llmserve:time_to_first_token_seconds_bucket{le="2.0"} 0\n'
    'llmserve:time_to_first_token_seconds_bucket{le="4.0"} 9\n'
    'llmserve:time_to_first_token_seconds_bucket{le="+Inf"} 9': "time to first token",
    'llmserve:requests_refused_total{reason="queue_full"} 3': "3 requests were refused",
    'llmserve:request_success_total{finished_reason="error"} 2': "2 requests failed",
    'llmserve:requests_ended_early_total{cause="timeout"} 4': "ran out of time",
    'llmserve:requests_ended_early_total{cause="slow_client"} 5': "5 clients were cut",
    'llmserve:stream_delivery_tokens_per_second_bucket{le="2.0"} 9\n'
    'llmserve:stream_delivery_tokens_per_second_bucket{le="+Inf"} 9': "half of the streams",
}


@pytest.mark.parametrize(("text", "symptom"), SICK.items(), ids=SICK.values())
def test_each_recipe_finds_its_symptom_and_no_other(text: str, symptom: str) -> None:
    (finding,) = examine(LiveMetrics.parse(text))
    assert symptom in finding.symptom
    assert finding.cause
    assert finding.action


def test_prompts_without_hits_are_told_of_where_first_tokens_are_late() -> None:
    cache = "llmserve:prefix_cache_queries_total 9000\nllmserve:prefix_cache_hits_total 90\n"
    assert examine(LiveMetrics.parse(cache)) == []
    late = (
        'llmserve:time_to_first_token_seconds_bucket{le="2.0"} 0\n'
        'llmserve:time_to_first_token_seconds_bucket{le="+Inf"} 9\n'
    )
    _, hits = examine(LiveMetrics.parse(cache + late))
    assert "finds 1%" in hits.symptom


def test_few_preemptions_among_many_requests_are_well() -> None:
    text = "llmserve:num_preemptions_total 5\nllmserve:num_requests_running 20\n"
    text += 'llmserve:request_success_total{finished_reason="stop"} 480'
    assert examine(LiveMetrics.parse(text)) == []


def test_each_of_several_models_is_examined_by_itself() -> None:
    text = 'llmserve:engine_up{model_name="a"} 1\nllmserve:engine_up{model_name="b"} 0\n'
    text += "".join(f'llmserve:kv_cache_usage_perc{{model_name="{m}"}} 0.5\n' for m in "ab")
    (finding,) = examine(LiveMetrics.parse(text))
    assert finding.symptom == "b: an engine has stopped"


def test_quantiles_of_several_models_are_of_all_their_values() -> None:
    text = "".join(
        f'h_bucket{{model_name="{model}",le="1.0"}} {low}\n'
        f'h_bucket{{model_name="{model}",le="2.0"}} 10\n'
        f'h_bucket{{model_name="{model}",le="+Inf"}} 10\n'
        for model, low in (("a", 10), ("b", 0))
    )
    metrics = LiveMetrics.parse(text)
    assert metrics.quantile("h", 0.75) == pytest.approx(1.5)
    assert metrics.by_model["b"].quantile("h", 0.75) == pytest.approx(1.75)


def test_top_shows_each_model_by_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "".join(
        f'llmserve:num_requests_running{{model_name="{model}"}} {count}\n'
        for model, count in (("a", 1), ("b", 2))
    )
    monkeypatch.setattr(LiveMetrics, "fetch", lambda url, key: LiveMetrics.parse(text))
    assert main(["top", "--count", "1", "--interval", "0.01"]) == 0
    of_a, of_b = capsys.readouterr().out.split("model          ")[1:]
    assert "1 running" in of_a
    assert "2 running" in of_b


def test_memory_that_climbs_between_two_looks_is_told() -> None:
    earlier, now = (
        LiveMetrics.parse(f"process_resident_memory_bytes {mib * 2**20}") for mib in (1000, 1200)
    )
    (finding,) = examine(now, earlier)
    assert "200 MiB" in finding.symptom
    assert examine(earlier, earlier) == examine(now) == []


def test_a_gpu_that_nobody_asks_may_be_idle() -> None:
    assert examine(LiveMetrics.parse('llmserve:gpu_utilization_perc{gpu="G"} 0.0')) == []


def test_a_quantile_is_interpolated_in_its_bucket() -> None:
    text = 'h_bucket{le="1.0"} 10\nh_bucket{le="2.0"} 20\nh_bucket{le="+Inf"} 20'
    metrics = LiveMetrics.parse(text)
    assert metrics.quantile("h", 0.75) == pytest.approx(1.5)
    assert metrics.quantile("other", 0.5) is None
    assert metrics.since(metrics).quantile("h", 0.5) is None


def test_what_is_no_llmserve_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="http://host:port"):
        LiveMetrics.fetch("ftp://x")
