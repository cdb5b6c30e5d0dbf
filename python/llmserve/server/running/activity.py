"""What runs at the moment, and every way in which it ends: the requests of a client are one Run,
which has alarms for its time limits."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from llmserve import _core
from llmserve.requests.async_stream import AsyncStream
from llmserve.server.http.errors import ApiError
from llmserve.server.models import ServedModel
from llmserve.server.running.admission import Admission
from llmserve.server.running.alarms import Alarms
from llmserve.server.running.coalescing import Coalescer, SharedStream
from llmserve.server.running.deadline import Deadline
from llmserve.server.running.failures import generation_error
from llmserve.server.running.job import Job
from llmserve.server.running.pacing import Pacer
from llmserve.server.running.quotas import Quotas
from llmserve.server.running.watchdog import Watchdog
from llmserve.server.settings import ServerSettings
from llmserve.server.tiers import read_tiers

_log = logging.getLogger(__name__)

# Why requests end before their tokens do.
TIMEOUT, CLIENT, SLOW_CLIENT, SHUTDOWN = "timeout", "client_left", "slow_client", "shutdown"


class _News(asyncio.Event):
    """Tells, whenever it is set, also who keeps the clocks."""

    def __init__(self, noted: Callable[[], None]) -> None:
        super().__init__()
        self.noted = noted

    def set(self) -> None:
        super().set()
        self.noted()


class Run:
    """A job in the engine. Used on the loop's thread."""

    def __init__(self, job: Job, settings: ServerSettings, arrived: float) -> None:
        """arrived: when its request had come, by the loop's clock."""
        self.job = job
        self.streams: list[AsyncStream | SharedStream] = []
        self.records: list[_core.RequestRecord | None] = []  # one a stream, from its end on
        self.pacers: list[Pacer] = []
        self.cause = ""  # why it was ended, if it was
        self.limit_s = job.timeout_s  # the time limit that ended it, if one did
        self.is_cut = False  # nobody will read what comes
        self.is_comment_due = False
        self.is_sending = False  # the task is in a write, which goes before what comes
        # While the engine's thread writes the lines.
        self.lent: _core.LentConnection | None = None
        self.news = _News(self._note_lag)
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._alarms = Alarms()
        self.arrived = arrived
        self.last_sent = self._loop.time()
        self.first_sent = 0.0  # none yet
        self.cut_connection: Callable[[], None] = _do_nothing
        for end, limit_s in (
            (self._end_in_time, job.timeout_s),
            (self._end_unless_scheduled, settings.queue_timeout),
            (self._end_unless_first_token, settings.first_token_timeout),
        ):
            if limit_s:
                self._alarms.set(end, arrived + limit_s)
        if job.is_streamed:
            self._set_alarm(self._keep_alive, settings.stream_keep_alive)

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will come of any prompt."""
        return all(stream.state.is_finished for stream in self.streams)

    @property
    def has_failed(self) -> bool:
        """Whether the engine gave up on any of it, for no fault of its own."""
        errors = [stream.state.error for stream in self.streams if stream.state.error]
        return not self.cause and any(generation_error(e, self.job).status >= 500 for e in errors)

    def log_failures(self) -> None:
        """For the operator: what a client is not told."""
        if self.has_failed:
            errors = {stream.state.error for stream in self.streams if stream.state.error}
            of_request = {"request_id": self.job.request_id}
            _log.error("the engine failed: %s", "; ".join(sorted(errors)), extra=of_request)

    @property
    def has_news(self) -> bool:
        """Whether something has come that was not taken yet."""
        return any(stream.state.has_news for stream in self.streams)

    @property
    def num_pending_tokens(self) -> int:
        """Those that have come and were not taken yet."""
        return sum(stream.state.num_pending_tokens for stream in self.streams)

    async def wait(self) -> None:
        """Until there is news, a comment is due, or it was ended."""
        await self.news.wait()
        self.news.clear()
        for stream in self.streams:
            stream.check_open()

    def end(self, cause: str) -> None:
        """Aborts what is not finished; what it has so far comes out."""
        if self.cause:
            return
        self.cause = cause
        self.is_cut = cause in (CLIENT, SLOW_CLIENT)
        for pacer in self.pacers:
            pacer.release()
        for stream in self.streams:
            stream.abort()
        self.news.set()

    def close(self) -> None:
        """No clock runs any more."""
        self._alarms.clear()
        self.news.noted = _do_nothing  # or it and we would hold each other

    def leave(self) -> None:
        """Its client has left."""
        self.end(CLIENT)

    async def sending(self, sent: Awaitable[None]) -> None:
        """Awaits a write that takes as long as the client likes."""
        self.is_sending = True
        self._note_lag()
        await sent
        self.is_sending = False
        self._alarms.drop(self._cut)

    def note_sent(self) -> None:
        """Something was written."""
        self.last_sent = self._loop.time()
        self.is_comment_due = False

    def note_lines(self) -> None:
        """Asks the engine's thread, if it writes, when it has last."""
        if self.lent is not None:
            self.last_sent = max(self.last_sent, self.lent.last_us / 1e6)

    def note_first(self) -> None:
        """Tokens were written, the first ones unless it has been told before."""
        self.first_sent = self.first_sent or self.last_sent

    def keep_records(self) -> None:
        """Asks for the engine's records of its requests: none for one that it has not taken in,
        and for one that thousands have followed."""
        self.records = [stream.record() for stream in self.streams]

    @property
    def num_used_tokens(self) -> int:
        """Of the job's num_tokens, those that the engine had run or made when the records were
        kept."""
        return sum(map(_num_used_tokens, self.streams, self.records))

    @property
    def tokens_per_s(self) -> float | None:
        """What a stream delivered after its first token; None for others."""
        num_tokens = sum(s.state.num_generation_tokens for s in self.streams)
        duration_s = self.last_sent - self.first_sent if self.first_sent else 0.0
        is_rate = self.job.is_streamed and num_tokens > 1 and duration_s > 0
        return (num_tokens - 1) / duration_s if is_rate else None

    def _set_alarm(self, act: Callable[[], None], wait_s: float) -> None:
        if wait_s:
            self._alarms.set(act, self._loop.time() + wait_s)

    def _end_in_time(self) -> None:
        self.end(TIMEOUT)

    def _end_unless_scheduled(self) -> None:
        if self._lacks("scheduled_us"):
            self.limit_s = self._settings.queue_timeout
            self.end(TIMEOUT)

    def _end_unless_first_token(self) -> None:
        if self._lacks("first_token_us"):
            self.limit_s = self._settings.first_token_timeout
            self.end(TIMEOUT)

    def _keep_alive(self) -> None:
        interval_s = self._settings.stream_keep_alive
        self.note_lines()
        left_s = self.last_sent + interval_s - self._loop.time()
        if left_s <= 0 and not self.is_sending:
            self.is_comment_due = True
            self.news.set()
        self._set_alarm(self._keep_alive, left_s if left_s > 0 else interval_s)

    def _note_lag(self) -> None:
        """A client has a while for a write that more waits for than its buffer may hold, or that
        the end waits for."""
        if not self.is_sending or not self.job.is_streamed or self._cut in self._alarms:
            return
        is_over = bool(self.cause) or self.is_finished
        if is_over or self.num_pending_tokens > self._settings.stream_buffer_tokens:
            self._set_alarm(self._cut, self._settings.stream_grace)

    def _cut(self) -> None:
        self.end(SLOW_CLIENT)
        self.cut_connection()

    def _lacks(self, time: str) -> bool:
        """Whether this has happened to none of the prompts."""
        return all(_lacks(stream, time) for stream in self.streams)


def _lacks(stream: AsyncStream | SharedStream, time: str) -> bool:
    """By the engine's record; what has none and no news waits for the end of a long step."""
    record, state = stream.record(), stream.state
    if record is None:
        return not (state.num_generation_tokens or state.is_finished)
    return bool(getattr(record, time) == 0)


def _num_used_tokens(stream: AsyncStream | SharedStream, record: _core.RequestRecord | None) -> int:
    """By the engine's record, which has what nobody read, too."""
    state = stream.state
    num_new = record.num_generation_tokens if record else state.num_generation_tokens
    has_run = record.scheduled_us if record else num_new
    return num_new + (len(state.prompt.token_ids) if has_run else 0)


def _do_nothing() -> None:
    pass


def _no_text(_: int) -> str:
    return ""


def shutting_down() -> ApiError:
    """Of a request that has nothing to show for its wait, and of a new one."""
    return ApiError(503, "the server is shutting down", code="shutting_down", retry_after=5)


def timed_out(timeout_s: float, retry_after: float) -> ApiError:
    """Of a request that has nothing to show when its time is over."""
    return ApiError(
        503,
        f"no token came within {timeout_s:g} seconds",
        code="timeout",
        retry_after=retry_after,
    )


class Activity:
    """All runs of a server."""

    def __init__(self, models: Sequence[ServedModel], settings: ServerSettings) -> None:
        self.settings = settings
        self.runs: set[Run] = set()
        self.admissions = {model: Admission(settings, model) for model in models}
        self.ended: Counter[str] = Counter()  # early, by cause
        self.is_draining = False
        self.watchdog = Watchdog(models, settings)
        self.quotas = Quotas(settings)
        self.coalescer = Coalescer(settings.coalesce_window)
        self._tiers = read_tiers(settings.pace)
        self._has_nothing = asyncio.Event()  # to do, while it drains
        self._readers: set[asyncio.Task[object]] = set()  # of bodies that have not come

    @contextmanager
    def preparing(
        self, model: ServedModel, arrived: float, timeout_s: float, tenant: str = ""
    ) -> Iterator[None]:
        """As `in_time`, of a request that is to run. Raises ApiError (429, 503) where `running`
        would, so that no text is read and no grammar compiled for a request that is refused."""
        if self.is_draining:
            raise shutting_down()
        self.watchdog.check(model)
        self.quotas.check(tenant, 0)
        with self.admissions[model].reserved(), self.in_time(model, arrived, timeout_s):
            yield

    @property
    def is_full(self) -> bool:
        """Whether no model takes a request, whichever it asks for."""
        return all(admission.is_full for admission in self.admissions.values())

    def refusal(self) -> ApiError:
        """What a request is told then (429)."""
        return next(iter(self.admissions.values())).refusal()

    @contextmanager
    def in_time(self, model: ServedModel, arrived: float, timeout_s: float) -> Iterator[None]:
        """Within it what a request asks for is made ready for the engine, which counts to the time
        that it has: its own, and until it runs. arrived: as in `running`. Raises ApiError (503)
        once that is over."""
        settings = self.settings
        limits = (timeout_s, settings.queue_timeout, settings.first_token_timeout)
        limit_s = min(filter(None, limits), default=0.0)
        if not limit_s:
            yield
            return
        with Deadline(arrived + limit_s) as deadline:
            yield
        if deadline.has_passed:
            self.ended[TIMEOUT] += 1
            raise timed_out(limit_s, self.admissions[model].estimate_s(0))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Within it the task waits for a client to send its body, which a server that drains does
        not. Raises ApiError (503)."""
        if self.is_draining:
            raise shutting_down()
        task = asyncio.current_task()
        assert task is not None
        self._readers.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._readers:  # `drain` took it out
                raise shutting_down() from None
            raise
        finally:
            self._readers.discard(task)

    @contextmanager
    def running(self, job: Job, arrived: float, tenant: str = "") -> Iterator[Run]:
        """Within it the job runs; leaving aborts what is not finished. arrived: when its request
        had come, by the loop's clock. tenant: whose quotas count, and with whose requests it may
        share a run. Raises ApiError (429, 503), InvalidArgument."""
        if self.is_draining:
            raise shutting_down()
        self.watchdog.check(job.model)
        self.quotas.check(tenant, job.num_tokens)
        with self.admissions[job.model].entered(job), ExitStack() as stack:
            run = Run(job, self.settings, arrived)
            stack.callback(run.close)
            self.watchdog.begin()
            for idx, state in enumerate(job.states):
                name = job.request_id if len(job.states) == 1 else f"{job.request_id}-{idx}"
                stream = self.coalescer.running(
                    job.model.llm, state, name, job.is_streamed, run.news, tenant
                )
                run.streams.append(stack.enter_context(stream))
            self._pace(run)
            self.quotas.take(tenant, job.num_tokens)
            self.runs.add(run)
            try:
                yield run
            except asyncio.CancelledError:
                run.end(CLIENT)
                raise
            finally:
                self.runs.discard(run)
                run.keep_records()
                self.quotas.give_back(tenant, job.num_tokens - run.num_used_tokens)
                for pacer in run.pacers:
                    pacer.release()
                if not self.runs:
                    self._has_nothing.set()
                self.watchdog.note(job.model, run.has_failed)
                run.log_failures()
                if run.cause:
                    self.ended[run.cause] += 1

    def _pace(self, run: Run) -> None:
        rate = self._tiers.get(run.job.tier)
        if rate is None or not run.job.is_streamed:
            return
        llm = run.job.model.llm
        token_text = llm.get_tokenizer().token_text if llm.has_tokenizer else _no_text
        for stream in run.streams:
            pacer = Pacer(stream, rate, token_text)
            stream.direct = pacer.take
            run.pacers.append(pacer)

    async def drain(self, deadline_s: float) -> None:
        """Takes nothing new, and returns when all that runs has finished; ends at the deadline what
        has not, with what it has."""
        self.is_draining = True
        while self._readers:
            self._readers.pop().cancel()
        if self.runs:
            self._has_nothing.clear()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._has_nothing.wait(), deadline_s)
        if self.runs:
            _log.warning("%d requests end at the drain's deadline", len(self.runs))
        self.end_all()

    def end_all(self) -> None:
        """All that runs, with what it has."""
        for run in list(self.runs):
            run.end(SHUTDOWN)
