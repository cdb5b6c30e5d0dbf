"""GPU telemetry of a fake NVML: units, what is missing, and when throttling is told."""

from __future__ import annotations

import sys
import time

import pytest
from fake_nvml import FakeNvml
from llmserve.errors import NotSupported
from llmserve.insight.doctor import examine
from llmserve.insight.gpu_telemetry import (
    BoostOff,
    GpuReading,
    GpuTelemetry,
    GpuWatch,
    ThrottleNotice,
    visible_devices,
    watch_gpus,
)
from llmserve.insight.live_metrics import LiveMetrics


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def reading(*reasons: str) -> GpuReading:
    return GpuReading("GPU", "0", *(None,) * 18, throttle_reasons=reasons)


def test_figures_come_in_base_units(nvml: FakeNvml) -> None:
    nvml.reasons = 0x04 | 0x40 | 0x01
    assert GpuTelemetry().read() == GpuReading(
        name="FakeGPU",
        index="0",
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
        nvlink_rx_bytes=4 * 139 * 2**20,  # KiB of each
        nvlink_tx_bytes=4 * 138 * 2**20,
        ecc_uncorrected_errors=5,
        throttle_reasons=("power_cap", "hw_thermal"),  # idle is none
    )


def test_what_a_gpu_does_not_say_is_none_and_an_older_name_serves(nvml: FakeNvml) -> None:
    nvml.missing = ["PowerUsage", "UtilizationRates", "CurrentClocksEventReasons"]
    nvml.missing += ["NvLinkErrorCounter", "TotalEccErrors", "FieldValues", "EventSetCreate"]
    nvml.reasons = 0x20
    telemetry = GpuTelemetry()
    found = telemetry.read()
    assert (found.nvlink_rx_bytes, found.nvlink_tx_bytes, telemetry.xids()) == (None,) * 3
    assert (found.power_w, found.utilization, found.temperature_c) == (None, None, 40)
    assert (found.nvlink_replays, found.ecc_uncorrected_errors, found.pcie_replays) == (
        None,
        None,
        3,
    )
    assert found.throttle_reasons == ("sw_thermal",)


@pytest.mark.parametrize(
    ("visible", "asked"),
    [("", [0, 1, 2]), ("3, 1", [3, 1]), ("GPU-5a,GPU-7b", ["GPU-5a", "GPU-7b"])],
)
def test_all_gpus_that_cuda_sees_are_watched(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, visible: str, asked: list[object]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    nvml.num_gpus = 3
    watch = watch_gpus()
    assert watch is not None
    watch.close()
    assert nvml.asked_for == asked
    assert [gpu.reading.index for gpu in watch.gpus] == visible_devices() == [str(i) for i in asked]
    assert nvml.event_sets == {}  # nobody listens any more


def test_xid_errors_are_counted_by_gpu_and_told_once(
    nvml: FakeNvml, caplog: pytest.LogCaptureFixture
) -> None:
    nvml.num_gpus = 2
    watch = GpuWatch([GpuTelemetry(device) for device in visible_devices()], period_s=1000)
    nvml.xids["handle 1"] = [79, 31, 31, 999]
    for _ in range(2):
        for gpu in watch.gpus:
            gpu.look(0.0)
    watch.close()
    assert [gpu.xids for gpu in watch.gpus] == [{}, {79: 1, 31: 2, 999: 1}]
    assert [record.message for record in caplog.records] == [
        "FakeGPU (1) reported Xid 79, the GPU has fallen off the bus",
        "FakeGPU (1) reported Xid 31, a kernel read or wrote where there is no memory",
        "FakeGPU (1) reported Xid 999, which NVIDIA's list of Xid errors explains",
    ]


def test_without_the_package_or_the_driver_it_says_what_is_missing(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nvml.missing = ["Init"]
    with pytest.raises(NotSupported, match="NVML does not give the GPU: Driver Not Loaded"):
        GpuTelemetry()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NotSupported, match=r"needs nvidia-ml-py: pip install 'llmserve\[cuda\]'"):
        GpuTelemetry()
    assert watch_gpus() is None
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
    watch = GpuWatch([GpuTelemetry()], period_s=0.01)
    nvml.temperature, nvml.reasons = 90, 0x40
    deadline = time.monotonic() + 30
    while watch.gpus[0].notice.num_starts == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    watch.close()
    assert watch.gpus[0].reading.temperature_c == 90
    assert watch.gpus[0].notice.num_starts == 1


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


def test_doctor_tells_which_of_several_gpus_is_not_well() -> None:
    text = (
        'llmserve:gpu_throttled{gpu="G",index="0",reason="power_cap"} 0\n'
        'llmserve:gpu_throttled{gpu="G",index="1",reason="power_cap"} 1\n'
        'llmserve:gpu_sm_clock_hertz{gpu="G",index="0"} 1.98e9\n'
        'llmserve:gpu_sm_clock_hertz{gpu="G",index="1"} 1.5e9\n'
        'llmserve:gpu_max_sm_clock_hertz{gpu="G",index="1"} 1.98e9\n'
        'llmserve:gpu_xid_errors_total{gpu="G",index="1",xid="74"} 2\n'
        'llmserve:gpu_xid_errors_total{gpu="G",index="1",xid="7"} 1\n'
    )
    throttled, xids = examine(LiveMetrics.parse(text))
    assert throttled.symptom == "GPU 1 is throttled at 1500 of 1980 MHz: power_cap"
    assert xids.symptom == (
        "the driver reports errors of GPU 1: Xid 7 (unknown), Xid 74 (an NVLink error)"
    )


def test_boost_off_eases_off_by_steps_and_returns_when_the_clock_is_steady(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shares: list[float] = []
    boost = BoostOff(shares.append)
    for now in range(0, 300, 5):  # it swings for five minutes
        boost.look(is_swinging=True, is_held=now % 10 == 0, now=float(now))
    assert shares == [0.75, 0.5625, 0.421875, 0.31640625, 0.25]  # and no less
    for now in range(300, 1200, 5):
        boost.look(is_swinging=False, is_held=False, now=float(now))
    assert shares[5:] == [pytest.approx(share) for share in (1 / 3, 4 / 9, 16 / 27, 64 / 81, 1)]
    boost.look(is_swinging=False, is_held=False, now=5000.0)
    assert len(shares) == 10
    told = [record.message for record in caplog.records]
    assert told[0] == ("boost-off: 75% of the sequences may run at once, until the clock is steady")
    assert told[-1] == "boost-off: the clock is steady, and 100% of the sequences may run at once"


def test_a_watch_tells_boost_off_of_all_its_gpus(nvml: FakeNvml) -> None:
    shares: list[float] = []
    nvml.num_gpus = 2
    telemetries = [GpuTelemetry(device) for device in visible_devices()]
    watch = GpuWatch(telemetries, period_s=1000, boost_off=BoostOff(shares.append))
    for i in range(12):
        nvml.reasons = 0x20 if i % 2 else 0
        watch.look(10.0 * i)
    watch.close()
    assert shares[0] == 0.75
