"""Where the processes that run one model find each other, and what only they know."""

import ipaddress
import os
import socket

from llmserve.common.arguments import describe, text
from llmserve.errors import InvalidArgument

KEY_VARIABLE = "LLMSERVE_CLUSTER_KEY"
_MIN_KEY = 16


def as_address(name: str, value: object) -> str:
    """An IP address, of a host's name as well. Raises InvalidArgument."""
    host = text(name, value)
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InvalidArgument(f"{name}: {describe(host)} has no address: {error}") from None
    return str(found[0][4][0])


def cluster_key(given: str | None, nnodes: int, address: str) -> str:
    """The key of the nodes, which may stand in LLMSERVE_CLUSTER_KEY; empty where all are on this
    machine and none is given. Raises InvalidArgument where other machines could join without."""
    key = given or os.environ.get(KEY_VARIABLE, "")
    if not key and not ipaddress.ip_address(address).is_loopback:
        raise InvalidArgument(
            f"nnodes={nnodes} at master_addr={address} needs a cluster_key, the same one on all "
            f"nodes; {KEY_VARIABLE} keeps it out of lists of processes"
        )
    if key and len(key) < _MIN_KEY:
        raise InvalidArgument(f"cluster_key needs at least {_MIN_KEY} characters")
    return key
