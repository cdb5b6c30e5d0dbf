"""Who is let in to a model: a bound on what waits, by sequences and by tokens, and when to come
again. What is there decides and not what comes, so that a large batch gets in as easily as a single
prompt; what is there may thus be more than the bound by one request."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from llmserve.server.http.errors import ApiError
from llmserve.server.models import ServedModel
from llmserve.server.running.job import Job
from llmserve.server.settings import ServerSettings

# What finished in this time is the rate by which a wait is estimated.
_RATE_WINDOW_S = 30.0
# Of an estimate, in seconds: a client that comes again every second does no harm, and one told to
# come in more than a minute would miss what has changed by then.
_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 60.0
# Of the sequences that may wait, what one request takes up at most: a batch of 2,048 texts would
# keep all others out until its last, though a text may be a word. Its tokens count in full.
_MAX_SHARE = 0.5


class Admission:
    """Counts what is in one engine, and what is made ready for it. Used on the loop's thread."""

    def __init__(self, settings: ServerSettings, model: ServedModel) -> None:
        self._settings = settings
        self._llm = model.llm
        self.num_requests = 0  # sequences
        self._num_seats = 0  # that these take up
        self._num_jobs = 0
        self._num_reserved = 0  # requests that are made ready
        self.num_tokens = 0
        self.num_refused = 0
        self._left: deque[tuple[float, int]] = deque()  # when, and how many tokens they had

    @property
    def is_full(self) -> bool:
        """Whether a request that came now would be refused."""
        return self._is_full(self._num_reserved)

    def refusal(self) -> ApiError:
        """What a request is told where too much waits (429); counts it."""
        self.num_refused += 1
        max_seats, max_tokens = self._bounds()
        # One leaves, or as many as are too much.
        excess = max(self.num_tokens - max_tokens, self.num_tokens // max(self._num_jobs, 1))
        return ApiError(
            429,
            f"the model is busy: {self.num_requests} sequences of {self.num_tokens} tokens "
            f"run or wait, and it takes {max_seats} of {max_tokens}; try again later",
            code="queue_full",
            retry_after=self.estimate_s(excess),
        )

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """Within it a request is made ready, and keeps the place of one sequence. Raises ApiError
        (429) as `entered` would, before anything is made of more requests than may wait."""
        if self.is_full:
            raise self.refusal()
        self._num_reserved += 1
        try:
            yield
        finally:
            self._num_reserved -= 1

    @contextmanager
    def entered(self, job: Job) -> Iterator[None]:
        """Within it the job counts. Raises ApiError (429) where too much waits already."""
        if self._is_full(0):  # what is reserved was so after this one
            raise self.refusal()
        num_requests = sum(state.params.n for state in job.states)
        num_tokens = job.num_tokens
        max_waiting = self._settings.max_waiting_requests
        num_seats = min(num_requests, max(int(max_waiting * _MAX_SHARE), 1))
        self._add(1, num_requests, num_seats, num_tokens)
        try:
            yield
        finally:
            self._add(-1, num_requests, num_seats, num_tokens)
            now = time.monotonic()
            self._left.append((now, num_tokens))
            self._forget_before(now - _RATE_WINDOW_S)

    def estimate_s(self, num_tokens: int) -> float:
        """How long the engine takes to let go of so many tokens, at the rate of the last half
        minute."""
        now = time.monotonic()
        self._forget_before(now - _RATE_WINDOW_S)
        if not self._left:
            return _MIN_RETRY_S if self.num_requests == 0 else _MAX_RETRY_S / 6
        elapsed_s = max(now - self._left[0][0], 1.0)
        rate = sum(tokens for _, tokens in self._left) / elapsed_s
        return min(max(num_tokens / rate, _MIN_RETRY_S), _MAX_RETRY_S)

    def _is_full(self, num_reserved: int) -> bool:
        max_seats, max_tokens = self._bounds()
        return self._num_seats + num_reserved >= max_seats or self.num_tokens >= max_tokens

    def _bounds(self) -> tuple[int, int]:
        """Sequences and tokens at which no more are let in."""
        return (
            self._llm.max_num_seqs + self._settings.max_waiting_requests,
            self._llm.num_kv_tokens + self._settings.max_waiting_tokens,
        )

    def _add(self, sign: int, num_requests: int, num_seats: int, num_tokens: int) -> None:
        """Of a job that comes (1) or leaves (-1)."""
        self._num_jobs += sign
        self.num_requests += sign * num_requests
        self._num_seats += sign * num_seats
        self.num_tokens += sign * num_tokens

    def _forget_before(self, moment: float) -> None:
        while self._left and self._left[0][0] < moment:
            self._left.popleft()
