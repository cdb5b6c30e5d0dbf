"""The router before replicas that Ray runs: the same application, another way to them."""

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from ray.serve.exceptions import BackPressureError

from llmserve.ray.places import RayPlace
from llmserve.ray.prefill import LOST, RayPrefill
from llmserve.ray.replica import OTHER_CLASS, Headers
from llmserve.route.front import Asked, Front, SendFailed
from llmserve.route.outgoing import Outgoing
from llmserve.route.settings import RouteSettings
from llmserve.route.upstream import ReplicaLost
from llmserve.server.http.auth import tenant
from llmserve.server.http.errors import ApiError

_log = logging.getLogger(__name__)

_MAX_REFUSAL_BYTES = 2**20


class RayAnswer:
    """See Answer."""

    def __init__(self, stream: Any, status: int, headers: Headers) -> None:
        self.status = status
        self.headers = headers
        self._stream = stream

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """See Answer."""
        try:
            async for piece in self._stream:
                yield piece
        except LOST as error:
            raise ReplicaLost(f"{type(error).__name__}: {error}") from None

    async def read(self, max_bytes: int) -> bytes:
        """See Answer."""
        body = bytearray()
        async for piece in self.pieces():
            body += piece
            if len(body) > max_bytes:
                raise ReplicaLost(f"an answer of more than {max_bytes} bytes")
        return bytes(body)

    def close(self) -> None:
        """See Answer."""
        self._stream.cancel()


class RaySeat:
    """See Seat."""

    def __init__(self, place: RayPlace, numerics_class: str = "") -> None:
        self._place = place
        self._class = numerics_class

    @property
    def name(self) -> str:
        """See Seat."""
        return self._place.replica

    def numerics_class(self, model: object) -> str:
        """See Seat."""
        return self._class

    @contextmanager
    def reading(self, reply: Any) -> Iterator[None]:
        """See Seat: Ray tells a reader that the actor has died."""
        yield

    def note_life(self) -> None:
        """See Seat."""

    def grew(self, num_tokens: int) -> None:
        """See Seat."""
        if num_tokens > 0:
            self._place.grew(num_tokens)

    async def check(self) -> None:
        """See Seat: Ray looks."""


class RayFront(Front):
    """One router, in an actor of its own."""

    def __init__(self, handle: Any, settings: RouteSettings, prefill: Any = None) -> None:
        """handle: of the deployment of LLMReplica. prefill: of one that computes prompts for it."""
        super().__init__(settings)
        self._handle = handle.options(method_name="handle", stream=True)
        self._prefill: RayPrefill | None = None
        if prefill is not None:
            min_tokens = settings.hand_over_min_tokens
            self._prefill = RayPrefill(handle, prefill, self.metrics, min_tokens)

    async def start(self) -> None:
        """See Front."""

    async def close(self) -> None:
        """See Front."""

    @property
    def is_ready(self) -> bool:
        """See Front: Ray Serve holds a request until there is a replica."""
        return True

    def described(self) -> list[dict[str, Any]]:
        """See Front: `serve status` and Ray's dashboard say it."""
        return []

    async def send(
        self, asked: Asked, own: ExitStack, outgoing: Outgoing
    ) -> tuple[RayAnswer, RaySeat] | None:
        """See Front."""
        place = RayPlace(asked.prompt, tenant(asked.request.scope), tuple(asked.failed))
        own.callback(place.finish)
        if self._prefill is not None:
            with_ticket = await self._prefill.handed_over(asked, own, place, outgoing)
            if with_ticket is not None:
                answer, seat = await self._post(asked, place, with_ticket)
                if answer.status != 400:
                    return answer, seat
                # The ticket may be what is refused; without it the answer is the request's own.
                with suppress(ReplicaLost):
                    why = await answer.read(_MAX_REFUSAL_BYTES)
                    self._prefill.note_failure(f"{place.replica}: {why[:300]!r}")
        return await self._post(asked, place, outgoing)

    async def _post(
        self, asked: Asked, place: RayPlace, outgoing: Outgoing
    ) -> tuple[RayAnswer, RaySeat]:
        path, data = outgoing.sent()
        stream = self._handle.remote(
            outgoing.method, path, asked.headers(), data, asked.needed_class, place
        )
        first: AsyncIterator[Any] = aiter(stream)
        try:
            status, headers, numerics_class = await anext(first)
        except BackPressureError as error:
            raise ApiError(429, str(error), code="queue_full", retry_after=1) from None
        except (*LOST, StopAsyncIteration) as error:
            raise SendFailed(RaySeat(place), f"{type(error).__name__}: {error}"[:500]) from None
        seat = RaySeat(place, numerics_class)
        if status == OTHER_CLASS:
            raise SendFailed(seat, "it is of another numerics class")
        return RayAnswer(stream, status, headers), seat
