"""Requests that somebody runs step by step: what has come of them since the last step."""

import threading
from collections.abc import Iterable
from queue import SimpleQueue

from llmserve import _core
from llmserve.errors import InvalidArgument
from llmserve.requests.event_router import ThreadInbox
from llmserve.requests.runner import RequestRunner
from llmserve.requests.state import RequestState
from llmserve.sampling_params import RequestOutputKind


class SteppedRequests:
    """Those of one LLM, by the names that their user gave. Every method may be called from any
    thread. Ctrl-C while a step waits loses nothing."""

    def __init__(self, runner: RequestRunner) -> None:
        self._runner = runner
        self._inbox: ThreadInbox = SimpleQueue()
        self._stepping = threading.Lock()  # held by the thread that steps
        self._states: dict[int, RequestState] = {}  # by the engine's id, in the order of coming
        self._arrived: list[_core.TokenEvent] = []  # from the inbox

    def __len__(self) -> int:
        return len(self._states)

    def add(self, name: str, state: RequestState) -> None:
        """Queues a request. Raises InvalidArgument where one of that name runs, QueueFull."""
        if any(other.name == name for other in self._states.values()):
            raise InvalidArgument(f"request_id {name!r} is running; use another")
        state.name = name
        is_streamed = state.params.output_kind is not RequestOutputKind.FINAL_ONLY
        request_ids: list[int] = []
        try:
            request = self._runner.engine_request(state, is_streamed)
            self._runner.router.submit(self._inbox, request_ids, [request])
            state.request_id = request_ids[0]
            self._states[state.request_id] = state
        except BaseException:
            for request_id in request_ids:
                self._states.pop(request_id, None)
            self._runner.abandon(SimpleQueue(), request_ids)
            self._runner.router.leave(request_ids)
            raise

    def abort(self, names: Iterable[str]) -> None:
        """Ends requests, of which nothing more comes; names that do not run are ignored."""
        wanted = set(names)
        for request_id, state in list(self._states.items()):
            if state.name in wanted:
                self._runner.engine.abort(request_id)
                self._runner.router.leave([request_id])
                del self._states[request_id]

    def step(self) -> list[RequestState]:
        """Waits until something has come, and gives the requests that have changed; those that have
        finished are let go of. Nothing at once where no request runs."""
        self._runner.check_may_wait()
        with self._stepping:
            while self._states and not self._arrived:
                self._runner.router.wait(self._inbox, self._arrived)
            changed: dict[int, RequestState] = {}
            while self._arrived:
                event = self._arrived.pop(0)
                state = self._states.get(event.request_id)
                if state is None:  # aborted since
                    continue
                state.apply(event)
                changed[event.request_id] = state
            for request_id, state in changed.items():
                if state.is_finished:
                    self._runner.router.leave([request_id])
                    self._states.pop(request_id, None)
        is_final = RequestOutputKind.FINAL_ONLY
        return [
            state
            for state in changed.values()
            if state.is_finished or state.params.output_kind is not is_final
        ]
