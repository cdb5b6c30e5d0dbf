"""A conversation's answer in the words of Anthropic's API: blocks of text, thoughts and calls."""

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from llmserve.outputs import CompletionOutput
from llmserve.parsers.deltas import Pieces, ToolCallDelta, merged
from llmserve.requests.state import RequestState
from llmserve.server.http.errors import ApiError
from llmserve.server.http.events import named_event
from llmserve.server.routes.anthropic.errors import anthropic_error
from llmserve.server.routes.chat_parser import ChatFormat
from llmserve.server.routes.chat_reader import ChatReader
from llmserve.server.running.answer import StreamForm
from llmserve.server.running.failures import generation_error
from llmserve.server.running.job import Job

_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "abort": "max_tokens"}
_FORM = StreamForm("text/event-stream; charset=utf-8", named_event("ping", {"type": "ping"}))


def _event(data: dict[str, Any]) -> bytes:
    return named_event(data["type"], data)


class MessageAnswer:
    """See Answer."""

    form = _FORM
    words_empty_texts = False

    def __init__(self, job: Job, form: ChatFormat, stop_sequences: Collection[str]) -> None:
        self._job = job
        self._reader = ChatReader(form, job.model.tokenizer())
        self._stop_sequences = stop_sequences
        self._num_blocks = 0  # of the stream that have begun
        self._open = ""  # the kind of block that has not ended: text, thinking or a call's id
        self._end: dict[str, Any] | None = None  # why the stream ended
        self._has_failed = False

    @property
    def is_plain(self) -> bool:
        """See Answer."""
        return self._reader.is_plain

    def prepare(self, prompt_idx: int) -> None:
        """See Answer: there are no log-probabilities."""

    def document(self, states: Sequence[RequestState], cause: str) -> object:
        """See Answer."""
        (state,) = states
        (completion,) = state.completions()
        pieces = self._reader.read(completion)
        content: list[dict[str, Any]] = []
        if pieces.reasoning:
            content.append({"type": "thinking", "thinking": pieces.reasoning, "signature": ""})
        if pieces.content:
            content.append({"type": "text", "text": pieces.content})
        content += map(_call, merged(pieces.tool_calls))
        return {**self._message(), "content": content, **self._ending(completion, cause)} | {
            "usage": self._usage()
        }

    def lines(
        self, prompt_idx: int, news: Sequence[CompletionOutput], cause: str
    ) -> Iterable[bytes]:
        """See Answer."""
        for completion in news:
            if not self._reader.has_begun(completion.index):
                usage = {**self._usage(), "output_tokens": 0}
                yield _event(
                    {"type": "message_start", "message": self._message() | {"usage": usage}}
                )
            yield from self._deltas(self._reader.read(completion))
            if completion.error:
                yield self.error_line(generation_error(completion.error, self._job))
            elif completion.finish_reason is not None:
                self._end = self._ending(completion, cause)

    def error_line(self, error: ApiError) -> bytes:
        """See Answer."""
        self._has_failed = True
        return named_event("error", anthropic_error(error))

    def last_lines(self) -> Iterable[bytes]:
        """See Answer."""
        if self._has_failed:
            return
        yield from self._close()
        yield _event({"type": "message_delta", "delta": self._end or {}, "usage": self._usage()})
        yield _event({"type": "message_stop"})

    def _start(self) -> Iterator[bytes]:
        usage = {**self._usage(), "output_tokens": 0}
        yield _event({"type": "message_start", "message": {**self._message(), "usage": usage}})
        if self.is_plain:  # or a template of the lines that follow would open the block each time
            yield from self._begin("text", {"type": "text", "text": ""})

    def _message(self) -> dict[str, Any]:
        return {
            "id": self._job.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._job.model.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _usage(self) -> dict[str, Any]:
        """Tokens that came from the cache are counted apart from those of the input."""
        (state,) = self._job.states
        num_prompt, num_cached = len(state.prompt.token_ids), state.num_cached_tokens
        return {
            "input_tokens": num_prompt - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": state.num_generation_tokens,
        }

    def _ending(self, completion: CompletionOutput, cause: str) -> dict[str, Any]:
        reason = self._reader.finish_reason(completion, cause) or "stop"
        word, found = _REASONS.get(reason, "end_turn"), None
        if reason == "stop" and completion.stop_reason in self._stop_sequences:
            word, found = "stop_sequence", completion.stop_reason
        return {"stop_reason": word, "stop_sequence": found}

    def _deltas(self, pieces: Pieces) -> Iterator[bytes]:
        if pieces.reasoning:
            yield from self._begin(
                "thinking", {"type": "thinking", "thinking": "", "signature": ""}
            )
            yield self._delta({"type": "thinking_delta", "thinking": pieces.reasoning})
        if pieces.content:
            yield from self._begin("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": pieces.content})
        for call in pieces.tool_calls:
            yield from self._call_deltas(call)

    def _call_deltas(self, call: ToolCallDelta) -> Iterator[bytes]:
        if call.id is not None:
            block: dict[str, Any] = {
                "type": "tool_use",
                "id": call.id,
                "name": call.name,
                "input": {},
            }
            yield from self._begin(call.id, block)
        if call.arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def _begin(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        """Opens a block of this kind, unless one is."""
        if self._open == kind:
            return
        yield from self._close()
        self._open = kind
        index = self._num_blocks
        self._num_blocks += 1
        yield _event({"type": "content_block_start", "index": index, "content_block": block})

    def _close(self) -> Iterator[bytes]:
        if not self._open:
            return
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": ""})
        yield _event({"type": "content_block_stop", "index": self._num_blocks - 1})
        self._open = ""

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event(
            {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta}
        )


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """Arguments that are no object, which no grammar held the model to, are there as text."""
    function = call["function"]
    try:
        given = json.loads(function["arguments"] or "{}")
    except ValueError:
        given = None
    if not isinstance(given, dict):
        given = {"arguments": function["arguments"]}
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": given}
