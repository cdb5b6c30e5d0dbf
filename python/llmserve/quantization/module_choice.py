"""Which linear layers of a model are quantized."""

import fnmatch
import re
from collections.abc import Sequence

from llmserve.errors import InvalidArgument
from llmserve.quantization.fused_experts import stored_module
from llmserve.quantization.layer_plan import LayerPlan
from llmserve.quantization.schemes import Scheme
from llmserve.quantization.tensor_files import TensorFolder

HEAD = "lm_head"


def is_ignored(name: str, patterns: Sequence[str]) -> bool:
    """Whether --ignore names a layer: by its name, the end of it, a pattern with *, or re:REGEX.
    Matrices that are stored in one tensor go by that of their module."""
    name = stored_module(name)
    for pattern in patterns:
        if pattern.startswith("re:"):
            if re.match(pattern[3:], name):
                return True
        elif name == pattern or fnmatch.fnmatch(name, pattern) or name.endswith("." + pattern):
            return True
    return False


def choose_modules(
    plans: Sequence[LayerPlan],
    tensors: TensorFolder,
    scheme: Scheme,
    ignore: Sequence[str],
    *,
    has_tied_head: bool,
) -> dict[str, Scheme]:
    """The scheme of each linear layer that is quantized, by name without ".weight". Raises
    InvalidArgument for a matrix that does not go in the scheme's groups, or where none is left."""
    names = [name for plan in plans for name in plan.names()]
    if f"{HEAD}.weight" in tensors and not has_tied_head:
        names.append(HEAD)
    chosen = [name for name in names if not is_ignored(name, ignore)]
    if not chosen:
        raise InvalidArgument("--ignore names every linear layer; nothing is left to quantize")
    for name in chosen:
        scheme.grid.check_fits(f"{name}.weight", tensors.shape(f"{name}.weight")[1])
    return dict.fromkeys(chosen, scheme)
