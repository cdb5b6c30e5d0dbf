"""A model on several nodes of a Ray cluster: a replica is node 0, an actor of its own each other.

A replica has a placement group, a bundle a node and each on a machine of its own (STRICT_SPREAD).
It chooses where the others find it, and a key that only they get. They load their part and compute
for it. One that dies is started again by Ray, where the group's bundle is then, and joins anew;
until then the replica's requests wait, and then go on with the same tokens. Whether a group is
whole is not asked of Ray, whose table may say so after a machine has died: an engine whose nodes
stay away fails, and its replica is replaced with its group.
"""

import secrets
import socket
import threading
from collections.abc import Mapping
from typing import Any

import ray
from ray.util import get_node_ip_address
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from llmserve.errors import InternalError


class Node:
    """A node other than the first."""

    def __init__(self, model: str, engine: Mapping[str, Any]) -> None:
        from llmserve.cli.follow import make_node

        self._node = make_node(model, engine)
        self._failure: BaseException | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self._node.run()
        except BaseException as error:
            self._failure = error

    def num_steps(self) -> int:
        """That it has computed. Raises what ended it."""
        if self._failure is not None:
            raise self._failure
        return int(self._node.num_steps)

    def stop(self) -> None:
        """Computes no more."""
        self._node.stop()


class Nodes:
    """Those of one replica, in the bundles of its placement group after the first."""

    def __init__(self, model: str, engine: Mapping[str, Any], num_cpus: float) -> None:
        """Starts them, and does not wait for them. engine: with nnodes. Raises InternalError where
        there is no placement group for them."""
        self.options: dict[str, Any] = {
            "cluster_key": secrets.token_hex(16),
            **engine,
            "node_rank": 0,
            "master_addr": get_node_ip_address(),
            "master_port": _free_port(),
        }
        group = get_current_placement_group()
        num_nodes = int(engine["nnodes"])
        if group is None or len(group.bundle_specs) < num_nodes:
            raise InternalError(f"nnodes={num_nodes} needs a placement group of as many bundles")
        self._actors = [
            ray.remote(Node)
            .options(
                num_cpus=num_cpus,
                max_restarts=-1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank),
            )
            .remote(model, {**self.options, "node_rank": rank})
            for rank in range(1, num_nodes)
        ]

    def close(self) -> None:
        """Ends them."""
        for actor in self._actors:
            ray.kill(actor)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])
