"""Hands the engine's events to whoever waits for them.

There is no thread behind it: of the threads that wait, one asks the engine and routes what comes,
for itself and for the others. Ctrl-C can end that thread between any two bytecodes, but not within
one call of a C function; so every move of an event or id from one place to the next is one such
call, and nothing is lost or given twice.
"""

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from queue import Empty, SimpleQueue

from llmserve import _core
from llmserve.errors import InvalidArgument

# Bounds how long Ctrl-C goes unnoticed and how long a waiting thread takes to step in for one that
# stopped asking without a word (a stream that nobody reads on).
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """The arguments of the engine's add_request, in its order."""

    prompt_token_ids: list[int]
    params: _core.SamplingParams
    priority: int
    cache_salt: str
    is_streamed: bool


Inbox = SimpleQueue[_core.TokenEvent | None]  # None only wakes the reader


class EventRouter:
    """Routes the events of one engine by request. Every method may be called from any thread."""

    def __init__(self, engine: _core.Engine) -> None:
        self._engine = engine
        self._asking = threading.Lock()  # held by the thread that asks the engine
        self._lock = threading.Lock()  # guards what follows
        self._arrived: deque[_core.TokenEvent] = deque()  # in no inbox yet
        self._inboxes: dict[int, Inbox] = {}
        self._is_closed = False

    def submit(self, inbox: Inbox, request_ids: list[int], request: EngineRequest) -> None:
        """Adds a request whose events go to `inbox`, and its id to `request_ids`."""
        with self._lock:  # nothing is routed before the inbox is known
            if self._is_closed:
                raise _closed_error()
            arguments = (
                (request.prompt_token_ids,),
                (request.params,),
                (request.priority,),
                (request.cache_salt,),
                (request.is_streamed,),
            )
            request_ids.extend(map(self._engine.add_request, *arguments))
            self._inboxes[request_ids[-1]] = inbox

    def wait(self, inbox: Inbox) -> _core.TokenEvent | None:
        """The next event of `inbox`, or None after a short while without one."""
        try:
            return inbox.get_nowait()
        except Empty:
            pass
        if self._is_closed:
            raise _closed_error()
        try:
            return inbox.get_nowait() if self._ask() else inbox.get(timeout=_POLL_S)
        except Empty:
            return None

    def adopt(self, inbox: Inbox, request_ids: Iterable[int]) -> None:
        """Sends what still comes for these requests to `inbox`: a submit() that was interrupted
        between its two steps knows the id and has not said where its events go."""
        with self._lock:
            self._inboxes.update(dict.fromkeys(request_ids, inbox))

    def leave(self, request_ids: list[int]) -> None:
        """Drops what may still come for these requests, and lets another thread ask."""
        with self._lock:
            for request_id in request_ids:
                self._inboxes.pop(request_id, None)
            waiting = set(self._inboxes.values())
        for inbox in waiting:
            inbox.put(None)

    def close(self) -> None:
        """Ends every wait with InvalidArgument; no thread is in the engine afterwards."""
        with self._lock:
            self._is_closed = True
        with self._asking:
            pass
        self.leave([])

    def _ask(self) -> bool:
        """Asks the engine for events and routes them, unless another thread is at it."""
        acquired: list[bool] = []
        try:
            acquired.extend(map(self._asking.acquire, (False,)))
            if not acquired[0]:
                return False
            if not self._arrived:  # left by a thread that was interrupted
                batches = map(self._engine.wait_events, (_POLL_S,))
                self._arrived.extend(chain.from_iterable(batches))
            self._route()
            return True
        finally:
            if acquired and acquired[0]:
                self._asking.release()

    def _route(self) -> None:
        with self._lock:
            while self._arrived:
                event = self._arrived[0]
                inbox = self._inboxes.get(event.request_id)
                if inbox is None:
                    self._arrived.popleft()
                else:
                    deque(map(inbox.put, map(deque.popleft, (self._arrived,))), maxlen=0)


def _closed_error() -> InvalidArgument:
    return InvalidArgument("this LLM is closed; make a new one")
