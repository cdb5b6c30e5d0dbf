"""A time by which what a task awaits has to be there."""

import asyncio
from types import TracebackType


class Deadline:
    """Within it the task goes on until this time of the loop's clock; what it awaits then is
    cancelled, and `has_passed` tells on leaving, which it does without an exception."""

    def __init__(self, at: float) -> None:
        self.has_passed = False
        self._at = at

    def __enter__(self) -> "Deadline":
        self._task = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_at(self._at, self._ring)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        self._timer.cancel()
        return self.has_passed and isinstance(exception, asyncio.CancelledError)

    def _ring(self) -> None:
        # The task stands still within, or this would not run.
        self.has_passed = True
        assert self._task is not None
        self._task.cancel()
