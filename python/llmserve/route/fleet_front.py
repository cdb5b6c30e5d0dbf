"""The router before servers that it reaches by HTTP."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from llmserve.route.fleet import Fleet, Place
from llmserve.route.front import Asked, Front, SendFailed
from llmserve.route.metrics import FleetLoads, described
from llmserve.route.outgoing import Outgoing
from llmserve.route.prefill import Prefill
from llmserve.route.settings import RouteSettings
from llmserve.route.upstream import ReplicaLost, Reply
from llmserve.server.http.auth import tenant

_MAX_REFUSAL_BYTES = 2**20


class FleetFront(Front):
    """One router and its servers."""

    def __init__(self, urls: Sequence[str], settings: RouteSettings) -> None:
        """Raises InvalidArgument, CorruptFile, NotSupported."""
        super().__init__(settings)
        self.fleet = Fleet(urls, settings, self.prompts.block_size, self.prompts.has_tokens)
        self.metrics.registry.register(FleetLoads(self.fleet))
        self._prefill = Prefill(self.fleet, self.metrics, settings.hand_over_min_tokens)

    async def start(self) -> None:
        """See Front."""
        await self.fleet.start()

    async def close(self) -> None:
        """See Front."""
        await self.fleet.close()

    @property
    def is_ready(self) -> bool:
        """See Front."""
        return self.fleet.num_ready > 0

    def described(self) -> list[dict[str, Any]]:
        """See Front."""
        return described(self.fleet)

    async def send(
        self, asked: Asked, own: ExitStack, outgoing: Outgoing
    ) -> tuple[Reply, Place] | None:
        """See Front."""
        place = own.enter_context(
            self.fleet.placed(
                asked.prompt,
                tenant(asked.request.scope),
                asked.failed,
                asked.needed_class,
                asked.model,
                roles=self._prefill.roles,
            )
        )
        if place is None:
            return None
        try:
            with_ticket = await self._prefill.handed_over(asked, own, place, outgoing)
            if with_ticket is not None:
                reply = await self._post(asked, place, with_ticket)
                if reply.status != 400:
                    return reply, place
                # The ticket may be what is refused; without it the answer is the request's own.
                why = await reply.read(_MAX_REFUSAL_BYTES)
                self._prefill.note_failure(asked, f"{place.name}: {why[:300]!r}")
            return await self._post(asked, place, outgoing), place
        except ReplicaLost as error:
            raise SendFailed(place, str(error)) from None

    async def _post(self, asked: Asked, place: Place, outgoing: Outgoing) -> Reply:
        path, data = outgoing.sent()
        headers = asked.headers()
        return await place.replica.upstream.request(outgoing.method, path, headers, data)
