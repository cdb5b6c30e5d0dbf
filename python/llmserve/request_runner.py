"""Runs requests on an engine: gives them in, gathers what comes out, aborts what is left."""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from queue import SimpleQueue

from llmserve import _core
from llmserve.errors import LLMServeError
from llmserve.event_router import EngineRequest, EventRouter, Inbox
from llmserve.request_state import RequestState

# How long an interrupted call waits for its requests to end before it gives the interruption on.
_DRAIN_S = 5.0


class RequestRunner:
    """The one user of an engine. Every method may be called from any thread."""

    def __init__(self, engine: _core.Engine, max_model_len: int) -> None:
        self._engine = engine
        self._router = EventRouter(engine)
        self._max_model_len = max_model_len

    def run(self, states: Sequence[RequestState], is_streamed: bool) -> Iterator[RequestState]:
        """Runs the requests and yields the one that has changed, until all are finished: at every
        step if streamed, else when one of its samples ends. Leaving early, by whatever exception,
        aborts those that are not."""
        inbox: Inbox = SimpleQueue()
        request_ids: list[int] = []
        by_id: dict[int, RequestState] = {}
        try:
            for state in states:
                self._router.submit(inbox, request_ids, self._engine_request(state, is_streamed))
                state.request_id = request_ids[-1]
                by_id[state.request_id] = state
            num_unfinished = len(states)
            while num_unfinished > 0:
                event = self._router.wait(inbox)
                if event is None:
                    continue
                state = by_id[event.request_id]
                state.apply(event)
                num_unfinished -= state.is_finished
                yield state
        finally:
            finished = {state.request_id for state in states if state.is_finished}
            self._abandon(inbox, set(request_ids) - finished)
            self._router.leave(request_ids)

    def close(self) -> None:
        """Ends the engine. Calls that are waiting in other threads raise InvalidArgument."""
        self._router.close()
        self._engine.close()

    def _engine_request(self, state: RequestState, is_streamed: bool) -> EngineRequest:
        params = state.params.to_core(max_tokens=self._max_model_len)
        params.detokenize = params.detokenize and state.has_tokenizer
        prompt = state.prompt
        return EngineRequest(
            prompt.token_ids, params, state.priority, prompt.cache_salt, is_streamed
        )

    def _abandon(self, inbox: Inbox, unfinished: set[int]) -> None:
        """Aborts requests, and waits until the engine has let go of them."""
        self._router.adopt(inbox, unfinished)
        for request_id in unfinished:
            self._engine.abort(request_id)
        deadline = time.monotonic() + _DRAIN_S
        with suppress(LLMServeError):  # closed meanwhile
            while unfinished and time.monotonic() < deadline:
                event = self._router.wait(inbox)
                if event is not None and event.is_request_finished:
                    unfinished.discard(event.request_id)
