"""vLLM's flags of servers that run some of a model's replicas each, and leave it to a balancer who
gets a request: what a server here does by itself."""

import logging
from collections.abc import Mapping
from typing import Any

from llmserve.common.arguments import describe
from llmserve.common.vllm_arguments import refuse_what_is_not_here
from llmserve.errors import InvalidArgument

_log = logging.getLogger(__name__)

_HYBRID, _EXTERNAL = "data_parallel_hybrid_lb", "data_parallel_external_lb"
# Of who runs all replicas together, which here nobody does: replicas of two servers exchange
# nothing.
_WHERE = ("data_parallel_address", "data_parallel_rpc_port", "data_parallel_start_rank")
_OWN = ("data_parallel_size_local", "data_parallel_rank")
NAMES = frozenset((_HYBRID, _EXTERNAL, *_WHERE, *_OWN))


def with_own_replicas(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with data_parallel_size as this server's share, where `data_parallel_hybrid_lb` (as
    many as data_parallel_size_local) or `data_parallel_external_lb` (one) says that it has one;
    otherwise without these names. Raises NotSupported for one of them that says something else, and
    InvalidArgument for a share that there is not.

    >>> with_own_replicas({"data_parallel_size": 4, "data_parallel_external_lb": True})
    {'data_parallel_size': 1}
    """
    is_external = bool(given.get(_EXTERNAL))
    settings = {name: value for name, value in given.items() if name not in NAMES}
    if not is_external and not given.get(_HYBRID):
        for name in sorted(given.keys() & NAMES):
            refuse_what_is_not_here("serve", name, given[name])
        return settings
    size = given.get("data_parallel_size", 1)
    own = 1 if is_external else given.get("data_parallel_size_local")
    own = size if own is None else own
    for name, value in (("data_parallel_size", size), ("data_parallel_size_local", own)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidArgument(f"{name} must be a number of at least 1, got {describe(value)}")
    if own > size:
        raise InvalidArgument(
            f"data_parallel_size_local={own} is more than data_parallel_size={size}"
        )
    _log.info(
        "%d of %d replicas run here, by themselves; `llmserve route` before the servers says who "
        "gets a request",
        *(own, size),
    )
    return {**settings, "data_parallel_size": own}
