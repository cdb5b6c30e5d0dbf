"""Runs requests on an engine: gives them in, gathers what comes out, aborts what is left."""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from queue import SimpleQueue

from llmserve import _core
from llmserve.errors import LLMServeError, QueueFull
from llmserve.requests.event_router import POLL_S, EventRouter, ThreadInbox
from llmserve.requests.logits_processors import LogitsProcessorRunner
from llmserve.requests.state import RequestState

# How long an interrupted call waits for its requests to end before it gives the interruption on.
_DRAIN_S = 5.0
# Requests that go in together: the engine has work while the next are made ready.
_MAX_AT_ONCE = 1024


class RequestRunner:
    """The one user of an engine. Every method may be called from any thread."""

    def __init__(self, engine: _core.Engine) -> None:
        self.engine = engine
        self.router = EventRouter(engine)
        self._processors = LogitsProcessorRunner()

    def run(self, states: Sequence[RequestState], is_streamed: bool) -> Iterator[RequestState]:
        """Runs the requests and yields the one that has changed, until all are finished: at every
        step if streamed, else when one of its samples ends. They go in together, so that the same
        step finds them, or as room appears in the engine's queue. Leaving early, by whatever
        exception, aborts those that are not finished."""
        inbox: ThreadInbox = SimpleQueue()
        request_ids: list[int] = []
        by_id: dict[int, RequestState] = {}
        outside = deque(states)
        events: list[_core.TokenEvent] = []
        num_unfinished = len(states)
        try:
            while num_unfinished > 0:
                self.check_may_wait()
                if outside:
                    room = self.engine.wait_for_room(POLL_S)
                    batch = list(islice(outside, min(room, _MAX_AT_ONCE)))
                    requests = [self.engine_request(state, is_streamed) for state in batch]
                    with suppress(QueueFull):  # another thread was quicker
                        self.router.submit(inbox, request_ids, requests)
                        for request_id in request_ids[len(by_id) :]:
                            state = outside.popleft()
                            state.request_id = request_id
                            by_id[request_id] = state
                events = []
                self.router.wait(inbox, events, 0.0 if outside else POLL_S)
                for event in events:
                    state = by_id[event.request_id]
                    state.apply(event)
                    state.make_rows()  # while the engine runs the others
                    num_unfinished -= state.is_finished
                    yield state
        finally:
            finished = {state.request_id for state in states if state.is_finished}
            # Of those that were interrupted on their way to their states nothing more comes.
            finished |= {event.request_id for event in events if event.is_request_finished}
            self.abandon(inbox, set(request_ids) - finished)
            self.router.leave(request_ids)

    def check_may_wait(self) -> None:
        """Raises InvalidArgument in one of the engine's own logits processors."""
        self._processors.check_may_wait()

    def engine_request(self, state: RequestState, is_streamed: bool) -> _core.EngineRequest:
        """What the engine takes for it, which its state then keeps no longer."""
        request, state.engine_request = state.engine_request or state.to_core(), None
        request.is_streamed = is_streamed
        if state.processors:
            # The engine copies them, and lets go of each request's own with its request.
            request.params.logits_processors = [self._processors.attach(state.processors)]
        return request

    def abandon(self, inbox: ThreadInbox, request_ids: Iterable[int]) -> None:
        """Aborts requests, and waits until the engine has let go of them."""
        unfinished = set(request_ids)
        self.router.adopt(inbox, unfinished)
        for request_id in unfinished:
            self.engine.abort(request_id)
        deadline = time.monotonic() + _DRAIN_S
        with suppress(LLMServeError):  # closed meanwhile
            while unfinished and time.monotonic() < deadline:
                events: list[_core.TokenEvent] = []
                self.router.wait(inbox, events)
                unfinished -= {event.request_id for event in events if event.is_request_finished}

    def close(self) -> None:
        """Ends the engine. Calls that are waiting in other threads raise InvalidArgument."""
        self.router.close()
        self.engine.close()
        self._processors.close()
