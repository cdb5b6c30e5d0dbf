"""One engine in a Ray actor: the server's own application, called in the process."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

from ray.util import get_node_ip_address

from llmserve.async_llm import AsyncLLM
from llmserve.errors import InternalError
from llmserve.ray.config import RayConfig
from llmserve.ray.nodes import Nodes
from llmserve.route.outgoing import Outgoing
from llmserve.server.app import create_app
from llmserve.server.hand_over import open_hand_over
from llmserve.server.models import ServedModel

_log = logging.getLogger(__name__)

Headers = list[tuple[bytes, bytes]]
# The first item of an answer.
Head = tuple[int, Headers, str]  # status, headers, the replica's numerics class
_POLL_S = 0.005
OTHER_CLASS = 421  # of who cannot go on with an answer of another numerics class


class LLMReplica:
    """An engine and its server, without a socket."""

    def __init__(self, config: RayConfig, role: str = "both", hand_over_key: str = "") -> None:
        """role: prefill computes prompts for those of the role decode, which have the same key."""
        engine = {"seed": None, **config.engine}
        self._nodes: Nodes | None = None
        if config.num_nodes > 1:
            self._nodes = Nodes(config.model, engine, config.num_cpus)
            engine = self._nodes.options
        self._llm = AsyncLLM(config.model, **engine)
        settings = config.replica_settings(role, get_node_ip_address(), hand_over_key)
        open_hand_over(self._llm, settings)
        model = ServedModel([config.name], self._llm)
        self._app = create_app([model], settings)
        self._class = self._llm.numerics_class
        self._lifespan: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._starting = asyncio.Lock()

    async def handle(
        self,
        method: str,
        path: str,
        headers: Headers,
        body: bytes,
        needed_class: str | None,
        place: object,
    ) -> AsyncGenerator[Head | bytes, None]:
        """The answer to a request: its Head, then its body piece by piece. place: what the router
        has read of it."""
        await self._start()
        if needed_class not in (None, self._class):
            yield OTHER_CLASS, [], self._class
            return
        queue: asyncio.Queue[Any] = asyncio.Queue(1)  # a slow reader holds the stream up
        left = asyncio.Event()
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": headers,
            "client": None,
            "server": None,
        }
        has_come = False

        async def receive() -> dict[str, Any]:
            nonlocal has_come
            if not has_come:
                has_come = True
                return {"type": "http.request", "body": body, "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            await queue.put(message)

        async def run() -> None:
            try:
                await self._app(scope, receive, send)
            finally:
                await queue.put(None)

        task = asyncio.create_task(run())
        is_whole = False
        try:
            while (message := await queue.get()) is not None:
                if message["type"] == "http.response.start":
                    yield message["status"], list(message["headers"]), self._class
                elif message["type"] == "http.response.body":
                    if message.get("body"):
                        yield bytes(message["body"])
                    is_whole = not message.get("more_body", False)
            if not is_whole:
                raise InternalError("the answer broke off")
        finally:
            left.set()
            if not is_whole:  # its reader has left: the engine ends what it runs for it
                task.cancel()
            while not queue.empty():
                queue.get_nowait()
            with suppress(asyncio.CancelledError, Exception):
                await task

    async def compute(
        self, outgoing: Outgoing, headers: Headers, needed_class: str | None, place: object
    ) -> AsyncGenerator[tuple[str, str], None]:
        """Computes the prompt of a request, of the role prefill. First comes the ticket of its
        blocks, once some can be fetched, or an empty one and why there is none; the end is that of
        the work."""
        hand_over = self._llm.hand_over
        if hand_over is None:
            yield "", "it hands over nothing"
            return
        ticket = hand_over.ticket()
        computing = asyncio.create_task(
            self._computed(outgoing.prompt_only(ticket), headers, needed_class, place)
        )
        try:
            while not computing.done() and not hand_over.has_begun(ticket):
                await asyncio.wait([computing], timeout=_POLL_S)
            if not computing.done():
                yield ticket, ""
                if why := await computing:
                    _log.warning("a prompt was not computed to its end: %s", why)
            else:
                why = computing.result()
                yield ("", why) if why else (ticket, "")
        finally:
            computing.cancel()

    async def _computed(
        self, outgoing: Outgoing, headers: Headers, needed_class: str | None, place: object
    ) -> str:
        """Why it was not; empty for what was."""
        path, data = outgoing.sent()
        status, said = 0, b""
        answer = self.handle(outgoing.method, path, headers, data, needed_class, place)
        async with aclosing(answer) as items:
            async for item in items:
                if isinstance(item, tuple):
                    status = item[0]
                elif status != 200:
                    said += item
        return "" if status == 200 else f"status {status}: {said[:300]!r}"

    async def reconfigure(self, _config: Any) -> None:
        """Nothing changes in a running engine: a rolling update makes new ones."""

    async def check_health(self) -> None:
        """Raises what stopped the engine: Ray starts another replica then."""
        if (failure := self._llm.failure) is not None:
            raise InternalError(failure)

    def record_replica_metadata(self) -> dict[str, Any]:
        """What the fronts are told of it once."""
        return {"numerics_class": self._class, "max_num_seqs": self._llm.max_num_seqs}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """See ReplicaStats."""
        metrics = self._llm.get_metrics()
        seats = self._llm.max_num_seqs
        return {
            "decode_share": metrics.num_requests_running / seats,
            "prefill_share": metrics.num_requests_waiting / seats,
            "kv_share": metrics.num_blocks_used / max(metrics.num_blocks_total, 1),
        }

    async def _start(self) -> None:
        """The application's lifespan, on the loop that answers."""
        async with self._starting:
            if self._lifespan is not None:
                return
            started = asyncio.Event()

            async def run() -> None:
                async with self._app.router.lifespan_context(self._app):
                    started.set()
                    await self._closing.wait()

            self._lifespan = asyncio.create_task(run())
            await started.wait()

    def __del__(self) -> None:
        if (llm := getattr(self, "_llm", None)) is not None:
            llm.close()
        if (nodes := getattr(self, "_nodes", None)) is not None:
            nodes.close()
