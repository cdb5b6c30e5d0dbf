"""POST /v1/chat/completions."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmserve.outputs import CompletionOutput
from llmserve.parsers.deltas import Pieces, merged
from llmserve.requests.state import RequestState
from llmserve.server.context import context
from llmserve.server.http.errors import ApiError
from llmserve.server.http.events import DONE, event
from llmserve.server.http.head import given_request_id
from llmserve.server.routes.bodies import ChatBody, StreamOptions
from llmserve.server.routes.chat_job import chat_job
from llmserve.server.routes.chat_parser import ChatFormat, streamed_calls
from llmserve.server.routes.chat_reader import ChatReader
from llmserve.server.routes.logprobs import PromptRows, chat_logprobs
from llmserve.server.routes.request_body import read_json
from llmserve.server.routes.wire import (
    NULLS,
    Usage,
    error_event,
    error_line,
    head,
    stop_reason,
    usage,
)
from llmserve.server.running.answer import EVENTS
from llmserve.server.running.job import Job

_CHUNK = "chat.completion.chunk"
# A whole one, as vLLM has it.
_MESSAGE = {
    "role": "assistant",
    "content": None,
    **dict.fromkeys(("refusal", "annotations", "audio", "function_call")),
    **dict.fromkeys(("reasoning", "reasoning_content")),
}


async def chat_completions(request: Request) -> Response:
    """Answers a conversation."""
    body = await read_json(request, ChatBody, context(request).settings)
    given_id = body.request_id or given_request_id(request.scope).decode("ascii")
    found = await chat_job(request, body, "chatcmpl", given_id)
    return found.response(_Answer(found.job, body, found.form))


def _text(content: str | list[Any]) -> str:
    """Of a message that a template has written: parts are lines, as they are to most templates."""
    parts = [content] if isinstance(content, str) else content
    return "\n".join(part if isinstance(part, str) else part["text"] for part in parts)


def _fields(pieces: Pieces) -> dict[str, Any]:
    """Those of a message that have something. What was thought is there under the name that vLLM
    gives it now, and under the one that it had."""
    fields: dict[str, Any] = {}
    if pieces.reasoning:
        fields |= {"reasoning": pieces.reasoning, "reasoning_content": pieces.reasoning}
    if pieces.content:
        fields["content"] = pieces.content
    if pieces.tool_calls:
        fields["tool_calls"] = pieces.tool_calls
    return fields


class _Answer:
    form = EVENTS

    def __init__(self, job: Job, body: ChatBody, form: ChatFormat) -> None:
        self._job = job
        self._body = body
        self._options = body.stream_options or StreamOptions()
        self._reader = ChatReader(form, job.model.tokenizer())
        self._prompt_rows = PromptRows(job.states)
        self._has_begun = False
        self._num_told = 0  # new tokens of the chunks so far
        # vLLM's echo: the message that is continued stands before what continues it.
        self._before = _text(body.messages[-1]["content"]) if body.echo else ""

    @property
    def is_plain(self) -> bool:
        """See Answer."""
        body = self._body
        says_more = body.return_token_ids or self._options.continuous_usage_stats
        return not (body.logprobs or says_more) and self._reader.is_plain

    words_empty_texts = False

    def prepare(self, prompt_idx: int) -> None:
        """See Answer."""
        self._prompt_rows.of(prompt_idx)

    def document(self, states: Sequence[RequestState], cause: str) -> object:
        """See Answer."""
        (state,) = states
        choices = [self._choice(completion, cause) for completion in state.completions()]
        return {
            **head("chat.completion", self._job),
            "choices": choices,
            **NULLS,
            "usage": self._usage(states),
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            **self._of_prompt(),
        }

    def lines(
        self, prompt_idx: int, news: Sequence[CompletionOutput], cause: str
    ) -> Iterable[bytes]:
        """See Answer."""
        for completion in news:
            if not self._reader.has_begun(completion.index):
                prompt = None if self._has_begun else self._of_prompt()
                self._has_begun = True
                yield self._chunk(completion.index, {"role": "assistant", "content": ""}, prompt)
                if self._before:
                    yield self._chunk(completion.index, {"content": self._before})
            self._num_told += len(completion.token_ids)
            delta = _fields(self._reader.read(completion))
            if "tool_calls" in delta:
                delta["tool_calls"] = streamed_calls(delta["tool_calls"])
            error = completion.error  # an event of its own, after what came with it
            # After the fields: tool calls may have come.
            reason = None if error else self._reader.finish_reason(completion, cause)
            logprobs = self._logprobs(completion)
            has_tokens = bool(completion.token_ids) or not error
            if delta or reason or (has_tokens and (logprobs or self._body.return_token_ids)):
                more: dict[str, Any] = {"logprobs": logprobs, "finish_reason": reason}
                if reason:
                    more["stop_reason"] = stop_reason(completion, cause)
                if self._body.return_token_ids:
                    more["token_ids"] = completion.token_ids
                yield self._chunk(completion.index, delta, **more)
            if error:
                yield error_event(error, self._job)

    def error_line(self, error: ApiError) -> bytes:
        """See Answer."""
        return error_line(error)

    def last_lines(self) -> Iterable[bytes]:
        """See Answer."""
        if self._options.include_usage:
            start = head(_CHUNK, self._job)
            yield event({**start, "choices": [], "usage": self._usage(self._job.states)})
        yield DONE

    def _usage(self, states: Sequence[RequestState], num_told: int | None = None) -> Usage:
        return usage(states, self._reader.num_reasoning_tokens, num_told)

    def _of_prompt(self) -> dict[str, Any]:
        """What the body asks to be told of the prompt."""
        (state,) = self._job.states
        fields: dict[str, Any] = {}
        if self._body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = self._prompt_rows.of(0)
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = state.prompt.token_ids
        if self._body.return_prompt_text:
            fields["prompt_text"] = state.prompt.text
        return fields

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        prompt: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> bytes:
        """more: of the choice."""
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        chunk = {**head(_CHUNK, self._job), "choices": [choice], **(prompt or {})}
        if self._options.continuous_usage_stats:
            chunk["usage"] = self._usage(self._job.states, self._num_told)
        return event(chunk)

    def _choice(self, completion: CompletionOutput, cause: str) -> dict[str, Any]:
        fields = _fields(self._reader.read(completion))
        if "tool_calls" in fields:
            fields["tool_calls"] = merged(fields["tool_calls"])
        text = self._before + (fields.get("content") or "")
        content = text if text or "tool_calls" not in fields else None
        choice: dict[str, Any] = {
            "index": completion.index,
            "message": {**_MESSAGE, **fields, "content": content},
            "logprobs": self._logprobs(completion),
            "finish_reason": self._reader.finish_reason(completion, cause),
            "stop_reason": stop_reason(completion, cause),
            "token_ids": completion.token_ids if self._body.return_token_ids else None,
        }
        return choice

    def _logprobs(self, completion: CompletionOutput) -> dict[str, Any] | None:
        if not self._body.logprobs or completion.logprobs is None:
            return None
        tokenizer = self._job.model.tokenizer()
        num_top, named = self._body.top_logprobs or 0, self._body.logprob_token_ids or ()
        as_ids = bool(self._body.return_tokens_as_token_ids)
        return chat_logprobs(completion.logprobs, num_top, named, tokenizer, as_ids)
