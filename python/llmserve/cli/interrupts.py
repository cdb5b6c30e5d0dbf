"""Ctrl-C in a program that goes on after it."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType


class Interrupts:
    """While entered, Ctrl-C is a KeyboardInterrupt where `taken` says so, one each time, and is
    nothing anywhere else: a second press must not end the program while the first is handled.

    Outside the main thread, which alone may set signal handlers, Ctrl-C stays what it was.
    """

    def __init__(self) -> None:
        self._is_taken = False

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Where KeyboardInterrupt may be raised."""
        self._is_taken = True
        try:
            yield
        finally:
            self._is_taken = False

    def __enter__(self) -> "Interrupts":
        self._is_set = threading.current_thread() is threading.main_thread()
        if self._is_set:
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_set:
            signal.signal(signal.SIGINT, self._previous)

    def _handle(self, signal_number: int, frame: FrameType | None) -> None:
        if self._is_taken:
            self._is_taken = False
            raise KeyboardInterrupt
