"""What a router counts, for Prometheus."""

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from llmserve.route.fleet import Fleet

_GAUGES = (
    ("requests", "num_requests", "requests under way"),
    ("tokens", "num_tokens", "tokens of these, prompts and answers as far as they may go"),
    ("prefill_work", "prefill_work", "work of prompts that have not given their first token"),
    ("blocks", "num_blocks", "blocks that it is thought to hold"),
)
_COUNTS = (
    ("routed", "num_routed", "requests that were sent there"),
    ("hit_tokens", "num_hit_tokens", "tokens of their prompts that it was thought to hold"),
)


class RouteMetrics:
    """Of one router."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.routed = Counter(
            "llmserve_route_answers",
            "answers of replicas",
            ["replica", "status"],
            registry=self.registry,
        )
        self.retries = self._counter("retries", "requests that failed at a replica")
        self.replays = self._counter("replays", "streams that went on at another replica")
        self.resumed_tokens = self._counter("resumed_tokens", "tokens that these did not make anew")
        self.handed_over = self._counter(
            "handed_over", "prompts that a server of role prefill computed for another one"
        )
        self.not_handed_over = self._counter(
            "not_handed_over", "prompts that should have been, and that the other one computed"
        )
        self.cut = self._counter("cut_streams", "streams that could not go on")

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(f"llmserve_route_{name}", help, registry=self.registry)


def described(fleet: Fleet) -> list[dict[str, Any]]:
    """Where each replica stands."""
    loads = {load.name: load for load in fleet.router.loads()}
    rows = []
    for replica in fleet.replicas:
        row: dict[str, Any] = {
            "url": replica.url,
            "is_ready": replica.is_ready,
            "tells_blocks": replica.tells_blocks,
            "numerics_class": replica.numerics_class(None),
            "role": replica.role,
        }
        if (load := loads.get(replica.url)) is not None:
            names = [field for _, field, _ in (*_GAUGES, *_COUNTS)]
            row |= {name: getattr(load, name) for name in names}
        rows.append(row)
    return rows


class FleetLoads(Collector):
    """Where each server of a fleet stands."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterable[Metric]:
        """See Collector."""
        ready = GaugeMetricFamily(
            "llmserve_route_replica_ready", "1: it takes requests", labels=["replica"]
        )
        for replica in self._fleet.replicas:
            ready.add_metric([replica.url], float(replica.is_ready))
        yield ready
        loads = self._fleet.router.loads()
        for rows, kind in ((_GAUGES, GaugeMetricFamily), (_COUNTS, CounterMetricFamily)):
            for name, field, help in rows:
                family = kind(f"llmserve_route_replica_{name}", help, labels=["replica"])
                for load in loads:
                    family.add_metric([load.name], float(getattr(load, field)))
                yield family
