"""The GPUs' part of GET /metrics: the last readings of their telemetry."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, cast

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llmserve.insight.gpu_telemetry import THROTTLE_REASONS, XID_MEANINGS, GpuWatch, WatchedGpu

# Of a GPU: one, or one for each value of another label.
_Values: TypeAlias = Callable[[WatchedGpu], float | dict[str | None, float | None] | None]
PREFIX = "llmserve:gpu_"
# Of GpuReading, by their names there.
_GAUGES = (
    ("temperature_celsius", "temperature_c", "temperature of the GPU"),
    ("power_watts", "power_w", "power that it draws"),
    ("power_limit_watts", "power_limit_w", "power that it may draw"),
    ("sm_clock_hertz", "sm_clock_hz", "clock of its processors"),
    ("max_sm_clock_hertz", "max_sm_clock_hz", "highest clock of its processors"),
    ("memory_clock_hertz", "memory_clock_hz", "clock of its memory"),
    ("utilization_perc", "utilization", "share of time in which a kernel ran, 1 is all"),
    ("memory_utilization_perc", "memory_utilization", "likewise, in which memory was accessed"),
    ("memory_used_bytes", "memory_used_bytes", "memory in use, by all processes"),
    ("memory_total_bytes", "memory_total_bytes", "memory that it has"),
)
_ERRORS = (
    ("pcie_replays", "packets that its PCIe link sent again"),
    ("nvlink_replays", "packets that its NVLinks sent again"),
    ("nvlink_crc_errors", "packets of its NVLinks with a wrong checksum"),
    ("ecc_uncorrected_errors", "memory errors that could not be corrected"),
)
_PCIE = (("to_gpu", "pcie_rx_bytes_per_s"), ("from_gpu", "pcie_tx_bytes_per_s"))
_NVLINK = (("to_gpu", "nvlink_rx_bytes"), ("from_gpu", "nvlink_tx_bytes"))


class GpuCollector(Collector):
    """What a GPU does not say is left out."""

    def __init__(self, watch: GpuWatch) -> None:
        self._watch = watch

    def collect(self) -> Iterator[Metric]:
        """One family a figure, labelled with each GPU's name and index."""
        for name, field, help in _GAUGES:
            yield self._gauge(name, help, _figure(field))
        yield self._gauge("pcie_bytes_per_second", "traffic of its link", _each(_PCIE), "direction")
        yield self._gauge("throttled", "1 while this holds its clock down", _held, "reason")
        yield self._gauge(
            "clock_swings",
            "1 while its clock goes up and down",
            lambda gpu: float(gpu.notice.is_swinging),
        )
        yield self._counter(
            "throttle_starts",
            "times that throttling began",
            lambda gpu: float(gpu.notice.num_starts),
        )
        for name, help in _ERRORS:
            yield self._counter(name, help, _figure(name))
        yield self._counter(
            "nvlink_bytes", "that its NVLinks have carried", _each(_NVLINK), "direction"
        )
        yield self._counter("xid_errors", "errors that the driver reported of it", _xids, "xid")

    def _gauge(self, name: str, help: str, values: _Values, label: str = "") -> Metric:
        return self._fill(GaugeMetricFamily(PREFIX + name, help, labels=_labels(label)), values)

    def _counter(self, name: str, help: str, values: _Values, label: str = "") -> Metric:
        return self._fill(CounterMetricFamily(PREFIX + name, help, labels=_labels(label)), values)

    def _fill(self, family: Any, values: _Values) -> Metric:
        for gpu in self._watch.gpus:
            found = values(gpu)
            if not isinstance(found, dict):
                found = {None: found}
            for key, value in found.items():
                labels = [gpu.reading.name, gpu.reading.index, *([] if key is None else [key])]
                if value is not None:
                    family.add_metric(labels, value)
        return cast(Metric, family)


def _labels(label: str) -> list[str]:
    return ["gpu", "index", label] if label else ["gpu", "index"]


def _figure(field: str) -> _Values:
    return lambda gpu: cast("float | None", getattr(gpu.reading, field))


def _each(fields: Sequence[tuple[str, str]]) -> _Values:
    return lambda gpu: {key: getattr(gpu.reading, field) for key, field in fields}


def _held(gpu: WatchedGpu) -> dict[str | None, float | None]:
    reasons = gpu.reading.throttle_reasons
    return {reason: float(reason in reasons) for reason in THROTTLE_REASONS.values()}


def _xids(gpu: WatchedGpu) -> dict[str | None, float | None]:
    # Known ones from the start, so that the first is an increase.
    if gpu.xids is None:
        return {}
    return {str(xid): float(gpu.xids.get(xid, 0)) for xid in (*XID_MEANINGS, *gpu.xids)}
