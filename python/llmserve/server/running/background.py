"""Responses that run without their client (`background: true`), until they have ended or are
cancelled. What they say in the meantime, and in the end, is among the stored responses."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Scope

Document = dict[str, Any]

# Of the request that asks for it: who it is, and what its line in the log says.
_SCOPE = ("type", "method", "path", "headers", "client", "app", "http_version", "llmserve.key")
RUNNING = ("queued", "in_progress")


class BackgroundRuns:
    """Of one server. Used on the loop's thread. Each is admitted and bounded as any request."""

    def __init__(self, around: Callable[[ASGIApp], ASGIApp]) -> None:
        """around: what makes errors answers, and logs and counts what was done."""
        self._around = around
        self._runs: dict[str, _Run] = {}

    def start(
        self,
        request: Request,
        response: ASGIApp,
        document: Document,
        keep: Callable[[Document], None],
    ) -> None:
        """Runs a response. document: of it, queued. keep: stores what it says."""
        scope = {name: request.scope[name] for name in _SCOPE if name in request.scope}
        run = _Run(self._around(response), scope, document, keep)
        self._runs[document["id"]] = run
        run.task.add_done_callback(lambda _: self._runs.pop(document["id"], None))

    async def cancel(self, response_id: str) -> None:
        """Returns once it has ended; at once where nothing of that id runs."""
        run = self._runs.get(response_id)
        if run is not None:
            run.leave.set()
            await asyncio.wait([run.task])


class _Run:
    def __init__(
        self, response: ASGIApp, scope: Scope, document: Document, keep: Callable[[Document], None]
    ) -> None:
        self.leave = asyncio.Event()  # as a client does that goes
        self._status = 0
        self._body = b""
        self.task = asyncio.create_task(self._run(response, scope, document, keep))

    async def _run(
        self, response: ASGIApp, scope: Scope, document: Document, keep: Callable[[Document], None]
    ) -> None:
        keep({**document, "status": "in_progress"})
        await response(scope, self._receive, self._send)
        if self._status == 200:
            return  # its answer has kept itself
        end: dict[str, Any] = {"status": "cancelled"}
        if not self.leave.is_set():
            message = "the server ended it"
            if self._status:
                message = msgspec.json.decode(self._body)["error"]["message"]
            error = {"code": "server_error", "message": message}
            end = {"status": "failed", "error": error}
        keep({**document, **end, "completed_at": int(time.time())})

    async def _receive(self) -> Message:
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self._status = message.get("status", self._status)
        if self._status != 200:
            self._body += message.get("body", b"")
