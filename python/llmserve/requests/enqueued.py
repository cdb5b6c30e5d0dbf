"""Requests that were given in without waiting, until somebody asks for all their outputs."""

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from llmserve import _core
from llmserve.requests.event_router import ThreadInbox
from llmserve.requests.runner import RequestRunner
from llmserve.requests.state import RequestState


class EnqueuedRequests:
    """Those of one LLM. Every method may be called from any thread.

    Ctrl-C loses nothing: events stay as they came until the outputs of all have been made, and each
    wait makes them anew.
    """

    def __init__(self, runner: RequestRunner) -> None:
        self._runner = runner
        self._inbox: ThreadInbox = SimpleQueue()
        self._waiting = threading.Lock()  # held by the thread that waits
        self._states: dict[int, RequestState] = {}  # in the order of their coming; without outputs
        self._arrived: list[_core.TokenEvent] = []  # from the inbox

    def __len__(self) -> int:
        return len(self._states)

    def add(self, states: Sequence[RequestState]) -> None:
        """Queues all of the requests or, by whatever exception, none."""
        request_ids: list[int] = []
        try:
            requests = [self._runner.engine_request(state, is_streamed=False) for state in states]
            self._runner.router.submit(self._inbox, request_ids, requests)
            for state, request_id in zip(states, request_ids, strict=True):
                state.request_id = request_id
            self._states.update(zip(request_ids, states, strict=True))
        except BaseException:
            self._runner.abandon(SimpleQueue(), request_ids)
            self._runner.router.leave(request_ids)
            raise

    def wait(self, on_finished: Callable[[RequestState], None]) -> list[RequestState]:
        """Waits for all that have been added, and lets go of them."""
        self._runner.check_may_wait()
        with self._waiting:
            states = {request_id: state.renewed() for request_id, state in self._states.items()}
            num_unfinished, num_applied = len(states), 0
            while True:
                for event in self._arrived[num_applied:]:
                    num_applied += 1
                    state = states.get(event.request_id)
                    if state is None:  # added since
                        continue
                    state.apply(event)
                    state.make_rows()  # while the engine runs the others
                    num_unfinished -= state.is_finished
                    if state.is_finished:
                        on_finished(state)
                if num_unfinished == 0:
                    break
                self._runner.router.wait(self._inbox, self._arrived)
            self._runner.router.leave(states)
            self._arrived = [e for e in self._arrived if e.request_id not in states]
            for request_id in states:
                del self._states[request_id]
            return list(states.values())
