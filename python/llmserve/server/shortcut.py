"""The way past Starlette's router, which looks at one route after another, for those whose path is
fixed."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send


class Shortcut:
    """ASGI middleware, the innermost. What its routes raise is for `Access`, and each layer that a
    stream does not go through spares its first and last lines as much as its request."""

    def __init__(self, app: ASGIApp, routes: Sequence[Route]) -> None:
        self._app = app
        self._endpoints = {
            (method, route.path): route.endpoint
            for route in routes
            if "{" not in route.path
            for method in route.methods or ()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers, or hands the request on."""
        endpoint = None
        if scope["type"] == "http":
            endpoint = self._endpoints.get((scope["method"], scope["path"]))
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        response = await endpoint(Request(scope, receive))
        await response(scope, receive, send)
