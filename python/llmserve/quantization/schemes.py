"""The schemes that a model can be quantized to: the one table of what --scheme can be."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from llmserve.common.arguments import describe
from llmserve.errors import InvalidArgument
from llmserve.quantization.grids import Grid

DAMP = 0.01  # GPTQ's, as its authors have it
NUM_SAMPLES = 128
MAX_LENGTH = 512
OBSERVERS = ("minmax", "percentile", "entropy", "mse")
PERCENTILE = 99.99
METHODS = ("auto", "rtn", "gptq", "awq", "smoothquant", "smoothquant+gptq")


@dataclass(frozen=True, slots=True)
class Activations:
    """How engines that can round activations to 8 bits: a scale a token, a group of 128 of one, or,
    static, one for the layer that calibration found."""

    kind: Literal["int", "fp8"]
    strategy: Literal["token", "group", "tensor"]
    is_static: bool = False


@dataclass(frozen=True, slots=True)
class Scheme:
    """What the linear layers become. `format` is how compressed-tensors calls their storage."""

    name: str
    summary: str
    grid: Grid
    format: str
    activations: Activations | None = None
    auto_method: str = "rtn"

    def with_group_size(self, group_size: int) -> "Scheme":
        """Integers in other groups. Raises InvalidArgument for a scheme that has its own."""
        if self.grid.kind != "int" or (self.activations and self.grid.group_size == 0):
            raise InvalidArgument(f"scheme {self.name} has groups of its own; pass no --group-size")
        if group_size != 0 and (group_size < 16 or group_size % 16):
            raise InvalidArgument(
                f"group_size must be 0 (a whole row) or a multiple of 16, got {group_size}"
            )
        return dataclasses.replace(self, grid=dataclasses.replace(self.grid, group_size=group_size))

    def with_static_activations(self) -> "Scheme":
        """One scale a layer instead of one a token. Raises InvalidArgument without any."""
        if self.activations is None or self.grid.is_block or self.grid.kind == "nvfp4":
            raise InvalidArgument(
                f"scheme {self.name} has no activations with a scale a token; static ones are of "
                f"w8a8, w4a8 and fp8"
            )
        static = dataclasses.replace(self.activations, strategy="tensor", is_static=True)
        return dataclasses.replace(self, activations=static)


_TOKEN = Activations("int", "token")
SCHEMES = (
    Scheme(
        "int4",
        "4-bit integers, a scale a group of 128",
        Grid("int", 4, 128),
        "pack-quantized",
        auto_method="gptq",
    ),
    Scheme(
        "int4-asym",
        "4-bit integers, a scale and a zero point a group of 128",
        Grid("int", 4, 128, is_symmetric=False),
        "pack-quantized",
        auto_method="gptq",
    ),
    Scheme(
        "int3",
        "3-bit integers, a scale a group of 128",
        Grid("int", 3, 128),
        "pack-quantized",
        auto_method="gptq",
    ),
    Scheme("int8", "8-bit integers, a scale a row", Grid("int", 8), "pack-quantized"),
    Scheme(
        "w8a8",
        "8-bit integers, a scale a row; activations too, a scale a token",
        Grid("int", 8),
        "int-quantized",
        _TOKEN,
        "smoothquant+gptq",
    ),
    Scheme(
        "w4a8",
        "4-bit integers a byte, a scale a group of 128; 8-bit activations, a scale a token",
        Grid("int", 4, 128),
        "int-quantized",
        _TOKEN,
        "gptq",
    ),
    Scheme(
        "fp8",
        "E4M3, a scale a row; activations too, a scale a token",
        Grid("fp8", 8),
        "float-quantized",
        Activations("fp8", "token"),
    ),
    Scheme(
        "fp8-block",
        "E4M3, a scale a block of 128 x 128; activations too, a scale a group of 128",
        Grid("fp8", 8, 128, is_block=True),
        "float-quantized",
        Activations("fp8", "group"),
    ),
    Scheme(
        "nvfp4",
        "E2M1, an E4M3 scale a group of 16 and one of the tensor",
        Grid("nvfp4", 4, 16),
        "nvfp4-pack-quantized",
    ),
    Scheme(
        "mxfp4",
        "E2M1, a power of two a group of 32",
        Grid("mxfp4", 4, 32),
        "mxfp4-pack-quantized",
    ),
)
_ALIASES = {
    "w4a16": "int4",
    "w4a16-asym": "int4-asym",
    "w3a16": "int3",
    "w8a16": "int8",
    "fp8-dynamic": "fp8",
    "nvfp4a16": "nvfp4",
    "mxfp4a16": "mxfp4",
}


def find_scheme(name: object) -> Scheme:
    """By its name or an alias, in any case, with - or _. Raises InvalidArgument with the names."""
    known = {scheme.name: scheme for scheme in SCHEMES}
    key = name.lower().replace("_", "-") if isinstance(name, str) else None
    scheme = known.get(_ALIASES.get(key or "", key or ""))
    if scheme is None:
        raise InvalidArgument(
            f"scheme must be one of {', '.join(known)} or gguf:TYPE, got {describe(name)}"
        )
    return scheme


def resolve_method(method: object, scheme: Scheme, *, has_text: bool) -> str:
    """The method that "auto" stands for, or the one given. Raises InvalidArgument for one that the
    scheme or the lack of a text rules out."""
    if method not in METHODS:
        raise InvalidArgument(f"method must be one of {', '.join(METHODS)}, got {describe(method)}")
    if method == "auto":
        if not has_text and scheme.auto_method != "rtn":
            raise InvalidArgument(
                f"scheme {scheme.name} loses far less by {scheme.auto_method}, which reads a text "
                f"of the model's use: pass --calibration FILE (text, or JSONL with text, messages "
                f"or prompt and completion), or --method rtn, which needs none"
            )
        return scheme.auto_method
    if method != "rtn" and not has_text:
        raise InvalidArgument(
            f"method {method} calibrates and needs a text of the model's use: pass "
            f"--calibration FILE (text, or JSONL with text, messages or prompt and completion), or "
            f"--method rtn, which needs none"
        )
    if "smoothquant" in str(method) and scheme.activations is None:
        raise InvalidArgument(
            f"smoothquant is for schemes that round activations (w8a8, w4a8, fp8), and "
            f"{scheme.name} does not; use gptq or awq"
        )
    return str(method)
