"""Sees what goes wrong as a whole: a step that hangs, and errors that come in numbers."""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Iterable

from llmserve.server.http.errors import ApiError
from llmserve.server.models import ServedModel
from llmserve.server.settings import ServerSettings

_log = logging.getLogger(__name__)

# The spike is a share of the requests that ended of late, of so many at least: one bad request in
# three is none.
_WINDOW_S = 30.0
_MIN_REQUESTS = 10
# How long new requests get 503 then, before the next ones are tried.
_SHED_S = 5.0

# Looks within watchdog_timeout: a hung step is in the log a tenth later than it could be.
_NUM_LOOKS = 10


class _Engine:
    """What is known of one."""

    def __init__(self) -> None:
        self.num_steps = -1
        self.moved_at = 0.0
        self.is_hung = False
        self.ended: deque[tuple[float, bool]] = deque()  # when, and whether with an error
        self.sheds_until = 0.0


class Watchdog:
    """Looks after the engines of a server. Used on the loop's thread."""

    def __init__(self, models: Iterable[ServedModel], settings: ServerSettings) -> None:
        self._engines = {model: _Engine() for model in models}
        self._settings = settings
        self._timer: asyncio.TimerHandle | None = None
        self.num_refused = Counter({"error_spike": 0, "engine_hung": 0})

    def begin(self) -> None:
        """Something is about to run: looks from time to time until nothing does."""
        if self._timer is None and self._settings.watchdog_timeout:
            for model, engine in self._engines.items():
                engine.num_steps, engine.moved_at = _progress(model)[0], time.monotonic()
            self._look_later()

    def close(self) -> None:
        """Looks no more."""
        if self._timer is not None:
            self._timer.cancel()

    def is_hung(self, model: ServedModel) -> bool:
        """Whether its step has taken longer than watchdog_timeout."""
        if self._timer is not None:
            self._look_at(model)
        return self._engines[model].is_hung

    def _look_later(self) -> None:
        wait_s = self._settings.watchdog_timeout / _NUM_LOOKS
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._look)

    def _look(self) -> None:
        if any([self._look_at(model) for model in self._engines]):
            self._look_later()
        else:
            self._timer = None

    def _look_at(self, model: ServedModel) -> bool:
        """Whether anything runs; notes whether its steps go on."""
        engine = self._engines[model]
        (num_steps, is_idle), now = _progress(model), time.monotonic()
        if is_idle or num_steps != engine.num_steps:
            if engine.is_hung:
                _log.warning("the engine of %s goes on", model.name)
            engine.num_steps, engine.moved_at, engine.is_hung = num_steps, now, False
        elif now - engine.moved_at > self._settings.watchdog_timeout and not engine.is_hung:
            engine.is_hung = True
            _log.critical(
                "a step of %s has taken more than %g s", model.name, now - engine.moved_at
            )
        return not is_idle

    def note(self, model: ServedModel, has_failed: bool) -> None:
        """A request of this model has ended."""
        engine = self._engines[model]
        now = time.monotonic()
        engine.ended.append((now, has_failed))
        while now - engine.ended[0][0] > _WINDOW_S:
            engine.ended.popleft()
        if len(engine.ended) < _MIN_REQUESTS or not has_failed:
            return
        num_failed = sum(failed for _, failed in engine.ended)
        if num_failed >= self._settings.error_spike * len(engine.ended):
            _log.error(
                "%d of the last %d requests of %s failed: no new ones for %g s",
                *(num_failed, len(engine.ended), model.name, _SHED_S),
            )
            engine.sheds_until = now + _SHED_S
            engine.ended.clear()

    def check(self, model: ServedModel) -> None:
        """Raises ApiError (503) while requests would only fail, or wait for nothing."""
        engine = self._engines[model]
        if self.is_hung(model):
            self.num_refused["engine_hung"] += 1
            raise ApiError(
                503, f"a step of {model.name!r} hangs", code="engine_hung", retry_after=_SHED_S
            )
        left_s = engine.sheds_until - time.monotonic()
        if left_s > 0:
            self.num_refused["error_spike"] += 1
            raise ApiError(
                503, "too many requests fail at the moment", code="failing", retry_after=left_s
            )


def _progress(model: ServedModel) -> tuple[int, bool]:
    """How many steps its engine has run, and whether it has nothing to do."""
    metrics = model.llm.get_metrics()
    num_requests = metrics.num_requests_running + metrics.num_requests_waiting
    return metrics.num_prefill_steps + metrics.num_decode_steps, num_requests == 0
