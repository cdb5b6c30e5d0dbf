"""The arguments of quantize(), checked."""

import dataclasses
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from llmserve.common.arguments import describe, integer
from llmserve.errors import InvalidArgument
from llmserve.quantization.schemes import (
    DAMP,
    MAX_LENGTH,
    NUM_SAMPLES,
    OBSERVERS,
    PERCENTILE,
    Scheme,
)

KV_CACHES = ("auto", "fp8")
ACTIVATIONS = ("dynamic", "static")


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """See llmserve.quantization. Raises InvalidArgument that names the field and the value."""

    scheme: str = "int4"
    method: str = "auto"
    calibration: str | os.PathLike[str] | None = None
    num_samples: int = NUM_SAMPLES
    max_length: int = MAX_LENGTH
    ignore: Sequence[str] = ("lm_head",)
    group_size: int | None = None
    kv_cache: str = "auto"
    activations: str = "dynamic"
    observer: str = "percentile"
    percentile: float = PERCENTILE
    alpha: float = 0.8
    damp: float = DAMP
    act_order: bool = True
    target_bits: float | None = None
    target_size: int | None = None
    num_threads: int | None = None
    seed: int = 0
    report: bool = True
    eval_text: str | os.PathLike[str] | None = None
    resume: bool = True
    overwrite: bool = False

    def __post_init__(self) -> None:
        integer("num_samples", self.num_samples, 1)
        integer("max_length", self.max_length, 8)
        for name, allowed in (
            ("kv_cache", KV_CACHES),
            ("activations", ACTIVATIONS),
            ("observer", OBSERVERS),
        ):
            if getattr(self, name) not in allowed:
                raise InvalidArgument(
                    f"{name} must be one of {', '.join(allowed)}, got "
                    f"{describe(getattr(self, name))}"
                )
        for name, low, high in (("alpha", 0, 1), ("damp", 0, 1), ("percentile", 50, 100)):
            value = getattr(self, name)
            if not isinstance(value, float | int) or not low <= value <= high:
                raise InvalidArgument(f"{name} must be {low} to {high}, got {describe(value)}")
        if self.target_bits is not None and self.target_size is not None:
            raise InvalidArgument("target_bits and target_size say the same; pass one of them")
        if self.target_size is not None:
            integer("target_size", self.target_size, 1)
        bits = self.target_bits
        if bits is not None and (not isinstance(bits, float | int) or not 1 <= bits <= 16):
            raise InvalidArgument(f"target_bits must be 1 to 16, got {describe(bits)}")
        if self.num_threads is not None:
            integer("num_threads", self.num_threads, 1)
        if isinstance(self.ignore, str) or not all(isinstance(x, str) for x in self.ignore):
            raise InvalidArgument(f"ignore must be a list of names, got {describe(self.ignore)}")
        measured = self.eval_text
        has_both = self.calibration is not None and measured is not None
        if has_both and os.path.realpath(str(self.calibration)) == os.path.realpath(str(measured)):
            raise InvalidArgument(
                f"eval_text is the text that calibrates, {describe(str(measured))}: it would "
                f"hide what other texts lose; pass another"
            )
        for pattern in self.ignore:
            try:
                re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
            except re.error as error:
                raise InvalidArgument(
                    f"ignore: {describe(pattern)} is no regular expression: {error}"
                ) from None

    @property
    def has_static_activations(self) -> bool:
        """Whether activations get one scale a layer."""
        return self.activations == "static"

    @property
    def has_target(self) -> bool:
        """Whether layers get bits by what they need."""
        return self.target_bits is not None or self.target_size is not None

    def needs_activations(self, scheme: Scheme) -> bool:
        """Whether a text has to be read whatever the method."""
        return (
            self.has_target
            or self.kv_cache == "fp8"
            or (self.has_static_activations and scheme.activations is not None)
        )

    def apply_to(self, scheme: Scheme) -> Scheme:
        """The scheme with what the options change of it. Raises InvalidArgument."""
        if self.group_size is not None:
            scheme = scheme.with_group_size(integer("group_size", self.group_size, 0))
        return scheme.with_static_activations() if self.has_static_activations else scheme

    def threads(self) -> int:
        """How many compute: all that the process may use, unless said."""
        return self.num_threads or len(os.sched_getaffinity(0))

    def key(self) -> dict[str, object]:
        """What the bytes of the result depend on."""
        fields = dataclasses.asdict(self)
        for name in ("num_threads", "resume", "overwrite", "report", "eval_text"):
            del fields[name]
        return fields
