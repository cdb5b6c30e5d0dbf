"""Hands the engine's events to whoever waits for them.

There is no thread behind it: of the threads that wait, one asks the engine and routes what comes,
for itself and for the others; an event loop asks when the engine's file descriptor says that there
is something. Ctrl-C can end a thread between any two bytecodes, but not within one call of a C
function; so every move of an event or id from one place to the next is one such call, and nothing
is lost or given twice.
"""

import logging
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain
from queue import Empty, SimpleQueue
from typing import Protocol

from llmserve import _core
from llmserve.errors import InvalidArgument

_log = logging.getLogger(__name__)

# Bounds how long Ctrl-C goes unnoticed and how long a waiting thread takes to step in for one that
# stopped asking without a word (a stream that nobody reads on).
POLL_S = 0.05


class Inbox(Protocol):
    """Where the events of some requests go."""

    def put(self, item: _core.TokenEvent | None, /) -> object:
        """Takes an event, on whatever thread; None only wakes the reader."""


ThreadInbox = SimpleQueue[_core.TokenEvent | None]


class EventRouter:
    """Routes the events of one engine by request. Every method may be called from any thread."""

    def __init__(self, engine: _core.Engine) -> None:
        self._engine = engine
        self._asking = threading.RLock()  # held by the thread that asks the engine
        # Guards what follows. Reentrant: within it the garbage collector may drop a stream, which
        # then leaves.
        self._lock = threading.RLock()
        self._arrived: deque[_core.TokenEvent] = deque()  # in no inbox yet
        self._inboxes: dict[int, Inbox] = {}
        self._waiting: set[ThreadInbox] = set()  # of threads that wait for another one to ask
        self.is_closed = False

    def submit(
        self, inbox: Inbox, request_ids: list[int], requests: Sequence[_core.EngineRequest]
    ) -> None:
        """Adds requests, all or none, whose events go to `inbox`, and their ids to
        `request_ids`."""
        with self._lock:  # nothing is routed before the inbox is known
            self.check_open()
            num_before = len(request_ids)
            request_ids.extend(chain.from_iterable(map(self._engine.add_requests, (requests,))))
            self._inboxes.update(dict.fromkeys(request_ids[num_before:], inbox))

    def wait(
        self, inbox: ThreadInbox, events: list[_core.TokenEvent], timeout_s: float = POLL_S
    ) -> None:
        """Adds what comes for `inbox` to `events`, or nothing after a short while without."""
        if _empty(inbox, events):
            return
        self.check_open()
        if not self.ask(timeout_s):
            with self._lock:
                self._waiting.add(inbox)
            try:
                with suppress(Empty):
                    events.extend(filter(None, map(inbox.get, (True,), (timeout_s,))))
            finally:
                with self._lock:
                    self._waiting.discard(inbox)
        _empty(inbox, events)

    def ask(self, timeout_s: float) -> bool:
        """Asks the engine for events and routes them, after waiting for the first; False where
        another thread is at it."""
        acquired: list[bool] = []
        try:
            acquired.extend(map(self._asking.acquire, (False,)))
            if not acquired[0]:
                return False
            if not self._arrived:  # left by a thread that was interrupted
                batches = map(self._engine.wait_events, (timeout_s,))
                self._arrived.extend(chain.from_iterable(batches))
            self._route()
            return True
        finally:
            if acquired and acquired[0]:
                self._asking.release()

    def lend(self, connection: _core.LentConnection) -> bool:
        """Has the engine write the lines of its requests instead of giving their events out; False
        where any event is on its way, which goes first."""
        if not self._asking.acquire(blocking=False):
            return False
        try:
            return not self._arrived and self._engine.lend(connection)
        finally:
            self._asking.release()

    def adopt(self, inbox: Inbox, request_ids: Iterable[int]) -> None:
        """Sends what still comes for these requests to `inbox`: a submit() that was interrupted
        between its two steps knows the id and has not said where its events go."""
        with self._lock:
            self._inboxes.update(dict.fromkeys(request_ids, inbox))

    def leave(self, request_ids: Iterable[int]) -> None:
        """Drops what may still come for these requests, and lets another thread ask."""
        with self._lock:
            for request_id in request_ids:
                self._inboxes.pop(request_id, None)
            waiting = list(self._waiting)
        for inbox in waiting:
            inbox.put(None)
        if notice := self._engine.take_notice():
            _log.warning("%s", notice)

    def close(self) -> None:
        """Ends every wait with InvalidArgument; no thread is in the engine afterwards."""
        with self._lock:
            self.is_closed = True
            inboxes = set(self._inboxes.values())
        with self._asking:
            pass
        for inbox in inboxes:
            inbox.put(None)

    def check_open(self) -> None:
        """Raises InvalidArgument once closed."""
        if self.is_closed:
            raise InvalidArgument("this LLM is closed; make a new one")

    def _route(self) -> None:
        with self._lock:
            while self._arrived:
                event = self._arrived[0]
                inbox = self._inboxes.get(event.request_id)
                if inbox is None:
                    self._arrived.popleft()
                else:
                    deque(map(inbox.put, map(deque.popleft, (self._arrived,))), maxlen=0)


def _empty(inbox: ThreadInbox, events: list[_core.TokenEvent]) -> bool:
    """Moves all that is there; whether that was anything."""
    num_before = len(events)
    with suppress(Empty):
        while True:
            events.extend(iter(inbox.get_nowait, None))
    return len(events) > num_before
