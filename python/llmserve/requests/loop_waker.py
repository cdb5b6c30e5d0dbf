"""Wakes event loops when the engine has events for them."""

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from llmserve import _core
from llmserve.requests.event_router import POLL_S, EventRouter


class _Watcher(Protocol):
    def stop(self) -> None:
        """Called on the thread of its loop."""


class LoopWaker:
    """Has every event loop that waits for events ask for them when there are some. Every method may
    be called from any thread."""

    def __init__(self, engine: _core.Engine, router: EventRouter) -> None:
        self._engine = engine
        self._router = router
        self._lock = threading.Lock()
        self._watchers: dict[asyncio.AbstractEventLoop, tuple[_Watcher, int]] = {}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Within it, the running loop asks."""
        loop = asyncio.get_running_loop()
        with self._lock:
            watcher, num_users = self._watchers.get(loop) or (self._make_watcher(loop), 0)
            self._watchers[loop] = watcher, num_users + 1
        try:
            yield
        finally:
            with self._lock:
                watcher, num_users = self._watchers.pop(loop)
                if num_users > 1:
                    self._watchers[loop] = watcher, num_users - 1
                else:
                    watcher.stop()

    def _make_watcher(self, loop: asyncio.AbstractEventLoop) -> _Watcher:
        self._router.check_open()
        # A descriptor of the loop's own, so that it stays valid until the loop has let go of it.
        fd = os.dup(self._engine.event_fd)
        try:
            return _FdWatcher(loop, fd, self._router)
        except NotImplementedError:
            os.close(fd)
            return _ThreadWatcher(self._router)


class _FdWatcher:
    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int, router: EventRouter) -> None:
        self._loop = loop
        self._fd = fd
        self._router = router
        loop.add_reader(fd, self._ask)

    def stop(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _ask(self) -> None:
        try:
            self._router.ask(0.0)
        except BaseException:  # Ctrl-C: what has been taken is still to be routed
            self._loop.call_soon(self._ask)
            raise


class _ThreadWatcher:
    """For loops that cannot watch a file descriptor."""

    def __init__(self, router: EventRouter) -> None:
        self._router = router
        self._is_stopped = False
        threading.Thread(target=self._run, name="llmserve-events", daemon=True).start()

    def stop(self) -> None:
        self._is_stopped = True

    def _run(self) -> None:
        while not self._is_stopped and not self._router.is_closed:
            if not self._router.ask(POLL_S):
                time.sleep(POLL_S)
