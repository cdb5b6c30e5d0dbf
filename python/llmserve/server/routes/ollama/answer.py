"""An answer in the words of Ollama's API: a line of JSON a piece, and one that tells the end."""

import json
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from typing import Any

import msgspec

from llmserve.outputs import CompletionOutput
from llmserve.parsers.deltas import Pieces, ToolCallDelta, merged
from llmserve.requests.state import RequestState
from llmserve.server.http.errors import ApiError
from llmserve.server.routes.chat_parser import ChatFormat
from llmserve.server.routes.chat_reader import ChatReader
from llmserve.server.routes.logprobs import chat_logprobs
from llmserve.server.routes.ollama.errors import ollama_error
from llmserve.server.running.answer import StreamForm
from llmserve.server.running.failures import generation_error
from llmserve.server.running.job import Job

# A space before a line's JSON is none of it: clients read line by line, and know no comments.
_FORM = StreamForm("application/x-ndjson", b" ")
_NS_PER_S = 10**9
Fields = dict[str, Any]


def timestamp(seconds: float) -> str:
    """As RFC 3339 has it. seconds: since the epoch."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat().replace("+00:00", "Z")


def _line(fields: Fields) -> bytes:
    return msgspec.json.encode(fields) + b"\n"


class OllamaAnswer:
    """See Answer. Of a chat, whose text is in a message, or of a generation."""

    form = _FORM
    words_empty_texts = False

    def __init__(
        self, job: Job, form: ChatFormat, is_chat: bool, num_top_logprobs: int | None
    ) -> None:
        self._job = job
        self._is_chat = is_chat
        self._num_top = num_top_logprobs
        self._reader = ChatReader(form, job.model.tokenizer())
        self._calls: list[ToolCallDelta] = []  # told as a whole, at the end
        self._reason: str | None = None  # why the stream ended
        self._has_failed = False

    @property
    def is_plain(self) -> bool:
        """See Answer."""
        return self._reader.is_plain and self._num_top is None

    def prepare(self, prompt_idx: int) -> None:
        """See Answer: prompts have no log-probabilities."""

    def document(self, states: Sequence[RequestState], cause: str) -> object:
        """See Answer."""
        (state,) = states
        (completion,) = state.completions()
        pieces = self._reader.read(completion)
        self._calls += pieces.tool_calls
        self._reason = self._done_reason(completion, cause)
        fields = self._fields(pieces, self._called(), completion)
        return {**fields, **self._ending()}

    def lines(
        self, prompt_idx: int, news: Sequence[CompletionOutput], cause: str
    ) -> Iterable[bytes]:
        """See Answer."""
        for completion in news:
            pieces = self._reader.read(completion)
            self._calls += pieces.tool_calls
            if pieces.content or pieces.reasoning or completion.logprobs:
                yield _line({**self._fields(pieces, [], completion), "done": False})
            if completion.error:
                yield self.error_line(generation_error(completion.error, self._job))
            elif completion.finish_reason is not None:
                self._reason = self._done_reason(completion, cause)

    def error_line(self, error: ApiError) -> bytes:
        """See Answer."""
        self._has_failed = True
        return _line(ollama_error(error))

    def last_lines(self) -> Iterable[bytes]:
        """See Answer."""
        if self._has_failed:
            return
        if calls := self._called():
            yield _line({**self._fields(Pieces(), calls), "done": False})
        yield _line({**self._fields(Pieces(), []), **self._ending()})

    def _fields(
        self, pieces: Pieces, calls: list[Fields], completion: CompletionOutput | None = None
    ) -> Fields:
        fields: Fields = {
            "model": self._job.model.name,
            "created_at": timestamp(self._job.created),
        }
        said: Fields = {"thinking": pieces.reasoning} if pieces.reasoning else {}
        if self._is_chat:
            called = {"tool_calls": calls} if calls else {}
            message = {"role": "assistant", "content": pieces.content, **said, **called}
            fields["message"] = message
        else:
            fields |= {"response": pieces.content, **said}
        if self._num_top is not None and completion is not None and completion.logprobs:
            tokenizer = self._job.model.tokenizer()
            rows = chat_logprobs(completion.logprobs, self._num_top, (), tokenizer)
            fields["logprobs"] = rows["content"]
        return fields

    def _called(self) -> list[Fields]:
        """Calls, whose arguments are an object where they are one."""
        return [
            {"id": call["id"], "function": _function(idx, call["function"])}
            for idx, call in enumerate(merged(self._calls))
        ]

    def _done_reason(self, completion: CompletionOutput, cause: str) -> str:
        reason = self._reader.finish_reason(completion, cause)
        return "length" if reason in ("length", "abort") else "stop"

    def _ending(self) -> Fields:
        """Counts, and times in nanoseconds."""
        (state,) = self._job.states
        metrics = state.output().metrics
        assert metrics is not None
        began, first, last = (
            metrics.arrival_time,
            metrics.first_token_ts or metrics.arrival_time,
            metrics.last_token_ts or metrics.arrival_time,
        )
        return {
            "done": True,
            "done_reason": self._reason or "stop",
            "total_duration": _ns(last - began),
            "load_duration": 0,
            "prompt_eval_count": len(state.prompt.token_ids),
            "prompt_eval_duration": _ns(first - began),
            "eval_count": state.num_generation_tokens,
            "eval_duration": _ns(last - first),
        }


def _ns(duration_s: float) -> int:
    return max(int(duration_s * _NS_PER_S), 0)


def _function(index: int, function: Any) -> Fields:
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        arguments = {"arguments": function["arguments"]}
    return {"index": index, "name": function["name"], "arguments": arguments}
