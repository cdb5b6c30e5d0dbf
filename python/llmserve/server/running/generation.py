"""Answers of generation routes: one JSON document, or a stream of server-sent events."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llmserve.common.text_threads import MAX_ROWS_IN_LOOP, on_answer_thread
from llmserve.requests.state import RequestState
from llmserve.server.http.auth import tenant
from llmserve.server.http.connection import Connection, own_connection
from llmserve.server.http.errors import ApiError, JsonResponse, LargeJsonResponse
from llmserve.server.running.activity import (
    SHUTDOWN,
    TIMEOUT,
    Activity,
    Run,
    shutting_down,
    timed_out,
)
from llmserve.server.running.answer import Answer
from llmserve.server.running.direct_lines import DirectLines
from llmserve.server.running.failures import generation_error
from llmserve.server.running.job import Job

_STREAM_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # or nginx would gather it
]
Write = Callable[[bytes], Awaitable[None]]  # a piece of the body that is not the last


class GenerationResponse(Response):
    """Runs a job and answers; an ASGI application, as Starlette's responses are."""

    def __init__(self, activity: Activity, job: Job, answer: Answer, arrived: float) -> None:
        """arrived: when its request had come, by the loop's clock."""
        self._activity = activity
        self._job = job
        self._answer = answer
        self._arrived = arrived
        self._own_headers = [(b"x-request-id", job.request_id.encode())]
        self._prepared: set[int] = set()  # prompts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError before anything was sent."""
        await self._activity.coalescer.wait()
        with self._activity.running(self._job, self._arrived, tenant(scope)) as run:
            connection = own_connection(scope)
            if connection is not None:
                run.cut_connection = connection.abort
            scope["llmserve.run"] = run  # for the log
            with _watched(run, receive, connection):
                if self._job.is_streamed:
                    await self._stream(run, send, connection)
                else:
                    await self._whole(run, scope, receive, send)

    async def _whole(self, run: Run, scope: Scope, receive: Receive, send: Send) -> None:
        while not run.is_finished and not run.is_cut:
            await run.wait()
        if run.is_cut:
            return
        run.close()  # wording it takes a while, which is no time that it lacks
        if (error := self._lack(run)) is not None:
            raise error
        states = [stream.state for stream in run.streams]
        errors = [state.error for state in states if state.error is not None]
        if errors:
            raise generation_error(errors[0], self._job)
        await self._prepare(run)
        if run.is_cut:
            return
        word = partial(self._worded, states, run.cause)
        num_rows = sum(map(_num_rows, states))
        if num_rows > MAX_ROWS_IN_LOOP:
            response = await on_answer_thread(num_rows, partial(word, LargeJsonResponse))
        else:
            response = word(JsonResponse)
        await response(scope, receive, send)

    def _lack(self, run: Run) -> ApiError | None:
        """Of a run that the server ended before any of its tokens came."""
        # The cause first: this is asked for every line.
        if not run.cause or any(stream.state.num_generation_tokens for stream in run.streams):
            return None
        if run.cause == SHUTDOWN:
            return shutting_down()
        if run.cause == TIMEOUT:
            admission = self._activity.admissions[run.job.model]
            return timed_out(run.limit_s, admission.estimate_s(run.job.num_tokens))
        return None

    async def _prepare(self, run: Run) -> None:
        """Has the long prompts' log-probabilities that have come worded, prompt by prompt so that
        other answers get their turns on the thread."""
        while not run.is_cut:
            due = (idx for idx, stream in enumerate(run.streams) if self._is_due(idx, stream.state))
            idx = next(due, None)
            if idx is None:
                return
            self._prepared.add(idx)
            num_rows = len(run.streams[idx].state.prompt.token_ids)
            await on_answer_thread(num_rows, partial(self._answer.prepare, idx))

    def _is_due(self, prompt_idx: int, state: RequestState) -> bool:
        is_long = len(state.prompt.token_ids) > MAX_ROWS_IN_LOOP
        return state.has_prompt_rows and is_long and prompt_idx not in self._prepared

    def _worded(
        self, states: Sequence[RequestState], cause: str, kind: type[JsonResponse]
    ) -> JsonResponse:
        headers = {name.decode(): value.decode() for name, value in self._own_headers}
        return kind(self._answer.document(states, cause), headers=headers)

    async def _stream(self, run: Run, send: Send, connection: Connection | None) -> None:
        form = self._answer.form
        media_type = (b"content-type", form.media_type.encode())
        headers = [media_type, *_STREAM_HEADERS, *self._own_headers]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def write(body: bytes, more_body: bool = True) -> None:
            sent = send({"type": "http.response.body", "body": body, "more_body": more_body})
            may_wait = connection is None or connection.is_full
            await (run.sending(sent) if may_wait else sent)
            run.note_sent()

        for idx, stream in enumerate(run.streams):  # lines that its reader has
            if (given := stream.state.given_before()) is not None:
                deque(self._answer.lines(idx, [given], ""), maxlen=0)
        with self._direct_lines(run, connection) as direct:
            lines = await self._write_news(run, write, direct)
        if not run.is_cut:
            last = b"".join([lines, *self._answer.last_lines()])
            await write(last, more_body=False)
            run.note_first()

    async def _write_news(self, run: Run, write: Write, direct: DirectLines | None) -> bytes:
        """Until the end, whose lines it returns: they leave with those after them. Or until nobody
        reads."""
        is_first = True
        while True:
            await self._wait_for_group(run, is_first)
            await self._prepare(run)
            if run.is_cut:
                return b""
            if direct is not None:
                direct.take_back()
            lines = b"".join(self._lines(run, direct))
            if run.is_finished:
                return lines
            if lines:
                await write(lines)
                run.note_first()
                is_first = False
            elif run.is_comment_due:
                await write(self._answer.form.keep_alive)
            if direct is not None:
                direct.lend_soon()

    def _lines(self, run: Run, direct: DirectLines | None) -> Iterable[bytes]:
        if (error := self._lack(run)) is not None:
            # Once it is certain that no token comes: the running step may still give one.
            if run.is_finished:
                yield self._answer.error_line(error)
            return
        for idx, stream in enumerate(run.streams):
            if stream.state.has_news:
                news = stream.state.take_news_apart()
                yield from self._answer.lines(idx, news, run.cause)
                if direct is not None:
                    for completion in news:
                        direct.note_worded(idx, completion)

    @contextmanager
    def _direct_lines(
        self, run: Run, connection: Connection | None
    ) -> Iterator[DirectLines | None]:
        """None where each line has to be worded, or several tokens make one."""
        is_grouped = self._activity.settings.stream_flush_tokens > 1 or run.pacers
        if connection is None or not self._answer.is_plain or is_grouped:
            yield None
            return
        with closing(DirectLines(run, self._answer, connection)) as direct:
            yield direct

    async def _wait_for_group(self, run: Run, is_first: bool) -> None:
        """Until enough has come for a line: the first token at once, then as the settings say."""
        settings = self._activity.settings
        await run.wait()
        if is_first or settings.stream_flush_tokens == 1:
            return
        loop = asyncio.get_running_loop()
        until = loop.time() + settings.stream_flush_interval
        while not run.is_finished and not run.is_cut and not run.is_comment_due:
            num_pending = run.num_pending_tokens
            if num_pending >= settings.stream_flush_tokens:
                return
            if settings.stream_flush_newline and any(
                "\n" in stream.state.pending_text for stream in run.streams
            ):
                return
            left_s = until - loop.time() if settings.stream_flush_interval else None
            if left_s is not None and left_s <= 0 and num_pending:
                return
            try:
                await asyncio.wait_for(run.wait(), left_s if num_pending else None)
            except asyncio.TimeoutError:
                return


def _num_rows(state: RequestState) -> int:
    """What makes an answer large: tokens that have log-probabilities, and vectors."""
    if state.pooling is not None:
        return 1
    num_new = state.num_generation_tokens if state.params.has_logprobs else 0
    has_prompt = state.params.prompt_logprobs is not None
    return num_new + (len(state.prompt.token_ids) if has_prompt else 0)


@contextmanager
def _watched(run: Run, receive: Receive, connection: Connection | None) -> Iterator[None]:
    """Within it the run ends when its client leaves."""
    if connection is not None:
        with connection.watched(run.leave):
            yield
        return

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        run.leave()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
