"""What the machine can do, measured between the runs of a benchmark, and what it is."""

import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmserve import _core
from llmserve._version import __version__

# Each one's values are values of those before it, so that their arithmetic can multiply them, too.
ARITHMETICS = ("float32", "bfloat16", "int8")
# Rows, outputs and inputs of the product that is measured: a chunk of a prompt, a layer of 1.1 B.
GEMM = (512, 5632, 2048)
# Several times the last cache of a server, so that reading it is reading memory.
_PROBE_BYTES = 256 * 2**20
# A read takes milliseconds, and a virtual machine's memory is not always equally fast.
_NUM_READS = 5
_OWN = "llmserve"

# Operations a second, two a multiply-add, of a product of such a size in an arithmetic, measured
# once; 0 where it has none.
Gemm = Callable[[str], float]


def arithmetic_of(form: str) -> str:
    """The arithmetic that weights of this format are multiplied in: integers are 8 bits."""
    return form if form in ARITHMETICS else "int8"


@dataclass(frozen=True, slots=True)
class Rates:
    """Medians over a benchmark's runs, of all threads: bytes of streaming reads, and operations of
    matrix products, two a multiply-add, by arithmetic and by whose product it is."""

    read_bytes_per_s: float
    gemm_ops_per_s: Mapping[str, Mapping[str, float]]

    def best_gemm(self, form: str) -> tuple[float, str, str]:
        """The highest rate for weights of this format, with its arithmetic and whose it is."""
        wide_enough = ARITHMETICS[: ARITHMETICS.index(arithmetic_of(form)) + 1]
        return max(
            (rate, arithmetic, source)
            for arithmetic in wide_enough
            for source, rate in self.gemm_ops_per_s.get(arithmetic, {}).items()
        )

    def bound_s(self, num_bytes: float, num_ops: float, form: str) -> float:
        """The larger of reading so many bytes and of so many operations on such weights."""
        read_s = num_bytes / self.read_bytes_per_s
        return max(read_s, num_ops / self.best_gemm(form)[0]) if num_ops else read_s

    def limit(self, num_bytes: float, num_ops: float, form: str) -> str:
        """For people: the rate that this bound comes from."""
        if self.bound_s(num_bytes, 0, form) == self.bound_s(num_bytes, num_ops, form):
            return f"{self.read_bytes_per_s / 1e9:.1f} GB/s"
        return self._gemm_text(arithmetic_of(form))

    def text(self, forms: Iterable[str]) -> str:
        """For people: the reads, and the best rate for each format."""
        parts = map(self._gemm_text, dict.fromkeys(map(arithmetic_of, forms)))
        return f"reads {self.read_bytes_per_s / 1e9:.1f} GB/s and does {' and '.join(parts)}"

    def _gemm_text(self, name: str) -> str:
        rate, arithmetic, source = self.best_gemm(name)
        unit = "GOP/s" if name == "int8" else "GFLOP/s"
        by = source if arithmetic == name else f"{arithmetic} of {source}"
        return f"{rate / 1e9:,.0f} {unit} in {name} ({by})"


class MachineProbe:
    """Measures the machine's rates whenever asked: whatever else it does slows both alike.

    The arithmetic is that of weights in `forms`, and any wider one. `others` have products of their
    own, by name.
    """

    def __init__(
        self,
        num_threads: int,
        forms: Sequence[str],
        others: Mapping[str, Gemm] | None = None,
        isa: str = "",
    ) -> None:
        self._memory = _core.MachineProbe(num_threads, isa, _PROBE_BYTES)
        self._forms = forms
        own = _core.GemmProbe(num_threads, isa, *GEMM)
        self._gemms: dict[str, Gemm] = {_OWN: own.ops_per_s, **(others or {})}
        self._measured: list[Rates] = []

    def measure(self, forms: Sequence[str] | None = None) -> Rates:
        """One measurement, of some 100 ms; for other formats than the probe's if some are given."""
        needed = map(arithmetic_of, self._forms if forms is None else forms)
        num_needed = max((ARITHMETICS.index(name) + 1 for name in needed), default=0)
        ops = {
            arithmetic: {name: gemm(arithmetic) for name, gemm in self._gemms.items()}
            for arithmetic in ARITHMETICS[:num_needed]
        }
        reads = [self.read_bytes_per_s() for _ in range(_NUM_READS)]
        rates = Rates(statistics.median(reads), ops)
        self._measured.append(rates)
        return rates

    def read_bytes_per_s(self) -> float:
        """Of a streaming read, measured once."""
        return self._memory.read_gb_per_s() * 1e9

    def copy_bytes_per_s(self, num_bytes: int) -> float:
        """Read and written, of a plain copy into new memory, measured once."""
        return self._memory.copy_gb_per_s(num_bytes) * 1e9

    def rates(self) -> Rates:
        """The medians so far; measures if nothing was measured yet."""
        return medians(self._measured or [self.measure()])


def medians(measured: Sequence[Rates]) -> Rates:
    """Of measurements for the same formats."""
    ops = {
        arithmetic: {
            name: statistics.median(rates.gemm_ops_per_s[arithmetic][name] for rates in measured)
            for name in by_source
        }
        for arithmetic, by_source in measured[0].gemm_ops_per_s.items()
    }
    return Rates(statistics.median(rates.read_bytes_per_s for rates in measured), ops)


def describe_machine() -> dict[str, object]:
    """CPU, the instruction set that the kernels take, cores, system and versions, for a result that
    a stranger can place."""
    return {
        "cpu": _cpu_name(),
        "cpu_model": _cpu_model(),
        "cpu_isa": _core.cpu_isa(),
        "num_cpus": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "llmserve": __version__,
        "commit": _commit(),
    }


def _cpu_name() -> str:
    return _first_cpu().get("model name") or platform.processor()


def _cpu_model() -> str | None:
    """The numbers that the CPU gives itself; in a virtual machine its name may be a brand's."""
    cpu = _first_cpu()
    if {"vendor_id", "cpu family", "model"} <= cpu.keys():
        return f"{cpu['vendor_id']} family {cpu['cpu family']} model {cpu['model']}"
    return None


def _first_cpu() -> dict[str, str]:
    """What Linux says of it, by name."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


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
