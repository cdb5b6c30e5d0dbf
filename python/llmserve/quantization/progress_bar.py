"""A progress bar that is there once the number of steps is known."""

from collections.abc import Callable
from typing import Any


class ProgressBar:
    """make(total, done) gives what has update(n) and close(), or None. To be closed."""

    def __init__(self, make: Callable[[int, int], Any]) -> None:
        self._make = make
        self._bar: Any = None

    def begin(self, total: int, done: int) -> None:
        """Of `total` steps, some of which are done."""
        self._bar = self._make(total, done)

    def advance(self) -> None:
        """One step."""
        if self._bar is not None:
            self._bar.update(1)

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
