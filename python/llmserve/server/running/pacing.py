"""Delivers a stream no faster than its tier allows: what the engine gives sooner waits here. Of
tokens that came together, in one event, each waits for its own time."""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import cached_property
from typing import Any, Protocol, cast

from llmserve import _core
from llmserve.requests.state import RequestState

# What is due within it is due: uvloop's timers count whole milliseconds, and may be that early.
_EARLY_S = 0.001


class PacedStream(Protocol):
    """A prompt's events on their way to its state."""

    state: RequestState

    def deliver(self, event: _core.TokenEvent) -> None:
        """Gives the state an event."""


class _HeldEvent:
    """An event of which a part has gone on, or none."""

    def __init__(self, event: _core.TokenEvent, token_text: Callable[[int], str]) -> None:
        self.event = event
        self.token_ids = event.token_ids
        self.num_given = 0
        self._token_text = token_text

    @property
    def num_left(self) -> int:
        """Tokens."""
        return len(self.token_ids) - self.num_given

    # Of the engine's lists each access makes new ones.
    @cached_property
    def text(self) -> str:
        return self.event.text

    @cached_property
    def logprobs(self) -> list[_core.TokenLogprob]:
        return self.event.logprobs

    @cached_property
    def top_logprobs(self) -> list[list[_core.TokenLogprob]]:
        return self.event.top_logprobs

    @cached_property
    def text_ends(self) -> list[int]:
        """Where the text of each token ends. Evenly spread where that cannot be told, since some of
        it came before its last bytes had, or waited for a stop string that it is not."""
        ends, text = [], self.text
        end = 0
        for token_id in self.token_ids:
            piece = self._token_text(token_id)
            if text.startswith(piece, end):  # or it is a special token, which has no text
                end += len(piece)
            ends.append(end)
        if end == len(text):
            return ends
        return [len(text) * (idx + 1) // len(ends) for idx in range(len(ends))]


class _Part:
    """Some of an event's tokens, to a RequestState an event: all that is the same of each part is
    the event's own, and the end is the last part's."""

    def __init__(self, held: _HeldEvent, num_tokens: int, is_request_finished: bool) -> None:
        begin, end = held.num_given, held.num_given + num_tokens
        self._held = held
        self._rows = slice(begin, end)
        self.token_ids = held.token_ids[begin:end]
        self.is_request_finished = is_request_finished
        self.text = held.text
        if num_tokens < len(held.token_ids):
            ends = held.text_ends
            self.text = held.text[ends[begin - 1] if begin else 0 : ends[end - 1]]
        if end < len(held.token_ids):
            self.finish_reason: str | None = None
            self.stop_reason: int | str | None = None
            self.error = ""

    @property
    def logprobs(self) -> list[_core.TokenLogprob]:
        return self._held.logprobs[self._rows]

    @property
    def top_logprobs(self) -> list[list[_core.TokenLogprob]]:
        return self._held.top_logprobs[self._rows]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._held.event, name)


class _Lane:
    """One sample's events that are held, and when the next of their tokens is due."""

    def __init__(self) -> None:
        self.held: deque[_HeldEvent] = deque()
        self.next_at = 0.0


class Pacer:
    """Of one prompt's stream. Each sample's first token goes on at once, each later one as soon as
    the rate allows; an end is not held back longer than the tokens before it. Used on the loop's
    thread."""

    def __init__(
        self, stream: PacedStream, tokens_per_s: float, token_text: Callable[[int], str]
    ) -> None:
        """tokens_per_s: of each sample. token_text: of one token alone, by its id."""
        self._stream = stream
        self._token_text = token_text
        self._s_per_token = 1 / tokens_per_s
        self._loop = asyncio.get_running_loop()
        self._lanes = [_Lane() for _ in range(stream.state.params.n)]
        self._num_held = 0  # events
        self._has_end = False  # the request's last event has come
        self._timer: asyncio.Handle | None = None
        self._rings_at = 0.0  # while there is a timer
        self._is_open = False

    def take(self, event: _core.TokenEvent) -> bool:
        """Whether the event was given on, or is kept for later."""
        if self._is_open:
            return False
        now = self._loop.time()
        lane = self._lanes[event.sample_index]
        if not lane.held:
            lane.next_at = max(lane.next_at, now)
        lane.held.append(_HeldEvent(event, self._token_text))
        self._num_held += 1
        self._has_end = self._has_end or event.is_request_finished
        self._give_due(lane, now)
        self._arm()
        return True

    def release(self) -> None:
        """Gives on what is held, and holds nothing more back."""
        self._is_open = True
        for lane in self._lanes:
            while lane.held:
                self._give(lane, lane.held[0].num_left)
        self._arm()

    def _ring(self) -> None:
        self._timer = None
        now = self._loop.time()
        for lane in self._lanes:
            self._give_due(lane, now)
        self._arm()

    def _arm(self) -> None:
        at = min((lane.next_at for lane in self._lanes if lane.held), default=None)
        if self._timer is not None:
            if at == self._rings_at:
                return
            self._timer.cancel()
        self._timer = None
        if at is not None:
            self._timer, self._rings_at = self._loop.call_at(at, self._ring), at

    def _give_due(self, lane: _Lane, now: float) -> None:
        """What a late timer has let wait goes on together: the rate is that of the whole."""
        while lane.held:
            num_left = lane.held[0].num_left
            if num_left and lane.next_at > now + _EARLY_S:
                return
            num_due = 1 + max(int((now - lane.next_at) / self._s_per_token), 0)
            num_tokens = min(num_due, num_left)
            lane.next_at += num_tokens * self._s_per_token
            self._give(lane, num_tokens)

    def _give(self, lane: _Lane, num_tokens: int) -> None:
        held = lane.held[0]
        if num_tokens == held.num_left:
            lane.held.popleft()
            self._num_held -= 1
        # A sample's end may overtake another's tokens: the request has ended with its last.
        part = _Part(held, num_tokens, self._has_end and not self._num_held)
        held.num_given += num_tokens
        self._stream.deliver(cast(_core.TokenEvent, part))
