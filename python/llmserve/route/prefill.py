"""Prompts that one server computes for another one, which answers: prefill and decode apart.

The server that answers is chosen first, among those of the roles decode and both. Where it is
thought to lack enough of the prompt, one of the role prefill and of its numerics class draws a
ticket, computes the prompt, and keeps the blocks under that ticket. Once the first blocks are there
the request goes to the chosen server with the ticket, which fetches them and the others as they
are computed. Whatever fails on the way, the chosen server computes the prompt by itself: a client
sees a later first token at worst.
"""

import asyncio
import logging
from contextlib import ExitStack, suppress
from typing import Any
from urllib.parse import quote

import msgspec

from llmserve.route.fleet import Fleet, Place
from llmserve.route.front import Asked
from llmserve.route.metrics import RouteMetrics
from llmserve.route.outgoing import Outgoing
from llmserve.route.upstream import ReplicaLost, Reply
from llmserve.server.http.auth import tenant

_log = logging.getLogger(__name__)

PREFILL = "prefill"
ANSWERING = ("decode", "both")
_TICKET = "hand_over_ticket"
_MAX_ANSWER_BYTES = 2**24
_RETRY_S = 0.1  # of a server that is draining, and answers at once
# With one of these, several sequences or more of the prompt than its blocks are wanted.
_WHOLE = ("best_of", "use_beam_search", "prompt_logprobs", "echo", "resume_token_ids", _TICKET)

# The ticket, once the first blocks under it can be fetched; None: nothing is handed over.
_Begun = asyncio.Future[str | None]


def _give(begun: _Begun, ticket: str | None) -> None:
    if not begun.done():
        begun.set_result(ticket)


def can_hand_over(asked: Asked, outgoing: Outgoing) -> bool:
    """Whether a request is about one sequence of tokens from its prompt on, as handing over needs
    it."""
    body = asked.body
    if not asked.is_posted_prompt or not body or outgoing.is_resumed:
        return False
    prompt = body.get("prompt")
    is_one = not isinstance(prompt, list) or all(isinstance(item, int) for item in prompt)
    return is_one and body.get("n") in (None, 1) and not any(body.get(name) for name in _WHOLE)


class Prefill:
    """What a router does before it sends a request to the server that answers."""

    def __init__(self, fleet: Fleet, metrics: RouteMetrics, min_tokens: int) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._min_tokens = min_tokens

    @property
    def roles(self) -> tuple[str, ...]:
        """Of the servers that answer; none: of all, since there is no other."""
        return ANSWERING if self._fleet.has_ready(*ANSWERING) else ()

    async def handed_over(
        self, asked: Asked, own: ExitStack, place: Place, outgoing: Outgoing
    ) -> Outgoing | None:
        """The request with a ticket, once the first of its prompt is computed elsewhere; None: it
        goes as it is. own: of the request, at whose end nobody needs the rest."""
        num_lacking = asked.prompt.num_tokens - place.num_cached_tokens
        if (
            num_lacking < self._min_tokens
            or not place.replica.hands_over
            or place.replica.role == PREFILL
            or not self._fleet.has_ready(PREFILL)
            or not can_hand_over(asked, outgoing)
        ):
            return None
        needed_class = place.numerics_class(asked.model)
        if not needed_class:
            return None
        begun: _Begun = asyncio.get_running_loop().create_future()
        computing = asyncio.create_task(self._compute(asked, outgoing, needed_class, begun))
        own.callback(computing.cancel)
        computing.add_done_callback(lambda _: _give(begun, None))
        ticket = await begun
        if ticket is None:
            return None
        self._metrics.handed_over.inc()
        return outgoing.with_ticket(ticket)

    def note_failure(self, asked: Asked, why: str) -> None:
        """The server that answers computes the prompt."""
        _log.warning("not handed over: %s", why)
        self._metrics.not_handed_over.inc()

    async def _compute(
        self, asked: Asked, outgoing: Outgoing, needed_class: str, begun: _Begun
    ) -> None:
        """Has the prompt computed, and gives its ticket as soon as the first of it is."""
        with ExitStack() as own:
            prefill = own.enter_context(
                self._fleet.placed(
                    asked.prompt,
                    tenant(asked.request.scope),
                    asked.failed,
                    needed_class,
                    asked.model,
                    roles=(PREFILL,),
                )
            )
            if prefill is None:
                return
            try:
                ticket = await self._draw(asked, prefill)
                waiting = asyncio.create_task(self._wait(asked, prefill, ticket, begun))
                own.callback(waiting.cancel)
                await self._post(asked, prefill, *outgoing.prompt_only(ticket).sent())
                _give(begun, ticket)
            except (ReplicaLost, ValueError) as error:
                why = f"{prefill.name}: {error}"
                if begun.done():  # who has the ticket finds out by itself
                    _log.warning("a prompt was not computed to its end: %s", why)
                else:
                    self.note_failure(asked, why)
                await prefill.check()

    async def _draw(self, asked: Asked, prefill: Place) -> str:
        """A ticket for the prompt. Raises ReplicaLost, ValueError."""
        model = prefill.replica.served_name(asked.model)
        query = f"?model={quote(model)}" if model else ""
        drawn = await self._post(asked, prefill, f"/hand_over/tickets{query}", b"{}")
        ticket = drawn.get("ticket")
        if not isinstance(ticket, str):
            raise ValueError("it draws no ticket")
        return ticket

    async def _wait(self, asked: Asked, prefill: Place, ticket: str, begun: _Begun) -> None:
        """Gives the ticket once its first blocks can be fetched. What goes wrong here the prompt's
        own request tells."""
        model = prefill.replica.served_name(asked.model)
        data = msgspec.json.encode({_TICKET: ticket, "model": model or None})
        with suppress(ReplicaLost, ValueError):
            while not begun.done():
                said = await self._post(asked, prefill, "/hand_over/begun", data)
                if said.get("has_begun") is True:
                    _give(begun, ticket)
                await asyncio.sleep(_RETRY_S)

    async def _post(self, asked: Asked, prefill: Place, path: str, data: bytes) -> dict[str, Any]:
        headers = asked.headers()
        reply: Reply = await prefill.replica.upstream.request("POST", path, headers, data)
        with prefill.reading(reply):
            try:
                answer = await reply.read(_MAX_ANSWER_BYTES)
            except asyncio.CancelledError:
                reply.close()
                raise
        prefill.note_life()
        if reply.status != 200:
            raise ValueError(f"status {reply.status}: {answer[:300]!r}")
        read = msgspec.json.decode(answer)
        if not isinstance(read, dict):
            raise ValueError("its answer is no object")
        return read
