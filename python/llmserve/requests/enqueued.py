"""Requests that were given in without waiting, until somebody asks for all their outputs."""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from queue import SimpleQueue

from llmserve import _core
from llmserve.outputs import RequestOutputs
from llmserve.requests.event_router import ThreadInbox
from llmserve.requests.progress import Progress
from llmserve.requests.runner import RequestRunner
from llmserve.requests.state import RequestState


class EnqueuedRequests:
    """Those of one LLM. Every method may be called from any thread.

    Ctrl-C loses nothing: events stay as they came until all outputs have been made and handed over,
    and each wait makes the outputs anew. As in EventRouter, who is added or let go of is so by one
    call of a C function.
    """

    def __init__(self, runner: RequestRunner) -> None:
        self._runner = runner
        self._inbox: ThreadInbox = SimpleQueue()
        self._waiting = threading.RLock()  # held by the thread that waits
        self._states: dict[int, RequestState] = {}  # by id, which grows; without outputs
        self._arrived: list[_core.TokenEvent] = []  # from the inbox

    def __len__(self) -> int:
        return len(self._states)

    def add(self, states: Sequence[RequestState]) -> list[str]:
        """Queues all of the requests or, by whatever exception, none. Returns their ids."""
        request_ids: list[int] = []
        try:
            requests = [self._runner.engine_request(state, is_streamed=False) for state in states]
            self._runner.router.submit(self._inbox, request_ids, requests)
            for state, request_id in zip(states, request_ids, strict=True):
                state.request_id = request_id
            self._states.update(zip(request_ids, states, strict=True))
            return [str(request_id) for request_id in request_ids]
        except BaseException:
            for request_id in request_ids:
                self._states.pop(request_id, None)
            self._runner.abandon(SimpleQueue(), request_ids)
            self._runner.router.leave(request_ids)
            raise

    def wait(self, progress: Progress) -> RequestOutputs:
        """The outputs of all that have been added, once they are there; lets go of the requests."""
        self._runner.check_may_wait()
        taken: dict[int, RequestState] = {}
        arrived = self._arrived
        try:
            with self._waiting:
                taken, arrived = dict(sorted(self._states.items())), self._arrived
                states = {request_id: state.renewed() for request_id, state in taken.items()}
                self._apply_all(states, progress)
                outputs = RequestOutputs(state.output() for state in states.values())
                progress.close()
                self._runner.router.leave(states)
                others = [event for event in arrived if event.request_id not in states]
                deque(map(self._states.pop, states), maxlen=0)
                self._arrived = others
            return outputs
        except BaseException:  # they are waited for again, with what has come of them
            self._states.update(taken)
            self._arrived = arrived
            progress.close()
            raise

    def _apply_all(self, states: Mapping[int, RequestState], progress: Progress) -> None:
        """Brings the states to their ends, with events that have arrived and that come."""
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
                    progress.finish(state)
            if num_unfinished == 0:
                return
            self._runner.router.wait(self._inbox, self._arrived)
