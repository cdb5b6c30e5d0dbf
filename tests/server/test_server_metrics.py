"""What /metrics says agrees with what happened, and the dashboard and alerts name what exists."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from fake_nvml import FakeNvml
from llmserve import AsyncLLM, _core, _core_testing, demo_model_path
from llmserve.insight.gpu_telemetry import GpuReading
from llmserve.server import app
from llmserve.server.gpu_metrics import GpuCollector
from llmserve.server.logs import configure_logs
from prometheus_client.parser import text_string_to_metric_families
from serving import RunningServer, running_server

DOCS = Path(__file__).parents[2] / "docs"
NUM_REQUESTS, NUM_TOKENS = 6, 5

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture(scope="module")
def fresh() -> Iterator[RunningServer]:
    """A server that has answered a few requests of equal prompts."""
    llm = AsyncLLM(demo_model_path(), num_threads=1, kv_cache_memory_bytes=2**23)
    with running_server(llm, vllm_metrics=True, admin_key="root") as server:
        for idx in range(NUM_REQUESTS):
            body = {"prompt": [5] * 40, "max_tokens": NUM_TOKENS, "ignore_eos": True}
            assert server.post("/v1/completions", stream=idx % 2 == 0, **body)[0] == 200
        server.wait_until_idle()
        yield server
    llm.close()


def samples(server: RunningServer) -> Samples:
    status, text, headers = server.request("GET", "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def gpu_samples(
    throttle_reasons: tuple[str, ...] = (), xids: dict[int, int] | None = None, **given: float
) -> list[Any]:
    """Of a server whose GPU says all that can be said."""
    figures = dict.fromkeys((field.name for field in dataclasses.fields(GpuReading)), 1.0)
    figures |= given
    said = {"name": "GPU", "index": "0", "throttle_reasons": throttle_reasons}
    reading = GpuReading(**{**figures, **said})
    notice = SimpleNamespace(is_swinging=False, num_starts=2)
    gpu = SimpleNamespace(reading=reading, notice=notice, xids=xids or {31: 1})
    collector = GpuCollector(SimpleNamespace(gpus=[gpu]))
    return [sample for family in collector.collect() for sample in family.samples]


def value(found: Samples, name: str, **labels: str) -> float:
    return found[name, tuple(sorted({"model_name": "demo", **labels}.items()))]


def test_counters_and_distributions_are_those_of_the_requests(fresh: RunningServer) -> None:
    found = samples(fresh)
    assert value(found, "llmserve:num_requests_running") == 0
    assert value(found, "llmserve:kv_cache_usage_perc") == 0
    assert value(found, "llmserve:prompt_tokens_total") == NUM_REQUESTS * 40
    assert value(found, "llmserve:generation_tokens_total") == NUM_REQUESTS * NUM_TOKENS
    assert value(found, "llmserve:request_success_total", finished_reason="length") == NUM_REQUESTS
    for name, count in (
        ("time_to_first_token_seconds", NUM_REQUESTS),
        ("e2e_request_latency_seconds", NUM_REQUESTS),
        ("request_queue_time_seconds", NUM_REQUESTS),
        ("request_prefill_time_seconds", NUM_REQUESTS),
        ("request_decode_time_seconds", NUM_REQUESTS),
        ("request_time_per_output_token_seconds", NUM_REQUESTS),
        ("inter_token_latency_seconds", NUM_REQUESTS * (NUM_TOKENS - 1)),
        ("request_prompt_tokens", NUM_REQUESTS),
    ):
        assert value(found, f"llmserve:{name}_count") == count, name
        assert value(found, f"llmserve:{name}_bucket", le="+Inf") == count, name
        assert value(found, f"llmserve:{name}_sum") > 0, name
    assert value(found, "llmserve:request_generation_tokens_sum") == NUM_REQUESTS * NUM_TOKENS
    steps = sum(value(found, "llmserve:steps_total", phase=p) for p in ("prefill", "decode"))
    assert value(found, "llmserve:step_time_seconds_count") == steps
    num_waited = value(found, "llmserve:request_queue_time_seconds_sum")
    assert num_waited <= value(found, "llmserve:time_to_first_token_seconds_sum")


def test_prefix_cache_counters_add_up(fresh: RunningServer) -> None:
    found = samples(fresh)
    hits = value(found, "llmserve:prefix_cache_hits_total")
    computed = value(found, "llmserve:prefill_tokens_total")
    assert hits == (NUM_REQUESTS - 1) * 32  # two blocks of 16; the last block is not full
    assert hits + computed == value(found, "llmserve:prompt_tokens_total")
    assert value(found, "llmserve:prefix_cache_queries_total") == NUM_REQUESTS * 40
    blocks = [value(found, "llmserve:kv_blocks", state=s) for s in ("used", "cached", "free")]
    assert sum(blocks) == fresh.llm.get_metrics().num_blocks_total


def test_they_add_up_when_sequences_are_preempted(make_oracle: Callable[..., AsyncLLM]) -> None:
    gate = _core_testing.StepGate(1)
    pool: dict[str, Any] = {"num_gpu_blocks_override": 12, "max_model_len": 160, "max_num_seqs": 8}
    with running_server(make_oracle(0, gate=gate, **pool)) as server:
        prompts = [[5] * 20 + [6 + i] * 20 for i in range(8)]
        body: dict[str, Any] = {"prompt": prompts, "max_tokens": 60, "ignore_eos": True, "n": 2}
        with closing(server.open_stream("/v1/completions", **body)):
            server.wait_until(lambda: len(server.activity.runs) == 1, "all prompts are queued")
            gate.open()
            server.wait_until_idle()
        found = samples(server)
    assert value(found, "llmserve:num_preemptions_total") > 0
    assert value(found, "llmserve:recomputed_tokens_total") > 0
    parts = {
        name: value(found, f"llmserve:{name}_total")
        for name in ("prefix_cache_hits", "prefill_tokens", "recomputed_tokens")
    }
    known = parts["prefix_cache_hits"] + parts["prefill_tokens"] - parts["recomputed_tokens"]
    assert known == value(found, "llmserve:prompt_tokens_total") == 8 * 40


def test_the_aliases_have_the_same_values(fresh: RunningServer) -> None:
    found = samples(fresh)
    for name in ("vllm:generation_tokens_total", "vllm:num_requests_running"):
        assert value(found, name) == value(found, name.replace("vllm", "llmserve"))
    names = {name for name, _ in found}
    assert "vllm:time_to_first_token_seconds_bucket" in names
    assert "vllm:iteration_tokens_total_bucket" in names
    assert "vllm:request_success_total" in names


def test_what_vllms_dashboards_look_for_is_there(fresh: RunningServer) -> None:
    found = samples(fresh)
    for name, total in (
        ("request_params_n", NUM_REQUESTS),
        ("request_params_max_tokens", NUM_REQUESTS * NUM_TOKENS),
        ("request_max_num_generation_tokens", NUM_REQUESTS * NUM_TOKENS),
        ("request_prefill_kv_computed_tokens", NUM_REQUESTS * 40 - (NUM_REQUESTS - 1) * 32),
        ("request_num_preemptions", 0),
    ):
        assert value(found, f"vllm:{name}_count") == NUM_REQUESTS, name
        assert value(found, f"vllm:{name}_sum") == total, name
    assert value(found, "vllm:request_inference_time_seconds_sum") > 0
    hits = value(found, "vllm:prompt_tokens_by_source_total", source="local_cache_hit")
    computed = value(found, "vllm:prompt_tokens_by_source_total", source="local_compute")
    assert hits == value(found, "vllm:prompt_tokens_cached_total") == (NUM_REQUESTS - 1) * 32
    assert hits + computed == value(found, "vllm:prompt_tokens_total")
    assert value(found, "vllm:engine_sleep_state", sleep_state="awake") == 1
    assert value(found, "vllm:num_requests_waiting_by_reason", reason="capacity") == 0
    num_blocks = str(fresh.llm.get_metrics().num_blocks_total)
    labels = {"block_size": "16", "num_gpu_blocks": num_blocks}
    assert value(found, "vllm:cache_config_info", **labels) == 1


def test_without_the_flag_there_are_no_aliases(server: RunningServer) -> None:
    assert not any(name.startswith("vllm:") for name, _ in samples(server))


NAME = re.compile(r"\b(?:llmserve:\w+|process_\w+)")


def test_every_metric_of_the_dashboard_and_the_alerts_exists(
    fresh: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a GPU, where memory comes from a pool.
    held = {name: 1 for name in dir(_core.MemoryUse) if name.endswith("_bytes")}
    monkeypatch.setattr(AsyncLLM, "get_memory_use", lambda _: SimpleNamespace(**held))
    fresh.activity.ended["client_left"] += 1
    exists = {name for name, _ in samples(fresh)} | {sample.name for sample in gpu_samples()}
    dashboard = json.loads((DOCS / "monitoring" / "grafana.json").read_text("utf-8"))
    expressions = [t["expr"] for panel in dashboard["panels"] for t in panel["targets"]]
    expressions += [rule["expr"] for rule in rules()]
    named = {name for expression in expressions for name in NAME.findall(expression)}
    assert len(named) > 20
    assert named <= exists, named - exists
    page = (DOCS / "observability.md").read_text("utf-8")
    of_page = {name for name in NAME.findall(page) if not name.endswith("_")}
    assert of_page <= exists, of_page - exists


# One look at a GPU and the next, a minute later, of which nothing is alarming.
WELL = {"utilization": 0.5, "temperature_c": 60.0, "memory_used_bytes": 60.0}
WELL |= {"memory_total_bytes": 100.0, "pcie_replays": 3.0, "nvlink_replays": 3.0}
WELL |= {"nvlink_crc_errors": 1000.0, "ecc_uncorrected_errors": 0.0}
ENGINE_BYTES = 50.0

# What changes, and which alerts that raises, each with how long it lasts and how bad it is.
ALARMS: list[tuple[dict[str, Any], dict[str, tuple[str | None, str]]]] = [
    ({}, {}),
    ({"utilization": 0.11}, {}),
    ({"utilization": 0.05}, {"GpuIdle": ("60s", "info")}),
    ({"utilization": 0.95}, {"GpuBusy": ("60s", "warning")}),
    ({"temperature_c": 85.0}, {}),
    ({"temperature_c": 90.0}, {"GpuHot": ("30s", "warning")}),
    (
        {"temperature_c": 96.0},
        {"GpuHot": ("30s", "warning"), "GpuTooHot": (None, "critical")},
    ),
    ({"memory_used_bytes": 89.0}, {}),  # of what the engine left, 78%
    ({"memory_used_bytes": 91.0}, {"GpuMemoryHigh": ("60s", "warning")}),
    (
        {"memory_used_bytes": 96.0},
        {"GpuMemoryHigh": ("60s", "warning"), "GpuMemoryNearlyFull": ("30s", "critical")},
    ),
    ({"pcie_replays": 4.0}, {"GpuPcieReplays": (None, "critical")}),
    ({"nvlink_replays": 4.0}, {"GpuNvlinkReplays": (None, "critical")}),
    ({"nvlink_crc_errors": 6000.0}, {}),
    ({"nvlink_crc_errors": 8000.0}, {"GpuNvlinkCrcErrors": (None, "critical")}),
    ({"ecc_uncorrected_errors": 1.0}, {"GpuEccErrors": (None, "critical")}),
    ({"throttle_reasons": ("hw_thermal",)}, {"GpuThrottled": ("60s", "warning")}),
    ({"xids": {31: 2}}, {"GpuXidErrors": (None, "critical")}),
]
_SERIES = r"(llmserve:\w+)(\{[^}]*\})?"


def is_raised(expression: str, before: Samples, after: Samples) -> bool:
    """What Prometheus would say of the few forms that these rules have, of one series a name, with
    a minute between the readings. A counter without a reading before has no rate."""

    def value(readings: Samples, found: re.Match[str]) -> float | None:
        labels = dict(re.findall(r'(\w+)="([^"]*)"', found[2] or ""))
        values = [
            value
            for (name, of_series), value in readings.items()
            if name == found[1] and labels.items() <= dict(of_series).items()
        ]
        return max(values) if values else None

    def change(found: re.Match[str]) -> str:
        then, now = (value(readings, found) for readings in (before, after))
        return "nan" if then is None or now is None else repr(now - then)

    def current(found: re.Match[str]) -> str:
        return repr(value(after, found) if value(after, found) is not None else float("nan"))

    text = re.sub(rf"increase\({_SERIES}\[\w+\]\)", change, expression)
    text = re.sub(rf"rate\({_SERIES}\[\w+\]\)", lambda found: f"({change(found)} / 60)", text)
    text = re.sub(_SERIES, current, text)
    text = re.sub(r"(?:sum|max by \([\w, ]+\)) ?\(([^()]*|\([^()]*\))\)", r"(\1)", text)
    assert re.fullmatch(r"[-+*/().<>=\d e]*(?:nan[-+*/().<>=\d e]*)*", text), text
    return bool(eval(text, {"nan": float("nan")}))


def rules(*names: str) -> list[Any]:
    """All, or those of this beginning."""
    document = yaml.safe_load((DOCS / "monitoring" / "alerts.yml").read_text("utf-8"))
    found = [rule for group in document["groups"] for rule in group["rules"]]
    return [rule for rule in found if rule["alert"].startswith(names or ("",))]


@pytest.mark.parametrize(("change", "raised"), ALARMS)
def test_an_alert_is_raised_by_a_gpu_that_is_not_well(
    change: dict[str, Any], raised: dict[str, tuple[str | None, str]]
) -> None:
    def looked(**figures: Any) -> Samples:
        found = {(s.name, tuple(s.labels.items())): s.value for s in gpu_samples(**figures)}
        return {**found, ("llmserve:memory_bytes", ()): ENGINE_BYTES}

    before, after = looked(**WELL), looked(**{**WELL, **change})
    found = {
        rule["alert"]: (rule.get("for"), rule["labels"]["severity"])
        for rule in rules("Gpu")
        if is_raised(rule["expr"], before, after)
    }
    assert found == raised


@pytest.mark.parametrize(
    ("usage", "raised"),
    [(0.5, []), (0.85, ["MemoryHigh"]), (0.96, ["MemoryHigh", "MemoryNearlyFull"])],
)
def test_an_alert_is_raised_by_a_machine_that_is_full(usage: float, raised: list[str]) -> None:
    now = {("llmserve:machine_memory_usage_perc", ()): usage}
    assert [r["alert"] for r in rules("Memory") if is_raised(r["expr"], now, now)] == raised


def test_the_first_500_raises_an_alert(
    make_oracle: Callable[..., AsyncLLM],
) -> None:
    (rule,) = rules("ServerErrors")
    with running_server(make_oracle(0, fail_at_step=0, num_failures=2)) as server:
        before = samples(server)
        assert not is_raised(rule["expr"], before, before)
        assert server.post("/v1/completions", prompt=[5], max_tokens=2)[0] == 500
        assert is_raised(rule["expr"], before, samples(server))


def test_a_gpus_figures_are_there_and_what_holds_its_clock_down() -> None:
    found = {(s.name, s.labels.get("reason")): s.value for s in gpu_samples(("hw_thermal",))}
    assert found["llmserve:gpu_temperature_celsius", None] == 1
    assert found["llmserve:gpu_throttled", "hw_thermal"] == 1
    assert found["llmserve:gpu_throttled", "power_cap"] == 0
    assert found["llmserve:gpu_throttle_starts_total", None] == 2
    assert found["llmserve:gpu_pcie_replays_total", None] == 1
    assert found["llmserve:gpu_ecc_uncorrected_errors_total", None] == 1
    told = {s.labels["xid"]: s.value for s in gpu_samples(xids={79: 2, 7: 1}) if "xid" in s.labels}
    assert (told["79"], told["7"], told["31"]) == (2, 1, 0)
    carried = {s.labels["direction"] for s in gpu_samples() if "nvlink_bytes" in s.name}
    assert carried == {"to_gpu", "from_gpu"}


def test_a_server_with_a_model_on_a_gpu_reads_it_and_stops_with_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(temperature=71))
    monkeypatch.setattr(AsyncLLM, "device", "cuda")
    llm = AsyncLLM(demo_model_path(), num_threads=1, kv_cache_memory_bytes=2**23)
    with running_server(llm) as server:
        found = samples(server)
        assert found["llmserve:gpu_temperature_celsius", (("gpu", "FakeGPU"), ("index", "0"))] == 71
    llm.close()
    assert not [t for t in threading.enumerate() if t.name == "gpu-watch"]


def test_boost_off_lets_fewer_sequences_run_and_then_all_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(AsyncLLM, "device", "cuda")
    llm = AsyncLLM(demo_model_path(), num_threads=1, kv_cache_memory_bytes=2**23, max_num_seqs=8)
    watches: list[Any] = []
    watch_gpus = app.watch_gpus
    monkeypatch.setattr(
        app, "watch_gpus", lambda boost: watches.append(watch_gpus(boost)) or watches[0]
    )
    with running_server(llm, boost_off=True) as server:
        seats = []
        for i in range(12):
            nvml.reasons = 0x40 if i % 2 else 0
            watches[0].look(1e6 + 10.0 * i)
        seats.append(llm.get_metrics().num_seats)
        assert server.post("/v1/completions", prompt=[5], max_tokens=2)[0] == 200
        seats.append(llm.get_metrics().num_seats)
        nvml.reasons = 0
        for i in range(20):
            watches[0].look(1e6 + 1000.0 + 130.0 * i)
        assert watches[0].boost_off.share == 1
        assert server.post("/v1/completions", prompt=[5], max_tokens=64, ignore_eos=True)[0] == 200
        seats.append(llm.get_metrics().num_seats)
    llm.close()
    assert seats[1] == 4  # 0.75 of 0.75 of 8
    assert seats[2] == 8


def test_a_requests_life_is_told_to_admins(fresh: RunningServer) -> None:
    answer = fresh.post("/v1/completions", prompt=[9, 8, 7], max_tokens=3, ignore_eos=True)[1]
    headers = {"Authorization": "Bearer root"}
    path = f"/debug/requests/{answer['id']}"
    status, life, _ = fresh.request("GET", path, headers=headers)
    assert status == 200
    assert [span["activity"] for span in life["spans"]] == ["waiting", "prefill", "decode"]
    assert "3 prompt tokens" in life["explanation"][0]
    assert fresh.request("GET", path)[0] == 401


def test_the_lives_of_several_prompts_are_told_by_the_id_of_their_answer(
    fresh: RunningServer,
) -> None:
    asked = {"prompt": [[9, 8, 7], [6, 5]], "max_tokens": 3, "ignore_eos": True}
    name = fresh.post("/v1/completions", **asked)[1]["id"]
    headers = {"Authorization": "Bearer root"}
    status, life, _ = fresh.request("GET", f"/debug/requests/{name}", headers=headers)
    assert (status, life["id"]) == (200, name)
    told = [prompt["explanation"][0] for prompt in life["prompts"]]
    assert ["3 prompt tokens" in told[0], "2 prompt tokens" in told[1]] == [True, True]
    alone = fresh.request("GET", f"/debug/requests/{name}-1", headers=headers)[1]
    assert alone == life["prompts"][1]


def test_a_line_of_the_log_tells_of_each_request(fresh: RunningServer, caplog: Any) -> None:
    with caplog.at_level("INFO", "llmserve.server.access"):
        answer = fresh.post("/v1/completions", prompt=[9], max_tokens=3, ignore_eos=True)[1]
        fresh.wait_until(
            lambda: any(getattr(r, "request_id", "") == answer["id"] for r in caplog.records),
            "the line",
        )
    (line,) = [r for r in caplog.records if getattr(r, "request_id", "") == answer["id"]]
    assert (line.status, line.prompt_tokens, line.generated_tokens) == (200, 1, 3)


def test_a_path_with_a_line_break_writes_one_line(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logs("text")
    assert server.request("GET", "/x%0aCRITICAL%20it%20burns")[0] == 404
    lines = ""

    def is_written() -> bool:
        nonlocal lines
        lines += capsys.readouterr().err
        return "it burns" in lines

    server.wait_until(is_written, "the line")
    assert not any(line.startswith("CRITICAL") for line in lines.splitlines())


def test_no_key_is_ever_in_the_log(
    make_oracle: Callable[..., AsyncLLM], caplog: pytest.LogCaptureFixture
) -> None:
    llm = make_oracle(0, fail_at_step=0, num_failures=2)
    with (
        caplog.at_level("DEBUG"),
        running_server(llm, api_key="sesame-one", admin_key="sesame-two") as server,
    ):
        body = {"prompt": [5], "max_tokens": 2}
        for key, path in (
            ("sesame-one", "/v1/completions"),  # its step fails
            ("sesame-one", "/v1/completions"),
            ("sesame-wrong", "/v1/completions"),
            ("sesame-two", "/debug/requests/none"),
            ("sesame-one", "/v1/completions?api_key=sesame-one"),
            ("sesame-one\x01", "/v1/models"),
        ):
            headers = {"Authorization": f"Bearer {key}", "api-key": key}
            server.request("POST" if "completions" in path else "GET", path, body, headers)
        server.wait_until(
            lambda: sum(r.name == "llmserve.server.access" for r in caplog.records) >= 5,
            "their lines",
        )
    told = "".join(str(vars(record)) + record.getMessage() for record in caplog.records)
    assert "/v1/completions" in told
    assert "sesame" not in told


def test_logs_are_json_where_asked_and_never_hold_a_key() -> None:
    code = """
import logging
from llmserve.server.logs import configure_logs
configure_logs("json")
logging.getLogger("llmserve.x").info("hello %s", "you", extra={"request_id": "r1", "status": 200})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    line = json.loads(done.stderr)
    assert (line["message"], line["request_id"], line["status"]) == ("hello you", "r1", 200)
    command = [sys.executable, "-m", "llmserve", "serve", "--show-config", "--api-key", "sesame"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "sesame" not in shown.stdout + shown.stderr
    assert "api_key='(set)' (flag)" in shown.stdout or "api_key=(set) (flag)" in shown.stdout
