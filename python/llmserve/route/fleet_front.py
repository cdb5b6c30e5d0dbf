"""The router before servers that it reaches by HTTP."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from llmserve.route.fleet import Fleet, Place
from llmserve.route.front import Forwarded, Front, SendFailed
from llmserve.route.metrics import FleetLoads, described
from llmserve.route.settings import RouteSettings
from llmserve.route.upstream import ReplicaLost, Reply
from llmserve.server.http.auth import tenant


class FleetFront(Front):
    """One router and its servers."""

    def __init__(self, urls: Sequence[str], settings: RouteSettings) -> None:
        """Raises InvalidArgument, CorruptFile, NotSupported."""
        super().__init__(settings)
        self.fleet = Fleet(urls, settings, self.prompts.block_size, self.prompts.has_tokens)
        self.metrics.registry.register(FleetLoads(self.fleet))

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
        self, forwarded: Forwarded, own: ExitStack, data: bytes
    ) -> tuple[Reply, Place] | None:
        """See Front."""
        place = own.enter_context(
            self.fleet.placed(
                forwarded.prompt,
                tenant(forwarded.request.scope),
                forwarded.failed,
                forwarded.needed_class,
                forwarded.model,
            )
        )
        if place is None:
            return None
        method, path = forwarded.request.method, forwarded.path
        try:
            sending = place.replica.upstream.request(method, path, forwarded.headers(), data)
            return await sending, place
        except ReplicaLost as error:
            raise SendFailed(place, str(error)) from None
