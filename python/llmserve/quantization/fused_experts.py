"""Experts that a checkpoint has in one tensor "<module>.weight" [X, N, K]: taken apart, so that
each is a matrix like any other, and put together again where tensors are written.

Matrix e goes by the module's name "<module>.weight[e]", as the core calls it where it shows what
experts read.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from llmserve.quantization.tensor_files import RawTensor, TensorFolder

_SUFFIX = ".weight"
_PART = re.compile(r"(.*)\.weight\[(\d+)\](?:\.(\w+))?")


def take_apart(tensors: TensorFolder, experts: Mapping[str, Any]) -> None:
    """Of a layer's experts, as LayerRunner.layer_names has them, those that lie in one tensor.
    Tensors that are stored [X, K, N] stay."""
    if experts["is_transposed"]:
        return
    for key in ("gate_up", "gate", "up", "down"):
        name = experts[key]
        if name and "{}" not in name and name.endswith(_SUFFIX) and name in tensors:
            tensors.split(name, name + "[{}]" + _SUFFIX)


def stored_module(name: str) -> str:
    """The module that a matrix is stored in: the name itself where it is stored alone."""
    found = _PART.fullmatch(name)
    return name if found is None else found[1]


def put_together(tensors: Mapping[str, RawTensor]) -> dict[str, RawTensor]:
    """The tensors with those of matrices that were taken apart stacked along a new first
    dimension: codes, scales, zero points; the shapes become one, [X, N, K]."""
    out: dict[str, RawTensor] = {}
    stacks: dict[str, list[RawTensor]] = {}
    for name, tensor in tensors.items():
        found = _PART.fullmatch(name)
        if found is None:
            out[name] = tensor
        else:
            stacks.setdefault(f"{found[1]}.{found[3]}", []).append(tensor)
    for name, parts in stacks.items():
        if name.endswith(".weight_shape"):
            shape = np.array([len(parts), *parts[0].data], np.int64)
            out[name] = RawTensor(parts[0].dtype, shape.shape, shape)
        else:
            data = np.stack([part.data for part in parts])
            out[name] = RawTensor(parts[0].dtype, data.shape, data)
    return out
