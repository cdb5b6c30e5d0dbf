"""What NVML says of the GPUs, and notices: of a clock that is held down, and of Xid errors."""

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from llmserve.errors import NotSupported

_log = logging.getLogger(__name__)

# NVML's "clocks event reasons" (nvml.h, nvmlClocksEventReason*) that mean less speed than asked
# for, by their bit. Not among them: idle, and clocks that somebody set.
THROTTLE_REASONS = {
    0x04: "power_cap",
    0x08: "hw_slowdown",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "power_brake",
}
# What the driver reports in these numbers (NVIDIA's "Xid Errors").
XID_MEANINGS = {
    13: "a kernel's error",
    31: "a kernel read or wrote where there is no memory",
    43: "a program's error stopped the GPU's work",
    45: "work was ended early, after another error",
    48: "a memory error that cannot be corrected",
    62: "the GPU's firmware has halted",
    63: "memory rows were replaced",
    64: "memory rows could not be replaced",
    74: "an NVLink error",
    79: "the GPU has fallen off the bus",
    92: "many memory errors that were corrected",
    94: "a memory error that one program is hit by",
    95: "a memory error that all programs are hit by",
    119: "the GPU's firmware does not answer",
    120: "an error of the GPU's firmware",
}
# So many starts of throttling within so many seconds: the clock boosts, is held down, boosts again.
_SWING_STARTS = 4
_SWING_WINDOW_S = 120.0


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One look. None: this GPU does not say."""

    name: str
    index: str  # as CUDA_VISIBLE_DEVICES has it: a number, or a UUID
    temperature_c: float | None
    power_w: float | None
    power_limit_w: float | None
    sm_clock_hz: float | None
    max_sm_clock_hz: float | None
    memory_clock_hz: float | None
    utilization: float | None  # share of the last period in which a kernel ran
    memory_utilization: float | None  # likewise, in which memory was read or written
    pcie_rx_bytes_per_s: float | None  # to the GPU
    pcie_tx_bytes_per_s: float | None
    memory_used_bytes: float | None  # of all processes
    memory_total_bytes: float | None
    # Counts of errors, of its volatile counters: since the driver was loaded
    pcie_replays: float | None
    nvlink_replays: float | None  # of all links
    nvlink_crc_errors: float | None  # of all links
    nvlink_rx_bytes: float | None  # that came over all links, likewise
    nvlink_tx_bytes: float | None
    ecc_uncorrected_errors: float | None
    throttle_reasons: tuple[str, ...]


def _open_nvml() -> ModuleType:
    """The module, begun. Raises NotSupported that says what is missing."""
    try:
        import pynvml
    except ImportError:
        raise NotSupported(
            "GPU telemetry needs nvidia-ml-py: pip install 'llmserve[cuda]'"
        ) from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NotSupported(f"NVML does not give the GPU: {error}") from None
    module: ModuleType = pynvml
    return module


def visible_devices() -> list[str]:
    """The GPUs that CUDA sees, an index or a UUID each: those of CUDA_VISIBLE_DEVICES, which NVML
    does not look at, or all. Raises NotSupported."""
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if any(named):
        return [name for name in named if name]
    nvml = _open_nvml()
    try:
        return [str(index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        raise NotSupported(f"NVML does not give the GPU: {error}") from None


class GpuTelemetry:
    """One GPU, by its index or UUID. Raises NotSupported that says what is missing."""

    def __init__(self, device: str = "0") -> None:
        nvml = self._nvml = _open_nvml()
        self.index = device
        try:
            if device.isdigit():
                self._handle = nvml.nvmlDeviceGetHandleByIndex(int(device))
            else:
                self._handle = nvml.nvmlDeviceGetHandleByUUID(device)
            self.name = str(nvml.nvmlDeviceGetName(self._handle))
        except nvml.NVMLError as error:
            raise NotSupported(f"NVML does not give the GPU: {error}") from None
        self._xid_events = self._listen()
        self._xids: Counter[int] = Counter()

    def _listen(self) -> Any:
        """Where Xid errors arrive; None where the GPU or the driver tells nobody."""
        nvml = self._nvml
        try:
            events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(self._handle, nvml.nvmlEventTypeXidCriticalError, events)
        except (AttributeError, nvml.NVMLError):
            return None
        return events

    def xids(self) -> Counter[int] | None:
        """How often each Xid error came since this was made; None: the GPU tells nobody."""
        nvml = self._nvml
        while self._xid_events is not None:
            try:
                self._xids[int(nvml.nvmlEventSetWait(self._xid_events, 0).eventData)] += 1
            except nvml.NVMLError:  # nothing has come
                return self._xids.copy()
        return None

    def close(self) -> None:
        """Listens no more."""
        if self._xid_events is not None:
            self._nvml.nvmlEventSetFree(self._xid_events)
            self._xid_events = None

    def _ask(self, function: str, *arguments: object) -> Any:
        """None where the GPU or the driver has no such figure."""
        try:
            return getattr(self._nvml, "nvmlDeviceGet" + function)(self._handle, *arguments)
        except (AttributeError, self._nvml.NVMLError):
            return None

    def _scaled(self, factor: float, function: str, *arguments: object) -> float | None:
        value = self._ask(function, *arguments)
        return None if value is None else value * factor

    def _nvlink_errors(self, counter: int) -> float | None:
        """Of all links; None without any."""
        links = range(self._nvml.NVML_NVLINK_MAX_LINKS)
        counts = [self._ask("NvLinkErrorCounter", link, counter) for link in links]
        known = [float(count) for count in counts if count is not None]
        return sum(known) if known else None

    def _nvlink_bytes(self, field: str) -> float | None:
        """Of all links, since the driver was loaded; None without any."""
        nvml = self._nvml
        try:
            asked = [(getattr(nvml, field), link) for link in range(nvml.NVML_NVLINK_MAX_LINKS)]
            values = nvml.nvmlDeviceGetFieldValues(self._handle, asked)
        except (AttributeError, nvml.NVMLError):
            return None
        known = [float(v.value.ullVal) for v in values if v.nvmlReturn == nvml.NVML_SUCCESS]
        return 1024 * sum(known) if known else None  # they count KiB

    def read(self) -> GpuReading:
        """Some milliseconds; from any thread."""
        nvml = self._nvml
        rates, memory = self._ask("UtilizationRates"), self._ask("MemoryInfo")
        # The newer name of the same function first.
        reasons = self._ask("CurrentClocksEventReasons")
        if reasons is None:
            reasons = self._ask("CurrentClocksThrottleReasons")
        return GpuReading(
            name=self.name,
            index=self.index,
            temperature_c=self._scaled(1, "Temperature", nvml.NVML_TEMPERATURE_GPU),
            power_w=self._scaled(1e-3, "PowerUsage"),
            power_limit_w=self._scaled(1e-3, "EnforcedPowerLimit"),
            sm_clock_hz=self._scaled(1e6, "ClockInfo", nvml.NVML_CLOCK_SM),
            max_sm_clock_hz=self._scaled(1e6, "MaxClockInfo", nvml.NVML_CLOCK_SM),
            memory_clock_hz=self._scaled(1e6, "ClockInfo", nvml.NVML_CLOCK_MEM),
            utilization=None if rates is None else rates.gpu / 100,
            memory_utilization=None if rates is None else rates.memory / 100,
            # KB/s over the last 20 ms
            pcie_rx_bytes_per_s=self._scaled(1e3, "PcieThroughput", nvml.NVML_PCIE_UTIL_RX_BYTES),
            pcie_tx_bytes_per_s=self._scaled(1e3, "PcieThroughput", nvml.NVML_PCIE_UTIL_TX_BYTES),
            memory_used_bytes=None if memory is None else memory.used,
            memory_total_bytes=None if memory is None else memory.total,
            pcie_replays=self._scaled(1, "PcieReplayCounter"),
            nvlink_replays=self._nvlink_errors(nvml.NVML_NVLINK_ERROR_DL_REPLAY),
            nvlink_crc_errors=self._nvlink_errors(nvml.NVML_NVLINK_ERROR_DL_CRC_FLIT),
            nvlink_rx_bytes=self._nvlink_bytes("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX"),
            nvlink_tx_bytes=self._nvlink_bytes("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX"),
            ecc_uncorrected_errors=self._scaled(
                1,
                "TotalEccErrors",
                nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                nvml.NVML_VOLATILE_ECC,
            ),
            throttle_reasons=tuple(
                name for bit, name in THROTTLE_REASONS.items() if (reasons or 0) & bit
            ),
        )


class ThrottleNotice:
    """Tells the log when throttling begins and ends, and when the clock swings.

    >>> from types import SimpleNamespace
    >>> notice = ThrottleNotice()
    >>> notice.look(SimpleNamespace(name="GPU", throttle_reasons=()), now=0.0)
    >>> notice.is_swinging
    False
    """

    def __init__(self) -> None:
        self._reasons: tuple[str, ...] = ()
        self._starts: deque[float] = deque()
        self.is_swinging = False
        self.num_starts = 0

    def look(self, reading: GpuReading, now: float) -> None:
        """After each reading, with the time of it in seconds."""
        before, self._reasons = self._reasons, reading.throttle_reasons
        if self._reasons and not before:
            self.num_starts += 1
            self._starts.append(now)
            _log.warning(
                "%s is throttled (%s): steps take longer until it is not",
                *(reading.name, ", ".join(self._reasons)),
            )
        elif before and not self._reasons:
            _log.warning("%s is no longer throttled", reading.name)
        while self._starts and now - self._starts[0] > _SWING_WINDOW_S:
            self._starts.popleft()
        was_swinging, self.is_swinging = self.is_swinging, len(self._starts) >= _SWING_STARTS
        if self.is_swinging and not was_swinging:
            _log.warning(
                "boost-off: the clock of %s was held down %d times in %.0f s; a lower, steady one "
                "serves more evenly: `nvidia-smi --lock-gpu-clocks=0,MHZ` with a MHZ that it "
                "holds, a lower power limit, or better cooling",
                *(reading.name, len(self._starts), _SWING_WINDOW_S),
            )


class BoostOff:
    """Eases off while a clock swings: fewer sequences at once draw less power. `allow` takes the
    share of them that may run, which falls by steps while any clock swings, and rises by as many
    once all have been steady for as long as swinging is told by.

    >>> shares = []
    >>> boost = BoostOff(shares.append)
    >>> boost.look(is_swinging=True, is_held=True, now=0.0)
    >>> shares
    [0.75]
    """

    STEP = 0.75
    LEAST = 0.25
    # Between two steps, in seconds: what a GPU's temperature follows within.
    _EASE_S, _RETURN_S = 30.0, _SWING_WINDOW_S

    def __init__(self, allow: Callable[[float], None]) -> None:
        self._allow = allow
        self.share = 1.0
        self._changed = self._held = -float("inf")

    def look(self, *, is_swinging: bool, is_held: bool, now: float) -> None:
        """After each reading of all GPUs; is_held: any clock is held down at this moment."""
        if is_held:
            self._held = now
        if is_swinging and self.share > self.LEAST and now - self._changed >= self._EASE_S:
            share = max(self.LEAST, self.share * self.STEP)
            _log.warning(
                "boost-off: %.0f%% of the sequences may run at once, until the clock is steady",
                100 * share,
            )
        elif self.share < 1 and now - max(self._held, self._changed) >= self._RETURN_S:
            share = min(1.0, self.share / self.STEP)
            _log.warning(
                "boost-off: the clock is steady, and %.0f%% of the sequences may run at once",
                100 * share,
            )
        else:
            return
        self.share, self._changed = share, now
        self._allow(share)


class WatchedGpu:
    """A GPU of a watch: the last reading, what was noticed, and the Xid errors so far."""

    def __init__(self, telemetry: GpuTelemetry) -> None:
        self._telemetry = telemetry
        self.notice = ThrottleNotice()
        self.reading = telemetry.read()
        self.xids = telemetry.xids()

    def look(self, now: float) -> None:
        """Reads again, at this time in seconds."""
        self.reading = self._telemetry.read()
        self.notice.look(self.reading, now)
        before, self.xids = self.xids or Counter(), self._telemetry.xids()
        for xid, count in (self.xids or Counter()).items():
            if count > before[xid]:
                _log.warning(
                    "%s (%s) reported Xid %d, %s",
                    *(self.reading.name, self.reading.index, xid),
                    XID_MEANINGS.get(xid, "which NVIDIA's list of Xid errors explains"),
                )

    def close(self) -> None:
        """Listens no more."""
        self._telemetry.close()


class GpuWatch:
    """Reads every few seconds on a thread of its own and keeps the last readings."""

    def __init__(
        self,
        telemetries: Sequence[GpuTelemetry],
        period_s: float = 5.0,
        boost_off: BoostOff | None = None,
    ) -> None:
        self._period_s = period_s
        self.boost_off = boost_off
        self._stop = threading.Event()
        self.gpus = [WatchedGpu(telemetry) for telemetry in telemetries]
        self._thread = threading.Thread(target=self._run, name="gpu-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Reads all again, at this time in seconds."""
        for gpu in self.gpus:
            gpu.look(now)
        if self.boost_off is not None:
            self.boost_off.look(
                is_swinging=any(gpu.notice.is_swinging for gpu in self.gpus),
                is_held=any(gpu.reading.throttle_reasons for gpu in self.gpus),
                now=now,
            )

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join()
        for gpu in self.gpus:
            gpu.close()


def watch_gpus(boost_off: BoostOff | None = None) -> GpuWatch | None:
    """A watch of all GPUs that CUDA sees; None, and a line in the log that says why, where NVML is
    not to be had. boost_off: eases off while a clock swings; None: the log tells of it alone."""
    try:
        telemetries = [GpuTelemetry(device) for device in visible_devices()]
        return GpuWatch(telemetries, boost_off=boost_off)
    except NotSupported as error:
        _log.warning("no GPU telemetry: %s", error)
        return None
