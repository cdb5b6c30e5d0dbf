"""The replicas of a router: which live, what they hold, and who gets the next request."""

import asyncio
import base64
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import msgspec

from llmserve import _core
from llmserve.route.prompts import PromptBlocks
from llmserve.route.settings import RouteSettings
from llmserve.route.upstream import Headers, ReplicaLost, Reply, Upstream

_log = logging.getLogger(__name__)

_MAX_INFO_BYTES = 2**20
_MAX_EVENTS_BYTES = 2**28
_EVENTS_WAIT_S = 10.0


@dataclass(slots=True, eq=False)
class Replica:
    """One server."""

    url: str
    upstream: Upstream
    number: int = -1  # in the core's router; -1: it is not there
    is_ready: bool = False
    is_draining: bool = False
    seen_at: float = 0.0  # when it last said that it lives
    epoch: str = ""
    models: list[dict[str, Any]] = field(default_factory=list)
    tells_blocks: bool = False
    role: str = "both"  # prefill: prompts whose answers others give; decode: those answers
    hands_over: bool = False
    lives: int = 0  # how often it was found to live again
    replies: set[Reply] = field(default_factory=set)  # that are being read

    def numerics_class(self, model: object) -> str:
        """Of a model by a name that requests give; empty if it does not say."""
        return str(self._told(model).get("numerics_class", ""))

    def served_name(self, model: object) -> str:
        """Of the model that a request's name means there; empty if none is known."""
        names = self._told(model).get("names") or [""]
        return str(names[0])

    def _told(self, model: object) -> dict[str, Any]:
        plain = model.removesuffix(":latest") if isinstance(model, str) else None  # Ollama's tag
        for told in self.models:
            if model is None or model in told.get("names", ()) or plain in told.get("names", ()):
                return told
        return self.models[0] if len(self.models) == 1 else {}  # which answers, or refuses


@dataclass(slots=True, eq=False)
class Place:
    """A request's place at a replica."""

    replica: Replica
    id: int
    fleet: "Fleet"
    num_cached_tokens: int = 0  # of its prompt, that the replica is thought to hold
    _has_started: bool = False

    @property
    def name(self) -> str:
        """The replica's, for logs and metrics."""
        return self.replica.url

    def numerics_class(self, model: object) -> str:
        """See Replica."""
        return self.replica.numerics_class(model)

    @contextmanager
    def reading(self, reply: Reply) -> Iterator[None]:
        """Within it the reply is cut when its replica is lost."""
        self.replica.replies.add(reply)
        try:
            yield
        finally:
            self.replica.replies.discard(reply)

    def note_life(self) -> None:
        """Something has come from there."""
        self.replica.seen_at = time.monotonic()

    async def check(self) -> None:
        """See Fleet."""
        await self.fleet.check(self.replica)

    def grew(self, num_tokens: int) -> None:
        """So many tokens have come."""
        if num_tokens <= 0:
            return
        if not self._has_started:
            self._has_started = True
            self.fleet.router.started(self.id)
        self.fleet.router.grew(self.id, num_tokens)


class Fleet:
    """All replicas. Used on one event loop."""

    def __init__(
        self, urls: Sequence[str], settings: RouteSettings, block_size: int, has_tokens: bool
    ) -> None:
        """has_tokens: prompts are split into the replicas' own blocks. Raises InvalidArgument."""
        self._settings = settings
        self._has_tokens = has_tokens
        config = _core.RouterConfig(policy=settings.policy, block_size=block_size)
        self.router = _core.Router(config)
        self.replicas = [Replica(url, Upstream(url, settings.connect_timeout)) for url in urls]
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Looks at each of them once, and then again and again."""
        await asyncio.gather(*(self._look(replica) for replica in self.replicas))
        self._tasks = [asyncio.create_task(self._watch(replica)) for replica in self.replicas]
        if self._has_tokens and self._settings.replica_admin_key:
            self._tasks += [asyncio.create_task(self._listen(replica)) for replica in self.replicas]
        if len(self.classes) > 1:
            _log.warning(
                "the replicas are of %d numerics classes: a stream goes on within its own alone",
                len(self.classes),
            )

    async def close(self) -> None:
        """Looks no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for replica in self.replicas:
            replica.upstream.close()

    @property
    def num_ready(self) -> int:
        """Those that take requests."""
        return sum(replica.is_ready for replica in self.replicas)

    def has_ready(self, *roles: str) -> bool:
        """Whether one that has one of these roles takes requests."""
        return any(replica.is_ready and replica.role in roles for replica in self.replicas)

    @property
    def classes(self) -> set[str]:
        """The numerics classes of those that live."""
        return {replica.numerics_class(None) for replica in self.replicas if replica.models}

    def headers(self, key: str, headers: Headers = ()) -> Headers:  # type: ignore[assignment]
        """With a key of the router's own."""
        own = [(b"authorization", b"Bearer " + key.encode())] if key else []
        return [*own, *headers]

    @contextmanager
    def placed(
        self,
        prompt: PromptBlocks,
        tenant: str,
        excluded: Sequence[str],
        needed_class: str | None = None,
        model: object = None,
        roles: Sequence[str] = (),
    ) -> Iterator[Place | None]:
        """Within it a request has its place at the replica that costs least; None: none is there.
        needed_class: of the replicas of this numerics class. roles: of those that have one of
        them; none: of all."""
        out = [
            replica.number
            for replica in self.replicas
            if replica.number >= 0
            and (
                replica.url in excluded
                or (needed_class is not None and replica.numerics_class(model) != needed_class)
                or (roles and replica.role not in roles)
            )
        ]
        route = self.router.choose(
            prompt.hashes,
            prompt.num_tokens,
            max_new_tokens=prompt.max_new_tokens,
            tenant=tenant,
            excluded=out,
        )
        if route is None:
            yield None
            return
        replica = next(one for one in self.replicas if one.number == route.replica)
        try:
            yield Place(replica, route.id, self, num_cached_tokens=route.num_cached_tokens)
        finally:
            self.router.finish(route.id)

    def lose(self, replica: Replica, why: str) -> None:
        """It does not answer: nothing is sent there until it is found to live."""
        if replica.number < 0:
            return
        _log.warning("replica %s is lost: %s", replica.url, why)
        self.router.remove_replica(replica.number)
        replica.number = -1
        replica.is_ready = replica.tells_blocks = False
        replica.epoch = ""
        replica.upstream.close()
        for reply in list(replica.replies):  # whose readers go elsewhere
            reply.close()

    async def check(self, replica: Replica) -> None:
        """A request has failed there: one connection may break, and the replica live on."""
        if replica.number >= 0:
            await self._look(replica)

    async def _watch(self, replica: Replica) -> None:
        while True:
            await asyncio.sleep(self._settings.health_interval)
            try:
                await self._look(replica)
            except Exception:
                _log.exception("a look at %s failed", replica.url)

    async def _look(self, replica: Replica) -> None:
        timeout = self._settings.health_timeout
        try:
            status, _ = await asyncio.wait_for(self._get(replica, "/ready", ""), timeout)
        except ReplicaLost as error:
            self.lose(replica, str(error))
            return
        except asyncio.TimeoutError:
            if time.monotonic() - replica.seen_at >= timeout:  # nor has a stream moved
                self.lose(replica, f"no sign of life for {timeout} s")
            return
        replica.seen_at = time.monotonic()
        is_ready = status == 200
        if replica.number < 0 and is_ready:
            await self._begin(replica)
        if replica.number >= 0 and replica.is_ready != is_ready:
            self.router.set_ready(replica.number, is_ready)
            replica.is_ready = is_ready
            _log.info("replica %s is %s", replica.url, "ready" if is_ready else "not ready")

    async def _begin(self, replica: Replica) -> None:
        key = self._settings.replica_key or self._settings.replica_admin_key
        told: object = {}
        with suppress(ReplicaLost, asyncio.TimeoutError):
            reading = self._get(replica, "/replica", key)
            status, answer = await asyncio.wait_for(reading, self._settings.health_timeout)
            told = answer if status == 200 else {}
        replica.models = []
        if isinstance(told, dict) and isinstance(told.get("models"), list):
            replica.models = [one for one in told["models"] if isinstance(one, dict)]
            replica.role = str(told.get("role", "both"))
            replica.hands_over = told.get("hands_over") is True
        num_seats = sum(int(one.get("num_kv_tokens", 0)) for one in replica.models)
        tells = self._has_tokens and bool(self._settings.replica_admin_key)
        replica.number = self.router.add_replica(
            replica.url, assumed_blocks=0 if tells else self._settings.assumed_blocks
        )
        replica.is_ready = True
        replica.lives += 1
        _log.info("replica %s is ready: %d tokens of KV cache", replica.url, num_seats)

    async def _get(self, replica: Replica, path: str, key: str) -> tuple[int, object]:
        reply = await replica.upstream.request("GET", path, self.headers(key))
        body = await reply.read(
            _MAX_INFO_BYTES if "block_events" not in path else _MAX_EVENTS_BYTES
        )
        try:
            return reply.status, msgspec.json.decode(body)
        except msgspec.DecodeError:
            return reply.status, None

    async def _listen(self, replica: Replica) -> None:
        """Takes in what the replica says of its prefix cache."""
        sequence = -1
        while True:
            if replica.number < 0:
                sequence = -1
                await asyncio.sleep(self._settings.health_interval)
                continue
            life = replica.lives
            path = (
                f"/debug/block_events?epoch={quote(replica.epoch)}&after={sequence}"
                f"&wait={_EVENTS_WAIT_S}"
            )
            try:
                reading = self._get(replica, path, self._settings.replica_admin_key)
                status, told = await asyncio.wait_for(
                    reading, _EVENTS_WAIT_S + self._settings.health_timeout
                )
                if replica.number < 0 or replica.lives != life:
                    continue
                if status != 200 or not isinstance(told, dict):
                    raise ValueError(f"status {status}")
                sequence = self._take(replica, told, sequence)
                replica.tells_blocks = True
            except (ReplicaLost, asyncio.TimeoutError, ValueError, KeyError, TypeError) as error:
                replica.epoch, sequence = "", -1
                if replica.tells_blocks or status_is_refusal(error):
                    _log.warning("replica %s tells no blocks: %s", replica.url, error)
                replica.tells_blocks = False
                await asyncio.sleep(self._settings.health_interval)

    def _take(self, replica: Replica, told: dict[str, Any], sequence: int) -> int:
        """Returns the number of the last batch."""
        replica.epoch = str(told["epoch"])
        snapshot = told.get("snapshot")
        if snapshot is not None:
            number = int(snapshot["sequence"])
            hashes = base64.b64decode(snapshot["hashes"], validate=True)
            self.router.restore(replica.number, number, hashes)
            return number
        for batch in told["batches"]:
            rows = [
                (str(kind), base64.b64decode(hashes, validate=True))
                for kind, hashes in batch["events"]
            ]
            if not self.router.apply(replica.number, int(batch["sequence"]), rows):
                replica.epoch = ""  # batches are missing: a snapshot is next
                return -1
            sequence = int(batch["sequence"])
        return sequence


def status_is_refusal(error: Exception) -> bool:
    """Whether a replica answered, and said no."""
    return isinstance(error, ValueError)
