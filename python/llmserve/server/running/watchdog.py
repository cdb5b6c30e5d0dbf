"""Sees what goes wrong as a whole: a step that hangs, and errors that come in numbers."""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

from llmserve import _core
from llmserve.insight.metric_objects import EngineMetrics
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


@dataclass(slots=True)
class _Part:
    """How an engine gets on, which may be one replica of several."""

    num_steps: int
    moved_at: float
    is_hung: bool = False


class _Engine:
    """What is known of one."""

    def __init__(self) -> None:
        self.parts: list[_Part] = []  # its replicas, or itself
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
                now = time.monotonic()
                engine.parts = [_Part(num_steps, now) for num_steps, _ in _progress(model)]
            self._look_later()

    def close(self) -> None:
        """Looks no more."""
        if self._timer is not None:
            self._timer.cancel()

    def is_hung(self, model: ServedModel) -> bool:
        """Whether its step has taken longer than watchdog_timeout, or its thread stands still."""
        if self._timer is not None:
            self._look_at(model)
        return any(part.is_hung for part in self._engines[model].parts)

    def hung_part(self, model: ServedModel) -> str:
        """Of several replicas those that hang: ", replica 1"."""
        parts = self._engines[model].parts
        hung = [f", replica {idx}" for idx, part in enumerate(parts) if part.is_hung]
        return "".join(hung) if len(parts) > 1 else ""

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
        progress, now = _progress(model), time.monotonic()
        stood_still = model.llm.stood_still_s()
        parts = self._engines[model].parts
        for part, (num_steps, is_idle), still_s in zip(parts, progress, stood_still, strict=True):
            if is_idle or num_steps != part.num_steps:
                if part.is_hung:
                    _log.warning("the engine of %s goes on", model.name)
                part.num_steps, part.moved_at, part.is_hung = num_steps, now, False
            elif still_s and not part.is_hung:
                part.is_hung = True
                _log.critical(
                    "the thread of %s%s has stood still in a step for %g s",
                    *(model.name, self.hung_part(model), still_s),
                )
            elif now - part.moved_at > self._settings.watchdog_timeout and not part.is_hung:
                part.is_hung = True
                which = self.hung_part(model)
                _log.critical(
                    "a step of %s%s has taken more than %g s",
                    *(model.name, which, now - part.moved_at),
                )
        return not all(is_idle for _, is_idle in progress)

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
                503,
                f"a step of {model.name!r}{self.hung_part(model)} hangs",
                code="engine_hung",
                retry_after=_SHED_S,
            )
        left_s = engine.sheds_until - time.monotonic()
        if left_s > 0:
            self.num_refused["error_spike"] += 1
            raise ApiError(
                503, "too many requests fail at the moment", code="failing", retry_after=left_s
            )


def _progress(model: ServedModel) -> list[tuple[int, bool]]:
    """How many steps its engine has run, and whether it has nothing to do; of each replica."""
    replicas = model.llm.replicas()
    if not replicas:
        return [_progress_of(model.llm.get_metrics())]
    return [_progress_of(state.metrics) for state in replicas]


def _progress_of(metrics: _core.EngineMetrics | EngineMetrics) -> tuple[int, bool]:
    num_requests = metrics.num_requests_running + metrics.num_requests_waiting
    return metrics.num_prefill_steps + metrics.num_decode_steps, num_requests == 0
