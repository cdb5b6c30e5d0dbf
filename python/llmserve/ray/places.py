"""Chooses replicas for Ray Serve by cached prefixes and load: a RequestRouter on the core's Router.

It lives in the process of a front, which tells it when an answer has begun and ended. Ray is given
a class of another module: see request_router.py."""

import threading
from dataclasses import dataclass, field
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from llmserve import _core
from llmserve.ray.standby import Standby
from llmserve.route.prompts import PromptBlocks

_UNKNOWN = PromptBlocks(b"", 0, 0)


@dataclass(slots=True, eq=False)
class RayPlace:
    """A request on its way: what the router reads, and what it has reserved."""

    prompt: PromptBlocks = _UNKNOWN
    tenant: str = ""
    failed: tuple[str, ...] = ()
    replica: str = ""  # that got it
    wanted: str = ""  # where it has its place already
    num_cached_tokens: int = 0  # of its prompt, that this one is thought to hold
    _routes: list[tuple[_core.Router, int]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def reserve(self, router: _core.Router, route_id: int) -> None:
        """In the place of what it had."""
        self.finish()
        with self._lock:
            self._routes.append((router, route_id))

    def grew(self, num_tokens: int) -> None:
        """So many tokens have come."""
        for router, route_id in self._routes:
            router.started(route_id)
            router.grew(route_id, num_tokens)

    def finish(self) -> None:
        """It has ended, or goes elsewhere."""
        self.wanted = ""
        with self._lock:
            routes, self._routes = self._routes, []
        for router, route_id in routes:
            router.finish(route_id)

    def __reduce__(self) -> tuple[Any, ...]:
        """To a replica nothing of it goes."""
        return RayPlace, ()


# Of this process, by deployment.
_routers: dict[Any, "PlaceRouter"] = {}


def router_of(handle: Any) -> "PlaceRouter | None":
    """Of a deployment's handle; None until the first request has gone that way."""
    return _routers.get(handle.deployment_id)


class PlaceRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Of one deployment, in one process."""

    def initialize_state(
        self,
        policy: str = "prefix",
        block_size: int = 16,
        assumed_blocks: int = 4096,
        num_serving: int = 0,
    ) -> None:
        """From request_router_kwargs. num_serving: see Standby."""
        self._standby = Standby(num_serving)
        _routers[self._deployment_id] = self
        config = _core.RouterConfig(policy=policy, block_size=block_size)
        self._core_router = _core.Router(config)
        self._assumed_blocks = assumed_blocks
        self._numbers: dict[ReplicaID, int] = {}
        self._told: set[int] = set()  # whether they serve
        self._changing = threading.Lock()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """See RequestRouter."""
        super().update_replicas(replicas)
        with self._changing:
            self._take(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """See RequestRouter."""
        super().on_replica_actor_died(replica_id)
        with self._changing:
            if (number := self._numbers.pop(replica_id, None)) is not None:
                self._core_router.remove_replica(number)
            self._set_ready()

    @property
    def num_replicas(self) -> int:
        """That are known to run."""
        return len(self._replicas)

    def replica_metadata(self) -> list[dict[str, Any]]:
        """What each has said of itself."""
        return [replica.replica_metadata for replica in list(self._replicas.values())]

    def reserve(self, place: RayPlace) -> None:
        """A place for a request that is about to be sent. Without one it is chosen on the way."""
        with self._changing:
            self._take(list(self._replicas.values()))
            by_number = {number: one.unique_id for one, number in self._numbers.items()}
        out = [number for number, name in by_number.items() if name in place.failed]
        if (route := self._choose(place, out)) is not None:
            place.reserve(self._core_router, route.id)
            place.num_cached_tokens = route.num_cached_tokens
            place.wanted = by_number[route.replica]

    def _choose(self, place: RayPlace, excluded: list[int]) -> Any:
        return self._core_router.choose(
            place.prompt.hashes,
            place.prompt.num_tokens,
            max_new_tokens=place.prompt.max_new_tokens,
            tenant=place.tenant,
            excluded=sorted(set(excluded)),
        )

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """See RequestRouter: the one that costs least, then all others."""
        place = None if pending_request is None else _place_of(pending_request)
        with self._changing:
            self._take(list(self._replicas.values()))
            by_number = {
                self._numbers[replica.replica_id]: replica
                for replica in candidate_replicas
                if replica.replica_id in self._numbers
            }
            out = [number for number in self._numbers.values() if number not in by_number]
        if place is None:
            return [candidate_replicas]
        wanted, place.wanted = place.wanted, ""  # once: it may be full
        if (held := [one for one in candidate_replicas if name_of(one) == wanted]) != []:
            return _first(held[0], candidate_replicas)
        out += [n for n, replica in by_number.items() if name_of(replica) in place.failed]
        if (route := self._choose(place, out)) is None:
            return [candidate_replicas]
        place.reserve(self._core_router, route.id)
        return _first(by_number[route.replica], candidate_replicas)

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """See RequestRouter."""
        if (place := _place_of(pending_request)) is not None:
            place.replica = replica_id.unique_id

    def _take(self, replicas: list[RunningReplica]) -> None:
        here = {replica.replica_id for replica in replicas}
        for replica_id in [one for one in self._numbers if one not in here]:
            self._core_router.remove_replica(self._numbers.pop(replica_id))
        for replica_id in here - self._numbers.keys():
            self._numbers[replica_id] = self._core_router.add_replica(
                replica_id.unique_id, assumed_blocks=self._assumed_blocks
            )
        self._set_ready()

    def _set_ready(self) -> None:
        """Those that stand by get nothing while others serve."""
        by_name = {one.unique_id: number for one, number in self._numbers.items()}
        before = set(self._standby.serving)
        self._standby.update(by_name)
        loads = {load.name: load.num_requests for load in self._core_router.loads()}
        seats = [int(told.get("max_num_seqs", 0)) for told in self.replica_metadata()]
        self._standby.balance(loads, max(seats, default=0))
        serving = set(self._standby.serving)
        for name, number in by_name.items():
            if (name in serving) != (name in before) or number not in self._told:
                self._core_router.set_ready(number, name in serving)
        self._told = set(by_name.values())


def name_of(replica: RunningReplica) -> str:
    """By which a place knows it."""
    return str(replica.replica_id.unique_id)


def _first(chosen: RunningReplica, candidates: list[RunningReplica]) -> list[list[RunningReplica]]:
    """In ranks, as choose_replicas gives them: this one before all others."""
    others = [replica for replica in candidates if replica is not chosen]
    return [[chosen], others] if others else [[chosen]]


def _place_of(request: PendingRequest) -> RayPlace | None:
    places = (item for item in (*request.args, *request.kwargs.values()))
    return next((item for item in places if isinstance(item, RayPlace)), None)
