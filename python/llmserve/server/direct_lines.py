"""Lines of a stream that are written as their tokens come, where an answer says them all in the
same words: C++ makes the line, and no task is woken for it."""

import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

from llmserve import _core
from llmserve.outputs import CompletionOutput
from llmserve.request_state import RequestState

if TYPE_CHECKING:
    from llmserve.server.activity import Run
    from llmserve.server.generation import Answer


class DirectLines:
    """Of one prompt of a run, for its samples whose first line has been written. Whatever is not
    plain (an end, an error, a client that lags) is left to the run's task."""

    def __init__(
        self,
        run: "Run",
        prompt_idx: int,
        answer: "Answer",
        write: Callable[[bytes], bool],
    ) -> None:
        """write: takes a piece of the body at once, or says that it cannot."""
        self._run = run
        self._state: RequestState = run.streams[prompt_idx].state
        self._prompt_idx = prompt_idx
        self._answer = answer
        self._write = write
        self._templates: dict[int, _core.LineTemplate] = {}

    def begin(self, sample_idx: int) -> None:
        """The sample's first line has been worded; the next ones differ in their text alone."""
        if sample_idx in self._templates:
            return
        marker = uuid.uuid4().hex
        news = CompletionOutput(sample_idx, marker, [], None, None)
        line = b"".join(self._answer.lines(self._prompt_idx, [news], ""))
        prefix, suffix = line.split(marker.encode())
        skips_empty = not self._answer.words_empty_texts
        self._templates[sample_idx] = _core.LineTemplate(prefix, suffix, skips_empty)

    def take(self, event: _core.TokenEvent) -> bool:
        """Whether the event has been written; else its state has to take it in."""
        run, state = self._run, self._state
        template = self._templates.get(event.sample_index)
        if template is None or run.is_sending or run.cause or state.has_news:
            return False
        line = template.render(event)
        if line is None or (line and not self._write(line)):
            return False
        state.note_given(event)
        run.note_sent()
        return True
