"""What a run gives."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class QuantizeResult:
    """What quantize() did. Bytes are of the tensors; planned_bytes is what it said it would take in
    memory beside Python itself, peak_bytes what it took. errors are relative, by linear layer:
    |dW x|^2 / |W x|^2, or of the weights alone where no text was read."""

    out: Path
    scheme: str
    method: str
    bytes_before: int
    bytes_after: int
    bits_per_weight: float
    seconds: float
    planned_bytes: int
    peak_bytes: int
    num_tokens: int
    errors: Mapping[str, float]
    schemes: Mapping[str, str]
    notes: Sequence[str]
