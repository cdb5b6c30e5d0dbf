"""What stands around every request: its errors become answers, and it leaves one line in the
log."""

import asyncio
import logging
import time
from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmserve.server.http.connection import own_connection
from llmserve.server.http.errors import ApiError, JsonResponse, to_api_error
from llmserve.server.http.head import given_request_id
from llmserve.server.metrics import ServerMetrics
from llmserve.server.peer_routes import why_not_here
from llmserve.server.routes.anthropic.errors import anthropic_error
from llmserve.server.routes.ollama.errors import ollama_error
from llmserve.server.running.activity import Run
from llmserve.server.running.job import new_id
from llmserve.server.tracing import Tracing

_log = logging.getLogger(__name__)

_QUIET = ("/health", "/ready", "/ping", "/metrics")
_REQUEST_ID = b"x-request-id"
# Of a client that left before its answer's head; nginx calls it so.
_CLIENT_LEFT = 499


# Whose words an error has, by what the path begins with; OpenAI's in all others.
_ERROR_BODIES = (
    ("/v1/messages", anthropic_error),
    ("/messages", anthropic_error),
    ("/api/", ollama_error),
)


_OPENAIS = "/api/v0/"  # LM Studio's prefix of OpenAI's routes


def error_response(
    path: str, error: ApiError, headers: Mapping[str, str] | None = None
) -> Response:
    """In the words of the protocol that the path belongs to."""
    for begin, body in _ERROR_BODIES:
        if path.startswith(_OPENAIS):
            break
        if path.startswith(begin):
            headers = {**error.headers(), **(headers or {})}
            return JsonResponse(body(error), error.status, headers)
    return error.response(headers)


def answer_error(request: Request, error: Exception) -> Response:
    """Of Starlette's own errors: no such route, no such method."""
    headers = getattr(error, "headers", None) or {}
    method, path = request.method, request.url.path[:200]
    if isinstance(error, HTTPException) and error.status_code == 404:
        why = why_not_here(path)
        said = f"there is no route {method} {path}; /docs lists them"
        if why is not None:
            said = f"{method} {path} is not supported: {why}"
        error = ApiError(404, said, code=None if why is None else "not_supported")
    elif isinstance(error, HTTPException) and error.status_code == 405:
        error = ApiError(
            405, f"{path} takes {headers.get('Allow')}, not {method}", code="method_not_supported"
        )
    return error_response(path, to_api_error(error), headers)


class Access:
    """ASGI middleware, the outermost."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hands the request on. What it raises is answered, or cuts the connection if the answer
        has begun. It is cancelled where the server ends and the connection has been cut."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        status = 0
        given_id = given_request_id(scope)

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if given_id or status >= 400:
                    request_id = given_id or _request_id(scope).encode()
                    headers = [item for item in message["headers"] if item[0] != _REQUEST_ID]
                    message = {**message, "headers": [*headers, (_REQUEST_ID, request_id)]}
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except asyncio.CancelledError:
            if "app" not in scope or not scope["app"].state.server.activity.is_draining:
                raise
            # Past here it would be logged as a failure.
        except Exception as error:
            fields = frozenset(scope.get("llmserve.fields", ()))
            answer = to_api_error(error, fields, _request_id(scope))
            if status == 0:
                scope["llmserve.error"] = answer  # for the log
                await error_response(scope["path"], answer)(scope, receive, watched)
            else:
                if (connection := own_connection(scope)) is not None:
                    connection.abort()
        finally:
            status = status or _CLIENT_LEFT
            write_line(scope, status, time.monotonic() - began, given_id)
            if "app" in scope:
                _count(scope["app"].state.server.metrics, scope, status)
                _trace(scope["app"].state.server.tracing, scope, status)


def _request_id(scope: Scope) -> str:
    """Its answer's: that of what it runs, or one of its own."""
    run = scope.get("llmserve.run")
    if isinstance(run, Run):
        return run.job.request_id
    if "llmserve.request_id" not in scope:
        scope["llmserve.request_id"] = new_id("req")
    return str(scope["llmserve.request_id"])


def _count(metrics: ServerMetrics, scope: Scope, status: int) -> None:
    metrics.count_answer(status)
    run = scope.get("llmserve.run")
    if not isinstance(run, Run):
        return
    metrics.requests.note(run)
    if (rate := run.tokens_per_s) is not None:
        metrics.delivery.observe(rate)


def _trace(tracing: Tracing | None, scope: Scope, status: int) -> None:
    run = scope.get("llmserve.run")
    if tracing is not None and isinstance(run, Run):
        tracing.record(scope, run, status)


def write_line(scope: Scope, status: int, duration_s: float, given_id: bytes = b"") -> None:
    """The line of a request in the log."""
    if (scope["path"] in _QUIET and status == 200) or not _log.isEnabledFor(logging.INFO):
        return
    client = scope.get("client")
    fields: dict[str, object] = {
        "method": scope["method"],
        "path": scope["path"][:200],
        "status": status,
        "duration_s": round(duration_s, 4),
        "client": client[0] if client else "",
    }
    run = scope.get("llmserve.run")
    if isinstance(run, Run):
        states = [stream.state for stream in run.streams]
        fields |= {
            "request_id": run.job.request_id,
            "model": run.job.model.name,
            "prompt_tokens": sum(len(state.prompt.token_ids) for state in states),
            "generated_tokens": sum(state.num_generation_tokens for state in states),
            "finish": run.cause or "done",
        }
    if status >= 400:
        fields["request_id"] = _request_id(scope)
    if given_id:
        fields["client_request_id"] = given_id.decode("ascii")
    if isinstance(error := scope.get("llmserve.error"), ApiError):
        fields["error"] = error.code  # not its message, which may hold what the client sent
    # Past Logger.info, which looks up the stack for who calls it: nobody is told.
    record = _log.makeRecord(
        _log.name, logging.INFO, __file__, 0, "request", (), None, extra=fields
    )
    _log.handle(record)
