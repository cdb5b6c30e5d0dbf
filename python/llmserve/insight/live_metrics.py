"""A server's /metrics, read from outside: samples, rates between two readings, quantiles."""

import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from llmserve.errors import InvalidArgument

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_TIMEOUT_S = 10.0
_MAX_BYTES = 2**24


@dataclass(frozen=True, slots=True)
class LiveMetrics:
    """One reading. Names are without their `llmserve:`."""

    samples: Mapping[tuple[str, frozenset[tuple[str, str]]], float]

    @classmethod
    def parse(cls, text: str) -> "LiveMetrics":
        """Of Prometheus' text format."""
        samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for line in text.splitlines():
            if (found := _SAMPLE.match(line)) is None:
                continue
            labels = frozenset(_LABEL.findall(found[2] or ""))
            samples[found[1].removeprefix("llmserve:"), labels] = float(found[3])
        return cls(samples)

    @classmethod
    def fetch(cls, url: str, api_key: str = "") -> "LiveMetrics":
        """Of a server. Raises InvalidArgument that says why it cannot be read."""
        address = url.rstrip("/").removesuffix("/v1") + "/metrics"
        if not address.startswith(("http://", "https://")):
            raise InvalidArgument(f"URL must be http://host:port, got {url!r}")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        request = urllib.request.Request(address, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                metrics = cls.parse(answer.read(_MAX_BYTES).decode("utf-8", "replace"))
        except urllib.error.HTTPError as error:
            hint = "; give --api-key" if error.code == 401 else ""
            raise InvalidArgument(f"{address} says {error.code}{hint}") from None
        except (OSError, ValueError) as error:
            raise InvalidArgument(f"{address} cannot be read: {error}") from None
        if not any(name == "num_requests_running" for name, _ in metrics.samples):
            raise InvalidArgument(f"{address} has no metrics of llmserve")
        return metrics

    @property
    def by_model(self) -> dict[str, "LiveMetrics"]:
        """What is of one model, by its name; all, without one, where no sample names a model."""
        found: dict[str, dict[tuple[str, frozenset[tuple[str, str]]], float]] = {}
        for (name, labels), value in self.samples.items():
            if model := dict(labels).get("model_name"):
                found.setdefault(model, {})[name, labels] = value
        return {model: LiveMetrics(samples) for model, samples in found.items()} or {"": self}

    @property
    def by_gpu(self) -> dict[str, "LiveMetrics"]:
        """What is of one GPU, by its index, in their order."""
        found: dict[str, dict[tuple[str, frozenset[tuple[str, str]]], float]] = {}
        for (name, labels), value in self.samples.items():
            if "gpu" in (of := dict(labels)):
                found.setdefault(of.get("index", "0"), {})[name, labels] = value
        return {index: LiveMetrics(found[index]) for index in sorted(found)}

    def value(self, name: str, **labels: str) -> float:
        """A sample, summed over the labels that are not given; 0 if there is none."""
        wanted = set(labels.items())
        return sum(v for (n, found), v in self.samples.items() if n == name and wanted <= found)

    def since(self, earlier: "LiveMetrics") -> "LiveMetrics":
        """Counters and histograms without what they had then; gauges as they are."""
        changing = ("_total", "_bucket", "_count", "_sum")
        return LiveMetrics(
            {
                key: value - earlier.samples.get(key, 0.0) if key[0].endswith(changing) else value
                for key, value in self.samples.items()
            }
        )

    def quantile(self, name: str, share: float) -> float | None:
        """Of a histogram, by linear interpolation in its bucket; None without values."""
        counts: dict[float, float] = {}
        for (n, labels), count in self.samples.items():
            if n == name + "_bucket":
                bound = float(dict(labels)["le"])
                counts[bound] = counts.get(bound, 0.0) + count
        bounds = sorted(counts.items())
        if not bounds or bounds[-1][1] <= 0:
            return None
        rank = share * bounds[-1][1]
        low, below = 0.0, 0.0
        for bound, count in bounds:
            if count >= rank:
                if bound == float("inf") or count == below:
                    return low
                return low + (bound - low) * (rank - below) / (count - below)
            low, below = bound, count
        return low
