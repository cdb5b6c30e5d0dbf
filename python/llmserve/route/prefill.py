"""Prompts that one server computes for another one, which answers: prefill and decode apart.

The server that answers is chosen first, among those of the roles decode and both. Where it is
thought to lack enough of the prompt, one of the role prefill and of its numerics class draws a
ticket, computes the prompt, and keeps the blocks under that ticket. The request then goes to the
chosen server with the ticket, which fetches them. Whatever fails on the way, the chosen server
computes the prompt by itself: a client sees a later first token at worst.
"""

import asyncio
import logging
from contextlib import ExitStack
from typing import Any
from urllib.parse import quote

import msgspec

from llmserve.route.fleet import Fleet, Place
from llmserve.route.front import Forwarded
from llmserve.route.metrics import RouteMetrics
from llmserve.route.upstream import ReplicaLost, Reply
from llmserve.server.http.auth import tenant

_log = logging.getLogger(__name__)

PREFILL = "prefill"
ANSWERING = ("decode", "both")
_TICKET = "hand_over_ticket"
_MAX_ANSWER_BYTES = 2**24
# What changes nothing of the prompt, and one token does not need or may not have.
_NOT_FOR_PREFILL = (
    *("stream", "stream_options", "logprobs", "top_logprobs", "stop", "stop_token_ids"),
    *("min_tokens", "max_completion_tokens", "n_predict", "seed", "return_token_ids", _TICKET),
)
# With one of these, several sequences or more of the prompt than its blocks are wanted.
_WHOLE = ("best_of", "use_beam_search", "prompt_logprobs", "echo", "resume_token_ids", _TICKET)


def can_hand_over(body: dict[str, Any]) -> bool:
    """Whether a request is about one sequence of tokens, as handing over needs it."""
    prompt = body.get("prompt")
    is_one = not isinstance(prompt, list) or all(isinstance(item, int) for item in prompt)
    return is_one and body.get("n") in (None, 1) and not any(body.get(name) for name in _WHOLE)


def prefill_body(body: dict[str, Any], ticket: str) -> bytes:
    """What the server that computes the prompt gets."""
    kept = {name: value for name, value in body.items() if name not in _NOT_FOR_PREFILL}
    return msgspec.json.encode({**kept, "max_tokens": 1, _TICKET: ticket})


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

    async def body(self, forwarded: Forwarded, place: Place, data: bytes) -> bytes | None:
        """The request's body with a ticket, once its prompt is computed elsewhere; None: it goes as
        it is."""
        num_lacking = forwarded.prompt.num_tokens - place.num_cached_tokens
        if (
            num_lacking < self._min_tokens
            or not place.replica.hands_over
            or place.replica.role == PREFILL
            or not forwarded.is_posted_prompt
            or not self._fleet.has_ready(PREFILL)
        ):
            return None
        body = msgspec.json.decode(data)
        if not can_hand_over(body):
            return None
        needed_class = place.numerics_class(forwarded.model)
        if not needed_class:
            return None
        with ExitStack() as own:
            prefill = own.enter_context(
                self._fleet.placed(
                    forwarded.prompt,
                    tenant(forwarded.request.scope),
                    forwarded.failed,
                    needed_class,
                    forwarded.model,
                    roles=(PREFILL,),
                )
            )
            if prefill is None:
                return None
            try:
                ticket = await self._computed(forwarded, prefill, body)
            except (ReplicaLost, ValueError) as error:
                self.note_failure(forwarded, f"{prefill.name}: {error}")
                await prefill.check()
                return None
        self._metrics.handed_over.inc()
        return msgspec.json.encode({**body, _TICKET: ticket})

    def note_failure(self, forwarded: Forwarded, why: str) -> None:
        """The server that answers computes the prompt."""
        _log.warning("not handed over: %s", why)
        self._metrics.not_handed_over.inc()

    async def _computed(self, forwarded: Forwarded, prefill: Place, body: dict[str, Any]) -> str:
        """The ticket of the prompt, which is computed. Raises ReplicaLost, ValueError."""
        model = body.get("model")
        query = f"?model={quote(model)}" if isinstance(model, str) else ""
        drawn = await self._post(forwarded, prefill, f"/hand_over/tickets{query}", b"{}")
        ticket = drawn.get("ticket")
        if not isinstance(ticket, str):
            raise ValueError("it draws no ticket")
        await self._post(forwarded, prefill, forwarded.path, prefill_body(body, ticket))
        return ticket

    async def _post(
        self, forwarded: Forwarded, prefill: Place, path: str, data: bytes
    ) -> dict[str, Any]:
        headers = forwarded.headers()
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
