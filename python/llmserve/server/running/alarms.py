"""Times at which something is to be done: one timer of the loop for the earliest of them, and none
while there is nothing to wait for, so that a quiet server sleeps."""

import asyncio
from collections.abc import Callable
from operator import itemgetter

# What is due within it is due: uvloop's timers count whole milliseconds, and may be that early.
_EARLY_S = 0.001

Act = Callable[[], None]


class Alarms:
    """Of one owner. Used on the loop's thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._times: dict[Act, float] = {}
        # uvloop's handle of what is due already does not know when that is.
        self._timer: asyncio.Handle | None = None
        self._rings_at = 0.0

    def __contains__(self, act: Act) -> bool:
        """Whether it is going to be called."""
        return act in self._times

    def set(self, act: Act, at: float) -> None:
        """Calls `act` once at this time of the loop's clock, instead of when it was to be before;
        it may set itself again."""
        self._times[act] = at
        self._arm()

    def drop(self, act: Act) -> None:
        """Does not call it after all. The timer stays: this may be done for every token."""
        self._times.pop(act, None)

    def clear(self) -> None:
        """Calls nothing any more."""
        self._times.clear()
        self._arm()

    def _arm(self) -> None:
        at = min(self._times.values(), default=None)
        if self._timer is not None:
            if at is not None and self._rings_at <= at:
                return
            self._timer.cancel()
        self._timer = None
        if at is not None:
            self._timer, self._rings_at = self._loop.call_at(at, self._ring), at

    def _ring(self) -> None:
        self._timer = None
        now = self._loop.time() + _EARLY_S
        for act, at in sorted(self._times.items(), key=itemgetter(1)):
            if at > now:
                break
            # One before it may have dropped it.
            if self._times.pop(act, None) is not None:
                act()
        self._arm()
