"""What calibration keeps of the inputs of a linear layer, and of the values that a step stores."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from llmserve.errors import InvalidArgument
from llmserve.quantization.number_formats import Floats
from llmserve.quantization.schemes import OBSERVERS, PERCENTILE
from llmserve.quantization.workers import Workers

_NUM_BINS = 2048
_PANEL = 256  # columns of the moments that one thread sums at a time
# Moments of few rows are those of these rows alone, and weights would be fitted to them. As
# in a ridge regression the mean diagonal is added, by 0.3 K rows / M. Over Gaussian inputs with
# spectra k^-0.5, k^-1 and k^-1.5, of K / 24 to 4 K rows, GPTQ then loses 0.7 to 1, 0.45 to 0.7
# and 0.13 to 0.4 of what rounding to nearest loses of other inputs; without, up to 2.2 times it.
_RIDGE = 0.3
_FEW_ROWS = 4  # times K


@dataclass(slots=True)
class Histogram:
    """Counts of |x| in 2,048 equal bins from 0. It grows by doubling, which joins bins in pairs."""

    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(_NUM_BINS, np.int64))
    limit: float = 0.0  # the last bin's end
    largest: float = 0.0

    def add(self, values: Floats) -> None:
        """Counts all elements, which are finite."""
        magnitude = np.abs(values).ravel()
        largest = float(magnitude.max(initial=0))
        self.largest = max(self.largest, largest)
        if largest > 0 and self.limit == 0:
            self.limit = largest
        while largest > self.limit:
            pairs = self.counts.reshape(-1, 2).sum(1)
            self.counts = np.concatenate([pairs, np.zeros_like(pairs)])
            self.limit *= 2
        if self.limit > 0:
            bins = np.minimum((magnitude * (_NUM_BINS / self.limit)).astype(np.intp), _NUM_BINS - 1)
            self.counts += np.bincount(bins, minlength=_NUM_BINS)

    def amax(self, observer: str, percentile: float = PERCENTILE) -> float:
        """Where a symmetric 8-bit grid should end."""
        if observer not in OBSERVERS:
            raise InvalidArgument(f"observer must be one of {OBSERVERS}, got {observer!r}")
        if self.largest == 0 or observer == "minmax":
            return self.largest
        if observer == "percentile":
            return min(self.largest, self._percentile(percentile))
        search = self._least_divergence if observer == "entropy" else self._least_square
        return min(self.largest, search() * self.limit / _NUM_BINS)

    def _percentile(self, percentile: float) -> float:
        below = np.cumsum(self.counts)
        index = int(np.searchsorted(below, below[-1] * (percentile / 100)))
        return (min(index, _NUM_BINS - 1) + 1) * self.limit / _NUM_BINS

    def _least_divergence(self) -> int:
        """Bins kept, by the Kullback-Leibler divergence of 128 levels from what they stand for.
        Source: Migacz 2017, "8-bit Inference with TensorRT"."""
        best, kept = np.inf, _NUM_BINS
        counts = self.counts.astype(np.float64)
        for n in range(128, _NUM_BINS + 1, 16):
            reference = counts[:n].copy()
            is_used = reference > 0  # before what is cut off joins the last
            reference[-1] += counts[n:].sum()
            level = np.arange(n) * 128 // n
            total = np.bincount(level, weights=counts[:n] * is_used, minlength=128)
            members = np.bincount(level, weights=is_used, minlength=128)
            spread = np.where(is_used, (total / np.maximum(members, 1))[level], 0)
            if reference.sum() == 0 or spread.sum() == 0:
                continue
            p = reference / reference.sum()
            q = np.maximum(spread / spread.sum(), 1e-12)
            terms = p > 0
            divergence = float(np.sum(p[terms] * np.log(p[terms] / q[terms])))
            if divergence < best:
                best, kept = divergence, n
        return kept

    def _least_square(self) -> int:
        """Bins kept, by the squares of what 127 steps and the cut cost."""
        middles = np.arange(_NUM_BINS) + 0.5
        best, kept = np.inf, _NUM_BINS
        for n in range(64, _NUM_BINS + 1, 8):
            step = n / 127
            error = middles - np.minimum(np.rint(middles / step), 127) * step
            loss = float(np.sum(self.counts * np.square(error)))
            if loss < best:
                best, kept = loss, n
        return kept


@dataclass(slots=True)
class InputStats:
    """Of the rows [M, K] that one product reads. The matrix of moments takes 4 K^2 bytes."""

    moments: Floats  # [K, K], the sum of outer products; empty if it is not wanted
    sum_magnitude: Floats  # [K]
    largest: Floats  # [K], of |x|
    histogram: Histogram | None
    num_rows: int = 0

    @classmethod
    def make(cls, k: int, *, has_moments: bool, has_histogram: bool) -> "InputStats":
        """Of no rows."""
        return cls(
            np.zeros((k, k) if has_moments else (0, 0), np.float32),
            np.zeros(k, np.float32),
            np.zeros(k, np.float32),
            Histogram() if has_histogram else None,
        )

    def add(self, x: Floats, workers: Workers) -> None:
        """Takes more rows [M, K] in."""
        if self.moments.size:
            list(workers.map(lambda begin: self._add_panel(x, begin), range(0, x.shape[1], _PANEL)))
        magnitude = np.abs(x)
        self.sum_magnitude += magnitude.sum(0)
        np.maximum(self.largest, magnitude.max(0), out=self.largest)
        if self.histogram is not None:
            self.histogram.add(x)
        self.num_rows += x.shape[0]

    def _add_panel(self, x: Floats, begin: int) -> None:
        """Columns of the moments from `begin` on, down to the diagonal: half of a square."""
        end = min(begin + _PANEL, x.shape[1])
        self.moments[:end, begin:end] += x[:, :end].T @ x[:, begin:end]

    def finish(self) -> None:
        """Once all rows are in: the other half of the moments, which are symmetric."""
        for begin in range(0, self.moments.shape[0], _PANEL):
            end = begin + _PANEL
            self.moments[begin:end, :begin] = self.moments[:begin, begin:end].T
        k = self.moments.shape[0]
        if 0 < self.num_rows < _FEW_ROWS * k:
            share = np.float32(_RIDGE * k / self.num_rows)
            self.moments[np.diag_indices(k)] += share * np.diag(self.moments).mean()

    def scaled(self, factor: Floats) -> "InputStats":
        """Of the rows divided by `factor` [K]."""
        inverse = np.float32(1) / factor
        moments = self.moments
        if moments.size:
            moments = moments * inverse[:, None] * inverse[None, :]
        return InputStats(
            moments,
            self.sum_magnitude * inverse,
            self.largest * inverse,
            None,  # of single elements, which are gone
            self.num_rows,
        )
