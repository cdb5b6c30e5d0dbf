"""Who is let in to a model: a bound on what waits, by requests and by tokens, and when to come
again."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from llmserve.server.errors import ApiError
from llmserve.server.settings import ServerSettings

if TYPE_CHECKING:
    from llmserve.server.jobs import Job

# What finished in this time is the rate by which a wait is estimated.
_RATE_WINDOW_S = 30.0
# Of an estimate, in seconds: a client that comes again every second does no harm, and one told to
# come in more than a minute would miss what has changed by then.
_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 60.0


class Admission:
    """Counts what is in one engine. Used on the loop's thread."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self.num_requests = 0  # sequences
        self.num_tokens = 0
        self.num_refused = 0
        self._left: deque[tuple[float, int]] = deque()  # when, and how many tokens they had

    @contextmanager
    def entered(self, job: "Job") -> Iterator[None]:
        """Within it the job counts. Raises ApiError (429) where too much waits already."""
        num_requests = sum(state.params.n for state in job.states)
        num_tokens = job.num_tokens
        seats = job.model.llm.max_num_seqs
        max_requests = seats + self._settings.max_waiting_requests
        max_tokens = job.model.llm.num_kv_tokens + self._settings.max_waiting_tokens
        is_full = self.num_requests + num_requests > max_requests
        is_full = is_full or self.num_tokens + num_tokens > max_tokens
        # What is alone is let in: the engine says whether it can ever run.
        if is_full and self.num_requests > 0:
            self.num_refused += 1
            excess = max(self.num_tokens + num_tokens - max_tokens, num_tokens)
            raise ApiError(
                429,
                f"the model is busy: {self.num_requests} sequences of {self.num_tokens} tokens "
                f"run or wait, and it takes {max_requests} of {max_tokens}; try again later",
                code="queue_full",
                retry_after=self.estimate_s(excess),
            )
        self.num_requests += num_requests
        self.num_tokens += num_tokens
        try:
            yield
        finally:
            self.num_requests -= num_requests
            self.num_tokens -= num_tokens
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

    def _forget_before(self, moment: float) -> None:
        while self._left and self._left[0][0] < moment:
            self._left.popleft()
