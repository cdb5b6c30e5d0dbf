"""One request of an event loop: what the engine says of it, gathered into its state."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable

from llmserve import _core
from llmserve.common.text_threads import MAX_ROWS_IN_LOOP, on_answer_thread
from llmserve.requests.runner import RequestRunner
from llmserve.requests.state import RequestState


class AsyncStream:
    """One request of one event loop. What comes is added to its state at once, so that a reader who
    falls behind finds one larger piece of news and not many. Used on the loop's thread, but for
    put()."""

    def __init__(
        self,
        runner: RequestRunner,
        state: RequestState,
        has_news: asyncio.Event | None = None,
    ) -> None:
        """has_news: set whenever the state has changed; None takes one of its own."""
        self.state = state
        self._runner = runner
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._has_news = asyncio.Event() if has_news is None else has_news
        # Takes an event before the state does; whether it has.
        self.direct: Callable[[_core.TokenEvent], bool] = _takes_none
        self._request_ids: list[int] = []
        # In the order in which the engine said it; what the loop's own thread takes must not
        # overtake what another loop's thread has put here before.
        self._arrived: deque[_core.TokenEvent | None] = deque()

    def start(self, is_streamed: bool) -> None:
        """Gives the request to the engine. Raises QueueFull, InvalidArgument."""
        self._runner.check_may_wait()
        request = self._runner.engine_request(self.state, is_streamed)
        self._runner.router.submit(self, self._request_ids, [request])
        self.state.request_id = self._request_ids[-1]

    async def wait(self) -> None:
        """Until the state has changed, and has the rows of what has come, if those are many. Raises
        InvalidArgument once the engine is closed."""
        await self._has_news.wait()
        if (num_rows := self.state.num_unmade_rows) > MAX_ROWS_IN_LOOP:
            await on_answer_thread(num_rows, self.state.make_rows)
        self._has_news.clear()  # here: the reader finds what came meanwhile, too
        self.check_open()

    def check_open(self) -> None:
        """Raises InvalidArgument if the engine was closed before the request's end."""
        if not self.state.is_finished:
            self._runner.router.check_open()

    def record(self) -> _core.RequestRecord | None:
        """The engine's record of it, for as long as it has one: when it first ran, what it got."""
        return self._runner.engine.request_record(self.state.request_id)

    def abort(self) -> None:
        """Ends the request: its last event says "abort"."""
        if self._request_ids and not self.state.is_finished:
            self._runner.engine.abort(self._request_ids[0])

    def put(self, item: _core.TokenEvent | None, /) -> None:
        """As an inbox of EventRouter; None wakes the reader."""
        self._arrived.append(item)
        if threading.get_ident() == self._thread_id:
            self._apply()
            return
        try:
            self._loop.call_soon_threadsafe(self._apply)
        except RuntimeError:  # the loop was closed under its request
            self._runner.engine.abort(self.state.request_id)

    @property
    def is_behind(self) -> bool:
        """Whether something has come that its reader has not got."""
        return bool(self._arrived) or self.state.has_news

    def lend(self, connection: _core.LentConnection) -> bool:
        """Has the engine write what comes to its reader's connection, up to the next event that is
        more than text, which comes here; False where something is on its way."""
        return self._runner.router.lend(connection)

    def take_back(self, connection: _core.LentConnection) -> _core.WrittenLines:
        """Nothing is written to it any more."""
        return self._runner.engine.take_back(connection)

    def deliver(self, event: _core.TokenEvent) -> None:
        """Gives the state an event that `direct` has kept. On the loop's thread."""
        self.state.apply(event)
        self._has_news.set()

    def close(self) -> bool:
        """Drops what may still come, and aborts the request if it is not finished: its blocks are
        free after the running step. Whether it was aborted."""
        self._runner.router.leave(self._request_ids)
        self.direct = _takes_none  # or it and who took its events would hold each other
        is_left = bool(self._request_ids) and not self.state.is_finished
        if is_left:
            self.abort()
        return is_left

    def _apply(self) -> None:
        has_news = False
        while self._arrived:
            event = self._arrived.popleft()
            if event is not None:
                if self.direct(event):
                    continue
                self.state.apply(event)
            has_news = True
        if has_news:
            self._has_news.set()


def _takes_none(_: _core.TokenEvent) -> bool:
    return False
