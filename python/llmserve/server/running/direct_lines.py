"""Lines of a stream that are written as their tokens come, where an answer says them all in the
same words: C++ makes the line, and no task is woken for it. Where nothing but such lines is to
come, the engine's thread writes them to the socket and Python does nothing for a token."""

import asyncio
import os
from functools import partial

from llmserve import _core
from llmserve.errors import ResourceExhausted
from llmserve.outputs import CompletionOutput
from llmserve.requests.async_stream import AsyncStream
from llmserve.server.http.connection import Connection
from llmserve.server.running.activity import Run
from llmserve.server.running.answer import Answer

# Stands for the text of a line that is a template, and in no other place of it.
_MARKER = os.urandom(16).hex()


class DirectLines:
    """Of a run, for its samples whose first line has been written. Whatever is not plain (an end,
    an error, a client that lags) is left to the run's task, which takes the connection back before
    it writes."""

    def __init__(self, run: Run, answer: Answer, connection: Connection) -> None:
        self._run = run
        self._answer = answer
        self._connection = connection
        # By prompt and sample; none of those that have ended.
        self._templates: dict[tuple[int, int], _core.LineTemplate] = {}
        self._num_unknown = sum(stream.state.params.n for stream in run.streams)
        self._lending: asyncio.Handle | None = None
        for idx, stream in enumerate(run.streams):
            stream.direct = partial(self._take, idx)

    def note_worded(self, prompt_idx: int, completion: CompletionOutput) -> None:
        """A line of this sample has been worded: after the first, they differ in their text alone,
        up to the last."""
        key = prompt_idx, completion.index
        is_known = key in self._templates
        if completion.finish_reason is not None:
            self._num_unknown -= not is_known
            self._templates.pop(key, None)
        elif not is_known:
            self._num_unknown -= 1
            self._templates[key] = self._template(prompt_idx, completion.index)

    def lend_soon(self) -> None:
        """The task has written. The transport may send that once its loop comes around: only then
        somebody else may write."""
        if self._lending is None:
            self._lending = asyncio.get_running_loop().call_soon(self._lend)

    def take_back(self) -> None:
        """Nobody else writes to the connection any more, and the states have what went over it."""
        run, lent = self._run, self._run.lent
        if lent is None:
            return
        leader = run.streams[0]
        assert isinstance(leader, AsyncStream)
        written = leader.take_back(lent)
        run.note_lines()
        run.lent = None
        by_id = {stream.state.request_id: stream.state for stream in run.streams}
        for request_id, sample_idx, token_ids in written.samples:
            by_id[request_id].note_given(sample_idx, token_ids)
        self._connection.return_loan(written.rest)

    def close(self) -> None:
        """The task is done."""
        if self._lending is not None:
            self._lending.cancel()
        self.take_back()
        self._templates.clear()

    def _template(self, prompt_idx: int, sample_idx: int) -> _core.LineTemplate:
        news = CompletionOutput(sample_idx, _MARKER, [], None, None)
        line = b"".join(self._answer.lines(prompt_idx, [news], ""))
        prefix, suffix = line.split(_MARKER.encode())
        return _core.LineTemplate(prefix, suffix, not self._answer.words_empty_texts)

    def _take(self, prompt_idx: int, event: _core.TokenEvent) -> bool:
        """Whether the event has been written; else its state has to take it in."""
        self.take_back()
        if not event.token_ids and event.finish_reason is None:
            return True  # it said that the connection is back
        run, state = self._run, self._run.streams[prompt_idx].state
        template = self._templates.get((prompt_idx, event.sample_index))
        if template is None or run.is_sending or run.cause or state.has_news:
            return False
        line = template.render(event)
        if line is None or (line and not self._connection.write(line)):
            return False
        state.note_given(event.sample_index, event.token_ids)
        run.note_sent()
        self.lend_soon()
        return True

    def _lend(self) -> None:
        """If nothing but plain lines is to come for a while, and nothing is on its way."""
        self._lending = None
        run = self._run
        is_busy = run.lent or run.is_sending or run.is_comment_due or run.cause
        if is_busy or self._num_unknown or not self._templates:
            return
        leader = run.streams[0]
        if not isinstance(leader, AsyncStream) or any(s.is_behind for s in run.streams):
            return
        fd = self._connection.lend(self.take_back)
        if fd is None:
            return
        try:
            lent = _core.LentConnection(fd)
        except ResourceExhausted:  # no more descriptors: the loop goes on writing
            self._connection.return_loan()
            return
        for (prompt_idx, sample_idx), template in self._templates.items():
            lent.add(run.streams[prompt_idx].state.request_id, sample_idx, template)
        if leader.lend(lent):
            run.lent = lent
        else:
            self._connection.return_loan()
