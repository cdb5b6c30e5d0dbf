"""Runs a router: its socket, signals, and the end."""

import asyncio
import logging
import socket
from collections.abc import Sequence

import uvicorn
from starlette.responses import Response
from starlette.types import Scope

from llmserve.route.app import create_app
from llmserve.route.fleet_front import FleetFront
from llmserve.route.settings import RouteSettings
from llmserve.server.http.protocol import http_protocol
from llmserve.server.main import address, is_of_this_machine, uvicorn_config

_log = logging.getLogger(__name__)


class _RefusesNone:
    def refuses(self, scope: Scope) -> bool:
        """See Refuser."""
        return False

    def answer(self, scope: Scope) -> Response:
        """See Refuser."""
        raise AssertionError


class RouteServer(uvicorn.Server):
    """uvicorn's, which drains before it closes: what runs may finish within drain_timeout."""

    def __init__(self, urls: Sequence[str], settings: RouteSettings) -> None:
        self.front = FleetFront(urls, settings)
        app = create_app(self.front)
        listening = settings.listening
        protocol = http_protocol(listening, lambda status: None, _RefusesNone())
        config = uvicorn_config(app, listening, protocol, host=settings.host, port=settings.port)
        super().__init__(config)
        self._settings = settings

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Says where it listens once it does."""
        await super().startup(sockets)
        num_ready, num = self.front.fleet.num_ready, len(self.front.fleet.replicas)
        for sock in sockets or ():
            shown = address(sock, self._settings.listening)
            _log.info("routing to %d of %d replicas on %s", num_ready, num, shown)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drains, then closes; another Ctrl-C ends the wait."""
        drain = asyncio.create_task(self.front.drain(self._settings.drain_timeout))
        while not drain.done() and not self.force_exit:
            await asyncio.wait([drain], timeout=0.05)
        drain.cancel()
        await super().shutdown(sockets)
        self._captured_signals.clear()  # or uvicorn would raise them anew


def route(urls: Sequence[str], settings: RouteSettings, sockets: list[socket.socket]) -> None:
    """Routes on what `listen` gave until SIGTERM or Ctrl-C. Raises InvalidArgument."""
    if not settings.api_key and not all(map(is_of_this_machine, sockets)):
        _log.warning("no api_key: everybody who reaches this machine may use the router")
    RouteServer(urls, settings).run(sockets=sockets)
