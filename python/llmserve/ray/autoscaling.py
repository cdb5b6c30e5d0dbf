"""How many replicas there should be: by the work of prompts and the rows of decode, each by itself,
since either alone may be what is short."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from llmserve.errors import InvalidArgument
from llmserve.ray.config import spare

# Of the seats of a replica that may be taken before another one is due, and of prompts that wait.
_TARGET_SEATS = 0.8
_TARGET_WAITING = 0.25
_SPARE = 0.125  # 10 to 15%: who dies is stood in for while another one loads


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """What a replica says of itself (`record_autoscaling_stats`), all as shares of its seats."""

    decode_share: float  # sequences that run
    prefill_share: float  # requests that wait for their first step
    kv_share: float  # blocks of the KV cache that are in use


def desired_replicas(
    stats: Iterable[ReplicaStats],
    *,
    min_replicas: int,
    max_replicas: int,
    spare_share: float = _SPARE,
) -> int:
    """Replicas so that none of prefill, decode and memory is above its target, with some to spare.

    >>> busy = [ReplicaStats(0.8, 0.0, 0.5)] * 4
    >>> desired_replicas(busy, min_replicas=1, max_replicas=16)
    5
    """
    if not 0 < min_replicas <= max_replicas:
        raise InvalidArgument(f"replicas must be 0 < {min_replicas} <= {max_replicas}")
    rows = list(stats)
    decode = sum(row.decode_share for row in rows) / _TARGET_SEATS
    prefill = sum(row.prefill_share for row in rows) / _TARGET_WAITING
    memory = sum(row.kv_share for row in rows) / _TARGET_SEATS
    # What waits has to be run, too, and takes a seat then.
    needed = max(decode + sum(row.prefill_share for row in rows), prefill, memory)
    wanted = spare(needed, spare_share) if needed > 0 else min_replicas
    return min(max(wanted, min_replicas), max_replicas)


def scale(context: Any) -> tuple[int, Mapping[str, Any]]:
    """A policy for Ray Serve: `autoscaling_config={"policy": {"policy_function":
    "llmserve.ray.autoscaling:scale"}, ...}`."""
    metrics = context.aggregated_metrics or {}
    names = ("decode_share", "prefill_share", "kv_share")
    replicas = {replica for name in names for replica in metrics.get(name, {})}
    rows = [
        ReplicaStats(*(float(metrics.get(name, {}).get(replica, 0.0)) for name in names))
        for replica in replicas
    ]
    number = desired_replicas(
        rows,
        min_replicas=max(context.capacity_adjusted_min_replicas, 1),
        max_replicas=max(context.capacity_adjusted_max_replicas, 1),
    )
    return number, {}
