"""The GPU's part of GET /metrics: the last reading of its telemetry."""

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llmserve.insight.gpu_telemetry import THROTTLE_REASONS, GpuWatch

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
_DIRECTIONS = (("to_gpu", "pcie_rx_bytes_per_s"), ("from_gpu", "pcie_tx_bytes_per_s"))


class GpuCollector(Collector):
    """What the GPU does not say is left out."""

    def __init__(self, watch: GpuWatch) -> None:
        self._watch = watch

    def collect(self) -> Iterator[Metric]:
        """One family a figure, labelled with the GPU's name."""
        reading = self._watch.reading

        def gauge(name: str, help: str, values: dict[str, float | None], label: str) -> Metric:
            labels = ["gpu", label] if label else ["gpu"]
            family = GaugeMetricFamily(PREFIX + name, help, labels=labels)
            for key, value in values.items():
                if value is not None:
                    family.add_metric([reading.name, key] if label else [reading.name], value)
            return family

        for name, field, help in _GAUGES:
            yield gauge(name, help, {"": getattr(reading, field)}, "")
        traffic: dict[str, float | None] = {key: getattr(reading, f) for key, f in _DIRECTIONS}
        yield gauge("pcie_bytes_per_second", "traffic of its link", traffic, "direction")
        held: dict[str, float | None] = {
            reason: float(reason in reading.throttle_reasons)
            for reason in THROTTLE_REASONS.values()
        }
        yield gauge("throttled", "1 while this holds its clock down", held, "reason")
        swings: dict[str, float | None] = {"": float(self._watch.notice.is_swinging)}
        yield gauge("clock_swings", "1 while its clock goes up and down", swings, "")
        starts = float(self._watch.notice.num_starts)
        yield _counter("throttle_starts", "times that throttling began", reading.name, starts)
        for name, help in _ERRORS:
            yield _counter(name, help, reading.name, getattr(reading, name))


def _counter(name: str, help: str, gpu: str, value: float | None) -> Metric:
    family = CounterMetricFamily(PREFIX + name, help, labels=["gpu"])
    if value is not None:
        family.add_metric([gpu], value)
    return family
