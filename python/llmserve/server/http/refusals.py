"""How fast a full server says no: clients that come again at once are answered no faster than the
answers of others can bear."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from starlette.responses import Response
from starlette.types import Scope

# Of the loop's time, what refusals may take: on a machine that is not busy a thousand a second.
_SHARE = 0.05
# What they may take at once, after a time without any.
_MAX_BURST_S = 0.005
_TICK_S = 0.01


class Refuser(Protocol):
    """Who decides which requests are refused by their head, and words it."""

    def refuses(self, scope: Scope) -> bool:
        """Whether there is an answer without the body. scope: method, path, headers, client."""

    def answer(self, scope: Scope) -> Response:
        """That answer; counts it."""


class RefusalPace:
    """Of one server. Used on the loop's thread."""

    def __init__(self) -> None:
        self._allowance_s = _MAX_BURST_S
        self._at = time.monotonic()
        self._waiting: deque[Callable[[], None]] = deque()

    def soon(self, send: Callable[[], None]) -> bool:
        """Calls it, now if that is in time, else later. Returns whether it was now."""
        if not self._waiting and self._may_send():
            self._send(send)
            return True
        if not self._waiting:
            asyncio.get_running_loop().call_later(_TICK_S, self._tick)
        self._waiting.append(send)
        return False

    def _tick(self) -> None:
        while self._waiting and self._may_send():
            self._send(self._waiting.popleft())
        if self._waiting:
            asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def _may_send(self) -> bool:
        now = time.monotonic()
        self._allowance_s = min(self._allowance_s + (now - self._at) * _SHARE, _MAX_BURST_S)
        self._at = now
        return self._allowance_s > 0

    def _send(self, send: Callable[[], None]) -> None:
        send()
        self._allowance_s -= time.monotonic() - self._at
