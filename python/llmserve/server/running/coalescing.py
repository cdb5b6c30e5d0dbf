"""Identical requests that meet share one run in the engine. Only those whose answers are the same
in any case are shared: greedy ones and those with a seed, of the same API key and cache salt."""

import asyncio
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from llmserve import _core
from llmserve.async_llm import AsyncLLM
from llmserve.requests.async_stream import AsyncStream
from llmserve.requests.state import RequestState

_GREEDY = 1e-5  # temperatures below take the most likely token


class SharedStream:
    """One reader of a shared run: to a server what AsyncStream is."""

    def __init__(self, run: "_SharedRun", state: RequestState, has_news: asyncio.Event) -> None:
        self.state = state
        self.has_news = has_news
        self.direct: Callable[[_core.TokenEvent], bool] = _takes_none
        self._run = run

    @property
    def is_behind(self) -> bool:
        """Whether something has come that its reader has not got."""
        return self.state.has_news

    def deliver(self, event: _core.TokenEvent) -> None:
        """Adds an event to the state."""
        self.state.apply(event)
        self.has_news.set()

    def put(self, event: _core.TokenEvent) -> None:
        """What the engine gives."""
        if not self.direct(event):
            self.deliver(event)

    def check_open(self) -> None:
        """Raises InvalidArgument if the engine was closed before the request's end."""
        self._run.leader.check_open()

    def record(self) -> _core.RequestRecord | None:
        """The engine's record of the shared run."""
        return self._run.leader.record()

    def abort(self) -> None:
        """Ends this reader's request; the others go on."""
        if not self.state.is_finished:
            self.state.cut_short()
            self._run.leave(self)
            self.has_news.set()


def _takes_none(_: _core.TokenEvent) -> bool:
    return False


class _Bell(asyncio.Event):
    """The leader's: rings for all readers, also when the engine was closed."""

    def __init__(self, run: "_SharedRun") -> None:
        super().__init__()
        self._run = run

    def set(self) -> None:
        for reader in self._run.readers:
            reader.has_news.set()


class _SharedRun:
    """A request in the engine, and who reads it."""

    def __init__(self, llm: AsyncLLM, state: RequestState, name: str, is_streamed: bool) -> None:
        """Raises what AsyncLLM.running does."""
        self.readers: list[SharedStream] = []
        self.is_finished = False
        self.is_left = False  # by all, before its end
        self._events: list[_core.TokenEvent] = []  # all of them, for who comes later
        self._in_engine = ExitStack()
        running = llm.running(state, name, is_streamed, _Bell(self))
        self.leader: AsyncStream = self._in_engine.enter_context(running)
        self.leader.direct = self._take

    def join(self, state: RequestState, has_news: asyncio.Event) -> SharedStream:
        """From the beginning, whatever has come already."""
        reader = SharedStream(self, state, has_news)
        state.request_id, state.name = self.leader.state.request_id, self.leader.state.name
        for event in self._events:
            reader.put(event)
        self.readers.append(reader)
        return reader

    def leave(self, reader: SharedStream) -> None:
        """The last one out ends the request."""
        reader.direct = _takes_none
        if reader in self.readers:
            self.readers.remove(reader)
        if not self.readers:
            self.is_left = not self.is_finished
            self._in_engine.close()

    def _take(self, event: _core.TokenEvent) -> bool:
        self._events.append(event)
        self.is_finished = event.is_request_finished
        for reader in list(self.readers):
            reader.put(event)
        return False


class Coalescer:
    """All shared runs of a server. Used on the loop's thread."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._runs: dict[Hashable, _SharedRun] = {}
        self.num_coalesced = 0

    async def wait(self) -> None:
        """A request gives others like it the time to arrive."""
        if self._window_s:
            await asyncio.sleep(self._window_s)

    def running(
        self,
        llm: AsyncLLM,
        state: RequestState,
        name: str,
        is_streamed: bool,
        has_news: asyncio.Event,
        tenant: str,
    ) -> AbstractContextManager[AsyncStream | SharedStream]:
        """As AsyncLLM.running, in a run that is under way if there is one."""
        if self._window_s and _is_determined(state):
            return self._shared(llm, state, name, is_streamed, has_news, tenant)
        return llm.running(state, name, is_streamed, has_news)

    @contextmanager
    def _shared(
        self,
        llm: AsyncLLM,
        state: RequestState,
        name: str,
        is_streamed: bool,
        has_news: asyncio.Event,
        tenant: str,
    ) -> Iterator[SharedStream]:
        key = (id(llm), tenant, is_streamed, *_identity(state))
        run = self._runs.get(key)
        if run is None or run.is_left:
            run = self._runs[key] = _SharedRun(llm, state.renewed(), name, is_streamed)
        else:
            self.num_coalesced += 1
        reader = run.join(state, has_news)
        try:
            yield reader
        finally:
            run.leave(reader)
            if not run.readers and self._runs.get(key) is run:
                self._forget(key, run)

    def _forget(self, key: Hashable, run: _SharedRun) -> None:
        """What ended well may still be met by those that wait out their window."""
        if not run.is_finished:
            del self._runs[key]
            return

        def forget() -> None:
            if self._runs.get(key) is run and not run.readers:
                del self._runs[key]

        asyncio.get_running_loop().call_later(self._window_s, forget)


def _is_determined(state: RequestState) -> bool:
    params = state.params
    is_sampled = state.pooling is None and state.beam_search is None
    return is_sampled and (params.temperature < _GREEDY or params.seed is not None)


def _identity(state: RequestState) -> tuple[Hashable, ...]:
    prompt = state.prompt
    return (tuple(prompt.token_ids), prompt.cache_salt, state.priority, repr(state.asked))
