"""Which linear layers a decoder layer has, which of them read the same activations, and into what
factors of these can be folded."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llmserve.quantization.number_formats import Floats, rounded

Tensors = dict[str, Floats]


@dataclass(frozen=True, slots=True)
class NormSource:
    """A norm whose weight, plus `offset`, multiplies what the linear layers read."""

    name: str
    offset: float
    has_bias: bool


@dataclass(frozen=True, slots=True)
class LinearSource:
    """A linear layer whose outputs [begin, begin + K) are what the next one reads, elementwise
    times something at most."""

    name: str
    begin: int = 0


@dataclass(frozen=True, slots=True)
class LinearGroup:
    """Linear layers, by their names without ".weight", that read the same x, and what makes it; of
    an expert, its number."""

    role: str
    names: tuple[str, ...]
    source: NormSource | LinearSource | None = None
    expert: int | None = None

    @property
    def weights(self) -> tuple[str, ...]:
        """The tensors' names."""
        return tuple(f"{name}.weight" for name in self.names)


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """A layer's linear layers. `others` are matrices of other kinds of layers, each of which reads
    inputs of its own. experts: how many it has, and how many each token is given."""

    index: int
    prefix: str
    groups: tuple[LinearGroup, ...]
    others: tuple[str, ...] = ()
    kept: tuple[str, ...] = field(default=())  # matrices that stay floats
    num_experts: int = 0
    top_k: int = 0

    @property
    def shared_groups(self) -> tuple[LinearGroup, ...]:
        """Those that every token goes through."""
        return tuple(group for group in self.groups if group.expert is None)

    @property
    def expert_groups(self) -> tuple[LinearGroup, ...]:
        """The experts', one after another."""
        return tuple(group for group in self.groups if group.expert is not None)

    def names(self) -> tuple[str, ...]:
        """Of all that can be quantized, without ".weight"."""
        return tuple(name for group in self.groups for name in group.names) + self.others


# Matrices that choose or mix rather than compute, which everybody leaves as floats.
_KEPT = (".gate", ".router", ".shared_expert_gate", ".conv1d")


def plan_layer(
    index: int, known: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> LayerPlan:
    """From what the core says of a layer (LayerRunner.layer_names) and the checkpoint's shapes."""
    prefix = str(known["prefix"])

    def present(*keys: str) -> tuple[str, ...]:
        names = [known[key] for key in keys if known[key]]
        return tuple(name for name in names if f"{name}.weight" in shapes)

    groups = []
    qkv = present("qkv", "q", "k", "v")
    if qkv:
        groups.append(LinearGroup("qkv", qkv, _norm(known, "attention_norm", shapes)))
    output = present("attention_output")
    if output:
        groups.append(LinearGroup("o", output, _values(known, shapes)))
    up = present("gate_up", "gate", "up")
    if up:
        groups.append(LinearGroup("up", up, _norm(known, "mlp_norm", shapes)))
    down = present("down")
    if down:
        groups.append(LinearGroup("down", down, _up(known, shapes)))
    experts = known["experts"]
    if experts:
        groups += _shared_expert(experts, shapes)
        groups += _experts(experts, shapes)
    seen = {weight for group in groups for weight in group.weights}
    matrices = [
        name.removesuffix(".weight")
        for name, shape in shapes.items()
        if name.startswith(prefix)
        and name.endswith(".weight")
        and len(shape) == 2
        and name not in seen
    ]
    chooses = () if not experts else (experts["router"], experts["shared_weight"])
    kept = tuple(name for name in matrices if name.endswith(_KEPT) or name in chooses)
    others = tuple(name for name in matrices if name not in kept)
    counts = (experts["num_experts"], experts["top_k"]) if experts else (0, 0)
    return LayerPlan(index, prefix, tuple(groups), others, kept, *counts)


def _shared_expert(
    experts: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> list[LinearGroup]:
    """Of the expert that all tokens have. What it reads the router and the others read, too: no
    factor can be folded there."""
    names = {key: experts[f"shared_{key}"] for key in ("gate_up", "gate", "up", "down")}
    return _gated(names, shapes, "shared_")


def _experts(
    experts: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> list[LinearGroup]:
    groups: list[LinearGroup] = []
    keys = ("gate_up", "gate", "up", "down")
    for expert in range(experts["num_experts"]):
        names = {key: expert_name(experts[key], expert) for key in keys}
        # gpt-oss's clamp of what the gate multiplies lets no factor through.
        is_plain = not experts["is_interleaved"]
        groups += _gated(names, shapes, f"experts.{expert}.", expert, is_plain=is_plain)
    return groups


def expert_name(pattern: str | None, expert: int) -> str | None:
    """A module's name of one expert. Of a tensor of all, what the core calls it: "<tensor>[e]"."""
    if not pattern:
        return None
    if "{}" in pattern:
        return pattern.replace("{}", str(expert))
    return f"{pattern}[{expert}]"


def _gated(
    names: Mapping[str, str | None],
    shapes: Mapping[str, tuple[int, ...]],
    role: str,
    expert: int | None = None,
    *,
    is_plain: bool = True,
) -> list[LinearGroup]:
    """Of down(activation(gate(x)) * up(x)): what reads x, and what reads the product."""
    known = {key: name for key, name in names.items() if name and f"{name}.weight" in shapes}
    reading = tuple(known[key] for key in ("gate_up", "gate", "up") if key in known)
    groups = []
    if reading:
        groups.append(LinearGroup(f"{role}up", reading, None, expert))
    if "down" in known:
        source = None
        if is_plain and "up" in known:
            source = LinearSource(known["up"])
        elif is_plain and "gate_up" in known:
            rows = shapes[f"{known['gate_up']}.weight"][0]
            source = LinearSource(known["gate_up"], rows // 2)
        groups.append(LinearGroup(f"{role}down", (known["down"],), source, expert))
    return groups


def _norm(
    known: Mapping[str, Any], key: str, shapes: Mapping[str, tuple[int, ...]]
) -> NormSource | None:
    name = known[key]
    if not name or known["is_parallel"] or not known["norm_has_weight"]:
        return None  # of a parallel block, attention and MLP read the same norm
    if f"{name}.weight" not in shapes:
        return None
    return NormSource(name, float(known["norm_weight_offset"]), bool(known["norm_has_bias"]))


def _values(known: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> LinearSource | None:
    """A head's values reach the output projection weighted by position alone: a factor a channel
    can move there, unless several query heads share it."""
    if not known["v"] or known["num_heads"] != known["num_kv_heads"]:
        return None
    return LinearSource(known["v"]) if f"{known['v']}.weight" in shapes else None


def _up(known: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> LinearSource | None:
    """Beside a gate, what `up` makes is only multiplied; without, an activation stands between."""
    if not known["has_gated_activation"]:
        return None
    if known["gate_up"]:
        shape = shapes.get(f"{known['gate_up']}.weight")
        return LinearSource(known["gate_up"], shape[0] // 2) if shape else None
    return LinearSource(known["up"]) if f"{known['up']}.weight" in shapes else None


def fold(
    group: LinearGroup, factor: Floats, tensors: Tensors, dtypes: Mapping[str, str]
) -> Floats | None:
    """Divides what the group reads by `factor` [K] at its source, and multiplies its weights in
    place. A norm's weight is stored as `dtypes` says, so that the factor becomes what its rounded
    weight is divided by: the model's function stays. Returns the factor; None if there is no
    source."""
    source = group.source
    if source is None:
        return None
    if isinstance(source, NormSource):
        factor = _divide_norm(source, factor, tensors, dtypes)
    else:
        end = source.begin + factor.size
        tensors[f"{source.name}.weight"][source.begin : end] /= factor[:, None]
        bias = tensors.get(f"{source.name}.bias")
        if bias is not None:
            bias[source.begin : end] /= factor
    for weight in group.weights:
        tensors[weight] *= factor
    return factor


def _divide_norm(
    source: NormSource, factor: Floats, tensors: Tensors, dtypes: Mapping[str, str]
) -> Floats:
    name = f"{source.name}.weight"
    offset = np.float32(source.offset)
    old = tensors[name]
    new = rounded((old + offset) / factor - offset, dtypes[name])
    is_usable = ((old + offset) != 0) & ((new + offset) != 0)
    new = np.where(is_usable, new, old)
    actual = np.where(is_usable, (old + offset) / np.where(is_usable, new + offset, 1), 1)
    tensors[name] = new.astype(np.float32)
    if source.has_bias and f"{source.name}.bias" in tensors:
        bias = f"{source.name}.bias"
        tensors[bias] = rounded(tensors[bias] / actual, dtypes[bias])
    return actual.astype(np.float32)
