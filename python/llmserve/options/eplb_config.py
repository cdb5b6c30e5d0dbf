"""LLM(eplb_config={...}): vLLM's keys, and one of our own, as the engine takes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmserve.common.arguments import (
    boolean,
    integer,
    number,
    refuse_unknown,
    refuse_unless_default,
)
from llmserve.errors import InvalidArgument, NotSupported

_NAME = "eplb_config"
# Of vLLM's keys those that do nothing here: what they may be, and why.
_NOT_HERE: Mapping[str, tuple[tuple[object, ...], str]] = {
    "log_balancedness": (
        (False, None),
        "the rows of each rank are llmserve:expert_rank_rows_total of /metrics, and "
        "LLM.expert_rank_rows()",
    ),
    "log_balancedness_interval": ((1, None), "nothing is logged"),
    "use_async": ((True, False, None), ""),  # nothing is copied: ranks read each other's weights
    "policy": (("default", None), "experts are packed greedily"),
    "communicator": ((None,), "ranks read each other's weights"),
}
_KEYS = ("window_size", "step_interval", "num_redundant_experts", "capacity_factor")


@dataclass(frozen=True, slots=True)
class ExpertBalance:
    """How experts that stand whole on ranks are kept balanced."""

    window_size: int = 1000  # steps whose loads count, the last ones before experts are placed anew
    step_interval: int = 3000  # steps from one placement to the next; 0: experts stay
    num_redundant_experts: int = 0  # copies beside the first of each
    capacity_factor: float = 1.25  # room of a copy in a step, by even shares; 0: no bound


def refuse_on_device(device: str, config: object) -> None:
    """Raises NotSupported where `config`, which was read, has what GPUs cannot do."""
    factor = config.get("capacity_factor") if isinstance(config, Mapping) else None
    if device == "cuda" and factor is not None:
        raise NotSupported(
            f"{_NAME}: capacity_factor on device 'cuda': rows run where their expert is, and no "
            "other GPU stands in; leave it out"
        )


def read_expert_balance(
    enable_eplb: object,
    config: object,
    has_whole_experts: bool,
    num_nodes: int = 1,
    cut: str = "columns",
) -> ExpertBalance | None:
    """None: experts stay where their weights are. has_whole_experts: on ranks, each on one.

    Raises InvalidArgument and NotSupported, naming the key.
    """
    is_enabled = boolean("enable_eplb", enable_eplb)
    if is_enabled and not has_whole_experts:
        raise InvalidArgument(
            "enable_eplb: no experts stand whole on ranks; it needs enable_expert_parallel=True "
            "and a tensor_parallel_size above 1"
        )
    if is_enabled and num_nodes > 1:
        raise NotSupported(
            f"enable_eplb with nnodes={num_nodes}: an expert that moves is read from another "
            "rank's memory; use nnodes=1"
        )
    if is_enabled and cut == "rows":
        raise NotSupported(
            "enable_eplb with tensor_parallel_cut='rows': what a token's experts give is added up "
            "by the ranks that run them, and tokens may not depend on where that is; use "
            "tensor_parallel_cut='columns' or 'tree'"
        )
    if config is None:
        return ExpertBalance() if is_enabled else None
    if not isinstance(config, Mapping):
        raise InvalidArgument(f"{_NAME}: expected a dict, got {config!r}")
    if not is_enabled:
        raise InvalidArgument(f"{_NAME} takes effect with enable_eplb=True; set it, or leave both")
    refuse_unknown(_NAME, config, (*_KEYS, *_NOT_HERE))
    for key, (values, reason) in _NOT_HERE.items():
        if key in config:
            refuse_unless_default(_NAME, key, config[key], *values, reason=reason)
    given = {key: config[key] for key in _KEYS if config.get(key) is not None}
    plain = ExpertBalance()
    factor = plain.capacity_factor
    if "capacity_factor" in config:
        factor = number(f"{_NAME}: capacity_factor", config["capacity_factor"] or 0.0)
    interval = integer(f"{_NAME}: step_interval", given.get("step_interval", 3000), 0)
    window = given.get("window_size", min(plain.window_size, interval) or plain.window_size)
    return ExpertBalance(
        integer(f"{_NAME}: window_size", window, 1),
        interval,
        integer(f"{_NAME}: num_redundant_experts", given.get("num_redundant_experts", 0), 0),
        factor,
    )
