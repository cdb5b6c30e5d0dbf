"""Delivers a stream no faster than its tier allows: what the engine gives sooner waits here."""

import asyncio
from collections import deque
from collections.abc import Mapping
from functools import lru_cache
from typing import Protocol

from llmserve import _core
from llmserve.arguments import describe
from llmserve.errors import InvalidArgument
from llmserve.request_state import RequestState

# Of requests that name no tier.
DEFAULT_TIER = "default"


@lru_cache(maxsize=8)  # every request asks
def read_tiers(setting: str) -> Mapping[str, float]:
    """Tokens a second by tier, from `free=8,plus=20`. Raises InvalidArgument."""
    tiers = {}
    for item in filter(None, map(str.strip, setting.split(","))):
        tier, equals, rate = item.partition("=")
        try:
            tiers[tier.strip()] = float(rate)
        except ValueError:
            equals = ""
        if not (tier.strip() and equals and 0 < tiers[tier.strip()] < float("inf")):
            raise InvalidArgument(
                f"pace must be TIER=TOKENS_PER_SECOND, several with commas between, got {item!r}"
            )
    return tiers


def read_tier(name: str | None, tiers: Mapping[str, float]) -> str:
    """The tier of a request by its service_tier: one that has a pace, or the default, which clients
    of OpenAI's also call auto. Raises InvalidArgument."""
    if name is not None and name in tiers:
        return name
    if name in (None, DEFAULT_TIER, "auto"):
        return DEFAULT_TIER
    known = ", ".join({**tiers, DEFAULT_TIER: 0.0, "auto": 0.0})
    raise InvalidArgument(
        f"service_tier must be one of {known}, got {describe(name)}; others are named by the "
        f"server's setting pace"
    )


class PacedStream(Protocol):
    """A prompt's events on their way to its state."""

    state: RequestState

    def deliver(self, event: _core.TokenEvent) -> None:
        """Gives the state an event."""


class Pacer:
    """Of one prompt's stream. The first token goes on at once, each later one as soon as the rate
    allows; an end is not held back longer than the tokens before it. Used on the loop's thread."""

    def __init__(self, stream: PacedStream, tokens_per_s: float) -> None:
        """tokens_per_s: of each sample."""
        self._stream = stream
        self._s_per_token = 1 / (tokens_per_s * stream.state.params.n)
        self._loop = asyncio.get_running_loop()
        self._held: deque[_core.TokenEvent] = deque()
        self._next_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_open = False

    def take(self, event: _core.TokenEvent) -> bool:
        """Whether the event is kept for later."""
        if self._is_open or (not self._held and self._loop.time() >= self._next_at):
            self._count(event)
            return False
        self._held.append(event)
        if self._timer is None:
            self._timer = self._loop.call_at(self._next_at, self._give)
        return True

    def release(self) -> None:
        """Gives on what is held, and holds nothing more back."""
        self._is_open = True
        if self._timer is not None:
            self._timer.cancel()
        while self._held:
            self._stream.deliver(self._held.popleft())

    def _give(self) -> None:
        event = self._held.popleft()
        self._count(event)
        self._stream.deliver(event)
        self._timer = self._loop.call_at(self._next_at, self._give) if self._held else None

    def _count(self, event: _core.TokenEvent) -> None:
        begin = max(self._loop.time(), self._next_at)
        self._next_at = begin + len(event.token_ids) * self._s_per_token
