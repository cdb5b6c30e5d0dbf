"""Requests that a router sends on: what it says of them besides their bodies, and streams that it
can go on with at another server.

A stream of any protocol is a function of its request and of the tokens that have come. The router
is told of the tokens with each piece of text. Where the stream breaks off, another server gets the
same request with these tokens, takes them in without a word, and words what follows.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Protocol, TypeVar, runtime_checkable

import msgspec
from msgspec import Meta
from starlette.requests import Request

from llmserve.outputs import CompletionOutput
from llmserve.requests.state import RequestState
from llmserve.server.http.errors import ApiError
from llmserve.server.routes.bodies import Count, GenerationBody, TokenIds
from llmserve.server.running.answer import Answer, StreamForm
from llmserve.server.running.job import Job

_IN_SCOPE = "llmserve.relay"
_Body = TypeVar("_Body", bound=GenerationBody)
# What one token does not need, or may not have.
_NOT_OF_PROMPT: dict[str, Any] = {
    "stream": None,
    "stream_options": None,
    "max_tokens": 1,
    "max_completion_tokens": None,
    "n_predict": None,
    "min_tokens": None,
    "stop": None,
    "stop_token_ids": None,
    "logprobs": None,
    "top_logprobs": None,
    "logprob_token_ids": None,
    "return_token_ids": None,
    "seed": None,
}


class Relay(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /replica/run: a request to another route of this server, as a router sends it."""

    path: str
    body: msgspec.Raw
    # Of a request that has none
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    # What the answer's id ends with, and its time in seconds since the epoch
    request_id: Annotated[str, Meta(pattern="^[!-~]{1,128}$")] | None = None
    created: int | None = None
    # Of a stream that broke off: the tokens and the number of events that its reader has
    resume_token_ids: TokenIds | None = None
    num_events: Count = 0
    # Of POST /hand_over/tickets, here or elsewhere
    hand_over_ticket: Annotated[str, Meta(max_length=4096)] | None = None
    # The prompt is computed, and one token
    is_prompt_only: bool = False
    # A stream is one of Frames
    has_frames: bool = False

    def applied(self, body: _Body) -> _Body:
        """The body of a chat or completion, whatever protocol it came by, with what the router
        says."""
        names = body.__struct_fields__
        changes: dict[str, Any] = {}
        seed = body.seed  # type: ignore[attr-defined]  # one of SAMPLING_FIELDS
        if self.seed is not None and seed in (None, -1):
            changes["seed"] = self.seed
        if self.resume_token_ids:
            changes["resume_token_ids"] = self.resume_token_ids
        if self.hand_over_ticket is not None:
            changes["hand_over_ticket"] = self.hand_over_ticket
        if self.is_prompt_only:
            changes |= {name: value for name, value in _NOT_OF_PROMPT.items() if name in names}
        return msgspec.structs.replace(body, **changes)

    def named(self, job: Job, kind: str) -> Job:
        """The job with its answer's id and time. kind: what the id begins with."""
        if self.request_id is not None:
            gap = "" if kind.endswith("_") else "-"
            job = replace(job, request_id=f"{kind}{gap}{self.request_id}")
        return job if self.created is None else replace(job, created=self.created)

    def answer(self, answer: Answer, job: Job) -> Answer:
        """How the job is answered. Raises ApiError for what cannot go on in these words."""
        if not (self.has_frames and job.is_streamed):
            return answer
        if self.resume_token_ids and getattr(answer, "tells_all_logprobs", False):
            raise ApiError(
                400,
                "a stream whose end repeats all log-probabilities does not go on elsewhere",
                param="resume_token_ids",
            )
        return FramedAnswer(answer, self, job)


class Frame(msgspec.Struct, omit_defaults=True):
    """A line of JSON of a stream between server and router: events, and what they are made of."""

    token_ids: list[int] = []  # that have come
    events: list[str] = []  # of the client's stream
    # The last tokens: their events are given on with those of the end, or made anew
    is_held: bool = False
    # Nothing has come, and the replica lives
    is_sign_of_life: bool = False
    is_end: bool = False


def put_relay(request: Request, relay: Relay) -> None:
    """For who answers the request."""
    request.scope[_IN_SCOPE] = relay


def relay_of(request: Request) -> Relay | None:
    """None where a client asks by itself."""
    found = request.scope.get(_IN_SCOPE)
    return found if isinstance(found, Relay) else None


@runtime_checkable
class NumbersEvents(Protocol):
    """An Answer whose events have numbers."""

    def go_on_at(self, num_events: int) -> None:
        """So many events have been read."""


class FramedAnswer:
    """See Answer: another one's events in frames."""

    is_plain = False  # each line has its tokens
    words_empty_texts = True

    def __init__(self, answer: Answer, relay: Relay, job: Job) -> None:
        self._answer = answer
        self._relay = relay
        self._knows_given = not relay.resume_token_ids
        # Of several samples none goes on elsewhere, and one may end long before the others.
        self._can_hold = len(job.states) == 1 and job.states[0].params.n == 1
        alive = _line(Frame(events=[answer.form.keep_alive.decode()], is_sign_of_life=True))
        self.form = StreamForm(answer.form.media_type, alive)

    def prepare(self, prompt_idx: int) -> None:
        """See Answer."""
        self._answer.prepare(prompt_idx)

    def document(self, states: Sequence[RequestState], cause: str) -> object:
        """See Answer."""
        return self._answer.document(states, cause)

    def lines(
        self, prompt_idx: int, news: Sequence[CompletionOutput], cause: str
    ) -> Iterable[bytes]:
        """See Answer."""
        if not self._knows_given:  # the first news are what its reader has
            self._knows_given = True
            deque(self._answer.lines(prompt_idx, news, cause), maxlen=0)
            if isinstance(self._answer, NumbersEvents):
                self._answer.go_on_at(self._relay.num_events)
            return
        for completion in news:
            events = [line.decode() for line in self._answer.lines(prompt_idx, [completion], cause)]
            is_last = completion.finish_reason is not None and not completion.error
            ids = completion.token_ids
            yield _line(Frame(token_ids=ids, events=events, is_held=is_last and self._can_hold))

    def error_line(self, error: ApiError) -> bytes:
        """See Answer."""
        return _line(Frame(events=[self._answer.error_line(error).decode()]))

    def last_lines(self) -> Iterable[bytes]:
        """See Answer."""
        yield _line(
            Frame(events=[line.decode() for line in self._answer.last_lines()], is_end=True)
        )


def _line(frame: Frame) -> bytes:
    return msgspec.json.encode(frame) + b"\n"
