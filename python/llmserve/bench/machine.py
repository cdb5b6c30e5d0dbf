"""What the machine can do, measured between the runs of a benchmark, and what it is."""

import os
import platform
import statistics
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmserve import _core
from llmserve._version import __version__

# Several times the last cache of a server, so that reading it is reading memory.
_PROBE_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Rates:
    """Medians over a benchmark's runs: streaming reads and float32 multiply-adds, all threads."""

    read_bytes_per_s: float
    flops_per_s: float

    def bound_s(self, num_bytes: float, num_flops: float) -> float:
        """Seconds that no program beats here: the larger of reading and arithmetic."""
        return max(num_bytes / self.read_bytes_per_s, num_flops / self.flops_per_s)


@dataclass(slots=True)
class MachineProbe:
    """Measures the machine's rates whenever asked: whatever else it does slows both alike."""

    num_threads: int
    _reads: list[float] = field(default_factory=list)
    _flops: list[float] = field(default_factory=list)
    _probe: Any = None

    def measure(self) -> None:
        """One measurement, of some 50 ms."""
        if self._probe is None:
            testing: Any = _core.testing  # type: ignore[attr-defined]  # internals: no stub
            self._probe = testing.MachineProbe(self.num_threads, num_bytes=_PROBE_BYTES)
        read, fma = self._probe.measure()
        self._reads.append(read * 1e9)
        self._flops.append(fma * 1e9)

    def rates(self) -> Rates:
        """The medians so far; measures if nothing was measured yet."""
        if not self._reads:
            self.measure()
        return Rates(statistics.median(self._reads), statistics.median(self._flops))


def describe_machine() -> dict[str, object]:
    """CPU, cores, memory, system and versions, for a result that a stranger can place."""
    return {
        "cpu": _cpu_name(),
        "num_cpus": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "llmserve": __version__,
        "commit": _commit(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _commit() -> str | None:
    """The commit of the source tree that the package runs from, None for an installed wheel."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() or None
