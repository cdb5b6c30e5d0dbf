"""What a route brings to a run: the words of its answer."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from llmserve.outputs import CompletionOutput
from llmserve.requests.state import RequestState
from llmserve.server.http.errors import ApiError


@dataclass(frozen=True, slots=True)
class StreamForm:
    """What a protocol's streams are framed in."""

    media_type: str
    keep_alive: bytes  # what a quiet stream gets, and no reader takes for news


EVENTS = StreamForm("text/event-stream; charset=utf-8", b": keep-alive\n\n")


class Answer(Protocol):
    """How a route words what the engine gives."""

    @property
    def form(self) -> StreamForm:
        """Of its stream."""

    @property
    def is_plain(self) -> bool:
        """Whether a sample's lines, but for its first and last, differ in their text alone."""

    @property
    def words_empty_texts(self) -> bool:
        """Whether an event without text has a line."""

    def prepare(self, prompt_idx: int) -> None:
        """Words the log-probabilities of a prompt, which have come, ahead of `document` or the
        first `lines` that say them. On any thread."""

    def document(self, states: Sequence[RequestState], cause: str) -> object:
        """The whole answer, a state a prompt. cause: why it was ended early, or empty."""

    def lines(
        self, prompt_idx: int, news: Sequence[CompletionOutput], cause: str
    ) -> Iterable[bytes]:
        """Events of a stream for what is new of one prompt, an entry a sample."""

    def error_line(self, error: ApiError) -> bytes:
        """The event of a stream that has nothing to give but this error; `last_lines` follow."""

    def last_lines(self) -> Iterable[bytes]:
        """Events after the last news, the end among them."""


class WholeAnswer:
    """What an Answer that is never streamed has besides its `document`."""

    form = EVENTS
    is_plain = False
    words_empty_texts = False

    def prepare(self, prompt_idx: int) -> None:
        """See Answer: nothing is."""

    def lines(
        self, prompt_idx: int, news: Sequence[CompletionOutput], cause: str
    ) -> Iterable[bytes]:
        """There are none."""
        return ()

    def error_line(self, error: ApiError) -> bytes:
        """See Answer."""
        return b""

    def last_lines(self) -> Iterable[bytes]:
        """See Answer."""
        return ()
