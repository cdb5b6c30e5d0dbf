"""GPU telemetry of a fake NVML: units, what is missing, and when throttling is told."""

from __future__ import annotations

import sys
import time

import pytest
from fake_nvml import FakeNvml
from llmserve.errors import NotSupported
from llmserve.insight.doctor import examine
from llmserve.insight.gpu_telemetry import (
    GpuReading,
    GpuTelemetry,
    GpuWatch,
    ThrottleNotice,
    watch_gpu,
)
from llmserve.insight.live_metrics import LiveMetrics


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def reading(*reasons: str) -> GpuReading:
    return GpuReading("GPU", *(None,) * 16, throttle_reasons=reasons)


def test_figures_come_in_base_units(nvml: FakeNvml) -> None:
    nvml.reasons = 0x04 | 0x40 | 0x01
    assert GpuTelemetry().read() == GpuReading(
        name="FakeGPU",
        temperature_c=40,
        power_w=250,
        power_limit_w=700,
        sm_clock_hz=1.5e9,
        max_sm_clock_hz=1.98e9,
        memory_clock_hz=1.5e9,
        utilization=0.75,
        memory_utilization=0.5,
        pcie_rx_bytes_per_s=4e6,
        pcie_tx_bytes_per_s=4e6,
        memory_used_bytes=2**30,
        memory_total_bytes=2**34,
        pcie_replays=3,
        nvlink_replays=4,  # one of each of its four links
        nvlink_crc_errors=80,
        ecc_uncorrected_errors=5,
        throttle_reasons=("power_cap", "hw_thermal"),  # idle is none
    )


def test_what_a_gpu_does_not_say_is_none_and_an_older_name_serves(nvml: FakeNvml) -> None:
    nvml.missing = ["PowerUsage", "UtilizationRates", "CurrentClocksEventReasons"]
    nvml.missing += ["NvLinkErrorCounter", "TotalEccErrors"]
    nvml.reasons = 0x20
    found = GpuTelemetry().read()
    assert (found.power_w, found.utilization, found.temperature_c) == (None, None, 40)
    assert (found.nvlink_replays, found.ecc_uncorrected_errors, found.pcie_replays) == (
        None,
        None,
        3,
    )
    assert found.throttle_reasons == ("sw_thermal",)


@pytest.mark.parametrize(("visible", "asked"), [("", 0), ("3,1", 3), ("GPU-5a,GPU-7b", "GPU-5a")])
def test_the_gpu_is_the_first_that_cuda_sees(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, visible: str, asked: object
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    GpuTelemetry()
    assert nvml.asked_for == [asked]


def test_without_the_package_or_the_driver_it_says_what_is_missing(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nvml.missing = ["Init"]
    with pytest.raises(NotSupported, match="NVML does not give the GPU: Driver Not Loaded"):
        GpuTelemetry()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NotSupported, match=r"needs nvidia-ml-py: pip install 'llmserve\[cuda\]'"):
        GpuTelemetry()
    assert watch_gpu() is None
    assert "no GPU telemetry" in caplog.text


def test_throttling_is_told_when_it_begins_and_ends_and_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    notice = ThrottleNotice()
    steps = [(), ("power_cap",), ("power_cap",), ("power_cap", "hw_thermal"), (), ()]
    for now, reasons in enumerate(steps):
        notice.look(reading(*reasons), float(now))
    assert [record.message for record in caplog.records] == [
        "GPU is throttled (power_cap): steps take longer until it is not",
        "GPU is no longer throttled",
    ]
    assert notice.num_starts == 1


def test_a_clock_that_swings_is_told_once_until_it_is_steady(
    caplog: pytest.LogCaptureFixture,
) -> None:
    notice = ThrottleNotice()
    for i in range(12):
        notice.look(reading(*(["sw_thermal"] if i % 2 else [])), 10.0 * i)
    assert sum("boost-off" in record.message for record in caplog.records) == 1
    assert notice.is_swinging
    notice.look(reading(), 400.0)
    assert not notice.is_swinging


def test_a_watch_reads_again_and_again_until_it_is_closed(nvml: FakeNvml) -> None:
    watch = GpuWatch(GpuTelemetry(), period_s=0.01)
    nvml.temperature, nvml.reasons = 90, 0x40
    deadline = time.monotonic() + 30
    while watch.notice.num_starts == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    watch.close()
    assert watch.reading.temperature_c == 90
    assert watch.notice.num_starts == 1


def test_doctor_tells_of_throttling_and_of_a_clock_that_swings() -> None:
    text = (
        'llmserve:gpu_throttled{gpu="G",reason="hw_thermal"} 1\n'
        'llmserve:gpu_throttled{gpu="G",reason="power_cap"} 0\n'
        'llmserve:gpu_sm_clock_hertz{gpu="G"} 1.2e9\n'
        'llmserve:gpu_max_sm_clock_hertz{gpu="G"} 1.98e9\n'
        'llmserve:gpu_clock_swings{gpu="G"} 1\n'
    )
    throttled, swings = examine(LiveMetrics.parse(text))
    assert throttled.symptom == "the GPU is throttled at 1200 of 1980 MHz: hw_thermal"
    assert throttled.cause == "it is too hot"
    assert "lock a clock" in swings.action
