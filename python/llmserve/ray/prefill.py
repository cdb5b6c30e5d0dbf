"""Prompts that replicas of their own compute: prefill and decode apart, on Ray.

A front reserves a place for a request where it will be answered. Where that replica is thought to
lack enough of the prompt, one of the prefill deployment computes it and keeps the blocks under a
ticket. Once the first blocks are there the request goes to its place with it. Whatever fails, the
answering replica computes the prompt by itself.
"""

import asyncio
import logging
from contextlib import ExitStack, suppress
from typing import Any

from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import RayServeException

from llmserve.ray.places import RayPlace, router_of
from llmserve.route.front import Asked
from llmserve.route.metrics import RouteMetrics
from llmserve.route.outgoing import Outgoing
from llmserve.route.prefill import can_hand_over
from llmserve.server.http.auth import tenant

# What a replica that is gone raises.
LOST = (RayActorError, RayServeException, RayError, ConnectionError)
_log = logging.getLogger(__name__)

# Blocks are kept that long, so that nothing is gained by a longer wait.
_TIMEOUT_S = 30.0


class RayPrefill:
    """Of one front."""

    def __init__(
        self, answering: Any, prefill: Any, metrics: RouteMetrics, min_tokens: int
    ) -> None:
        """answering, prefill: handles of the two deployments."""
        self._answering = answering
        self._prefill = prefill
        self._computing = prefill.options(method_name="compute", stream=True)
        self._metrics = metrics
        self._min_tokens = min_tokens

    async def handed_over(
        self, asked: Asked, own: ExitStack, place: RayPlace, outgoing: Outgoing
    ) -> Outgoing | None:
        """The request with a ticket, once the first of its prompt is computed; None: it goes as it
        is. own: of the request, at whose end nobody needs the rest. place: what is reserved for it,
        here or on its way."""
        if not can_hand_over(asked, outgoing):
            return None
        needed_class = None
        if (router := router_of(self._answering)) is not None:
            router.reserve(place)
            classes = {told.get("numerics_class") for told in router.replica_metadata()}
            needed_class = classes.pop() if len(classes) == 1 else None
        if asked.prompt.num_tokens - place.num_cached_tokens < self._min_tokens:
            return None
        prefill = router_of(self._prefill)
        if prefill is not None and not prefill.num_replicas:
            return None
        computing = RayPlace(asked.prompt, tenant(asked.request.scope))
        try:
            stream = self._computing.remote(outgoing, asked.headers(), needed_class, computing)
            ticket, why = await asyncio.wait_for(anext(aiter(stream)), _TIMEOUT_S)
        except asyncio.TimeoutError:
            stream.cancel()
            ticket, why = "", f"nothing came within {_TIMEOUT_S} s"
        except (*LOST, StopAsyncIteration) as error:
            ticket, why = "", f"{type(error).__name__}: {error}"[:500]
        if not ticket:
            computing.finish()
            self.note_failure(why)
            return None
        rest = asyncio.create_task(_read_on(stream, computing))
        own.callback(rest.cancel)
        self._metrics.handed_over.inc()
        return outgoing.with_ticket(ticket)

    def note_failure(self, why: str) -> None:
        """The replica that answers computes the prompt."""
        _log.warning("not handed over: %s", why)
        self._metrics.not_handed_over.inc()


async def _read_on(stream: Any, place: RayPlace) -> None:
    """While the rest of a prompt is computed, which has its place meanwhile."""
    try:
        with suppress(*LOST):
            async for _ in stream:
                pass
    except asyncio.CancelledError:
        stream.cancel()
        raise
    finally:
        place.finish()
