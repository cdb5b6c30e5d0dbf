"""The application of a router: its routes, and what stands before them."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmserve._version import __version__
from llmserve.route.forwarded import Forwarded
from llmserve.route.front import Front
from llmserve.route.protocols import GOT, POSTED
from llmserve.route.settings import RouteSettings
from llmserve.server.access import error_response, write_line
from llmserve.server.http.auth import Authentication
from llmserve.server.http.errors import ApiError, JsonResponse, to_api_error
from llmserve.server.http.head import given_request_id, header_bytes


def _decoded(data: bytes) -> dict[str, Any]:
    """The body as far as a router reads it; what is none is the replica's to refuse."""
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


async def _read_body(request: Request, settings: RouteSettings) -> bytes:
    """Raises ApiError (408, 413)."""
    limit = settings.max_body_bytes
    too_large = ApiError(413, f"the body is longer than max_body_bytes={limit}")
    length = header_bytes(request.scope, b"content-length")
    if length.isdigit() and int(length[:20]) > limit:
        raise too_large
    data = bytearray()

    async def read() -> None:
        async for piece in request.stream():
            data.extend(piece)
            if len(data) > limit:
                raise too_large

    try:
        await asyncio.wait_for(read(), settings.read_timeout or None)
    except asyncio.TimeoutError:
        raise ApiError(408, "the body did not come within read_timeout") from None
    return bytes(data)


class Answers:
    """ASGI middleware: errors become answers, and each request leaves a line in the log."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hands the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except ClientDisconnect:
            pass
        except Exception as error:
            if status:
                raise
            answer = to_api_error(error, request_id=given_request_id(scope).decode("ascii"))
            scope["llmserve.error"] = answer
            await error_response(scope["path"], answer)(scope, receive, watched)
        finally:
            write_line(scope, status or 499, time.monotonic() - began, given_request_id(scope))


def _no_route(request: Request, error: Exception) -> Response:
    path = request.url.path[:200]
    status = error.status_code if isinstance(error, HTTPException) else 404
    said = f"a router has no {request.method} {path}; ask a replica"
    return error_response(path, ApiError(status, said))


def create_app(front: Front) -> Starlette:
    """A router as an ASGI application."""
    settings = front.settings

    async def forward(request: Request) -> Response:
        """Of a POST: to a replica, and to the next one where it fails before its first byte."""
        if front.is_draining:
            raise ApiError(503, "the router is shutting down", code="shutting_down", retry_after=1)
        data = await _read_body(request, settings)
        return await Forwarded(front, request, _decoded(data), data).answer()

    async def get(request: Request) -> Response:
        """Of a GET that every replica answers alike."""
        return await Forwarded(front, request, {}, b"").answer()

    async def health(_: Request) -> Response:
        return JsonResponse({"status": "ok"})

    async def ready(_: Request) -> Response:
        if front.is_draining or not front.is_ready:
            raise ApiError(503, "no replica is ready", code="no_replica", retry_after=1)
        return JsonResponse({"status": "ok"})

    async def version(_: Request) -> Response:
        return JsonResponse({"version": __version__})

    async def metrics(_: Request) -> Response:
        return PlainTextResponse(
            generate_latest(front.metrics.registry), media_type=CONTENT_TYPE_LATEST
        )

    async def replicas(_: Request) -> Response:
        return JsonResponse({"replicas": front.described()})

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await front.start()
        try:
            yield
        finally:
            await front.close()

    app = Starlette(
        routes=[
            *(Route(path, forward, methods=["POST"]) for path in POSTED),
            *(Route(path, get, methods=["GET"]) for path in GOT),
            Route("/health", health, methods=["GET"]),
            Route("/ping", health, methods=["GET"]),
            Route("/ready", ready, methods=["GET"]),
            Route("/version", version, methods=["GET"]),
            Route("/metrics", metrics, methods=["GET"]),
            Route("/replicas", replicas, methods=["GET"]),
        ],
        middleware=[
            Middleware(Answers),
            Middleware(Authentication, settings=settings.listening),
        ],
        lifespan=lifespan,
        exception_handlers={HTTPException: _no_route},
    )
    app.state.front = front
    return app
