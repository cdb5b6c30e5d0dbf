"""POST /v1/chat/completions."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmserve.common.text_threads import on_text_thread
from llmserve.outputs import CompletionOutput
from llmserve.parsers.deltas import merged
from llmserve.prompts import TokensPrompt
from llmserve.requests.generation_config import own_max_tokens
from llmserve.requests.state import RequestState
from llmserve.sampling_params import SamplingParams
from llmserve.server.context import context
from llmserve.server.http.errors import ApiError
from llmserve.server.http.events import event
from llmserve.server.models import ServedModel
from llmserve.server.routes.bodies import ChatBody, StreamOptions
from llmserve.server.routes.chat_parser import (
    ChatFormat,
    ChatParser,
    chat_format,
    reasoning_section,
    served_tool_style,
    streamed_calls,
)
from llmserve.server.routes.constraints import (
    special_token_id,
    tool_names,
    with_calls,
    with_reasoning,
)
from llmserve.server.routes.generation_job import check_stream_options, generation_job
from llmserve.server.routes.logprobs import PromptRows, chat_logprobs
from llmserve.server.routes.prompts import chat_prompt
from llmserve.server.routes.request_body import arrived_at, num_body_bytes, read_json
from llmserve.server.routes.sampling import refuse_given, sampling_params, timeout_s
from llmserve.server.routes.wire import add_usage, error_event, finish_reason, head, usage
from llmserve.server.running.generation import GenerationResponse
from llmserve.server.running.job import Job
from llmserve.server.settings import ServerSettings

_CHUNK = "chat.completion.chunk"
# A conversation of so many bytes is a prompt in about a millisecond, for which other streams may
# wait; handing it to a thread and back costs more processor time than most of them.
_MAX_BYTES_IN_LOOP = 4096


async def chat_completions(request: Request) -> Response:
    """Answers a conversation."""
    server = context(request)
    body = await read_json(request, ChatBody, server.settings)
    model = server.models.get(body.model)
    _check(body)
    defaults = model.llm.get_default_sampling_params()
    given = (body.max_completion_tokens, body.max_tokens, own_max_tokens(defaults))
    params = sampling_params(
        body,
        defaults,
        server.settings,
        next((limit for limit in given if limit is not None), None),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    names = tool_names(body)
    params = _with_tools(body, params, model, server.settings, bool(names))
    limit_s = timeout_s(body.timeout, server.settings)
    arrived = arrived_at(request.scope)
    with server.activity.in_time(model, arrived, limit_s):
        prompt = await _prompt(body, params, model, num_body_bytes(request))
        text = prompt.get("prompt") or ""
        params, section = _with_reasoning(body, params, model, server.settings, text)
        form = chat_format(body, model, server.settings, names, text, section)
        job = await generation_job("chatcmpl", body, model, [prompt], params, server.settings)
    return GenerationResponse(server.activity, job, _Answer(job, body, form), arrived)


def _check(body: ChatBody) -> None:
    refuse_given(body, ("functions", "function_call"), "use tools and tool_choice")
    refuse_given(body, ("audio", "web_search_options"), "the model reads and writes text")
    if body.modalities not in (None, ["text"]):
        raise ApiError(400, "modalities must be ['text']", param="modalities")
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    if body.top_logprobs is not None and body.top_logprobs < 0:
        raise ApiError(400, "top_logprobs must be at least 0", param="top_logprobs")
    if body.logprob_token_ids and not body.logprobs:
        raise ApiError(400, "logprob_token_ids needs logprobs: true", param="logprob_token_ids")
    if body.echo and not body.continue_final_message:
        raise ApiError(
            400,
            "echo gives back the message that is continued; set continue_final_message, or leave "
            "echo out",
            param="echo",
        )
    check_stream_options(body)
    for name in ("max_tokens", "max_completion_tokens"):
        if getattr(body, name) == 0:
            raise ApiError(400, f"{name} must be at least 1", param=name)


def _with_tools(
    body: ChatBody,
    params: SamplingParams,
    model: ServedModel,
    settings: ServerSettings,
    has_tools: bool,
) -> SamplingParams:
    """A call that has to be made is a grammar, and what shows calls has to be in the text."""
    if not has_tools:
        return params
    style = served_tool_style(model, settings)
    given = params.structured_outputs
    constraint = with_calls(body, given, style, model.tokenizer())
    if constraint is not given:
        params = dataclasses.replace(params, structured_outputs=constraint)
    return _showing_special_tokens(body, params) if style.special_tokens else params


def _with_reasoning(
    body: ChatBody,
    params: SamplingParams,
    model: ServedModel,
    settings: ServerSettings,
    prompt: str,
) -> tuple[SamplingParams, tuple[str, str] | None]:
    """What the model may think first is held to nothing, and what parts it from the answer has to
    be in the text; with what opens and ends it, None where none is to be looked for."""
    section = reasoning_section(model, settings)
    given, tokenizer = params.structured_outputs, model.tokenizer()
    constraint, may_think = with_reasoning(body, given, section, prompt, tokenizer)
    if constraint is not given:
        params = dataclasses.replace(params, structured_outputs=constraint)
    if section is None or not may_think:
        return params, None
    if any(special_token_id(tokenizer, sign) is not None for sign in section):
        params = _showing_special_tokens(body, params)
    return params, section


def _showing_special_tokens(body: ChatBody, params: SamplingParams) -> SamplingParams:
    """Parts of the answer are told by them; a body that says otherwise is obeyed."""
    if body.skip_special_tokens is not None:
        return params
    return dataclasses.replace(params, skip_special_tokens=False)


async def _prompt(
    body: ChatBody, params: SamplingParams, model: ServedModel, num_bytes: int
) -> TokensPrompt:
    """By the model's template, which may take long on what is not short: there on a thread.
    num_bytes: of the body as it came."""
    check_text = model.llm.check_text if params.truncate_prompt_tokens is None else None
    make = partial(chat_prompt, body, model.tokenizer(), check_text)
    if num_bytes <= _MAX_BYTES_IN_LOOP:
        text, token_ids = make()
    else:
        text, token_ids = await on_text_thread(num_bytes, make)
    return TokensPrompt(prompt=text, prompt_token_ids=token_ids, cache_salt=body.cache_salt or "")


def _text(content: str | list[Any]) -> str:
    """Of a message that a template has written: parts are lines, as they are to most templates."""
    parts = [content] if isinstance(content, str) else content
    return "\n".join(part if isinstance(part, str) else part["text"] for part in parts)


class _Answer:
    def __init__(self, job: Job, body: ChatBody, form: ChatFormat) -> None:
        self._job = job
        self._body = body
        self._options = body.stream_options or StreamOptions()
        self._format = form
        self._parsers: dict[int, ChatParser] = {}
        self._prompt_rows = PromptRows(job.states)
        # vLLM's echo: the message that is continued stands before what continues it.
        self._before = _text(body.messages[-1]["content"]) if body.echo else ""

    @property
    def is_plain(self) -> bool:
        """See Answer."""
        body, form = self._body, self._format
        says_more = body.return_token_ids or self._options.continuous_usage_stats
        is_read = form.style is not None or form.reasoning is not None
        return not (body.logprobs or says_more or is_read)

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
            "usage": usage(states),
            **self._of_prompt(),
        }

    def lines(
        self, prompt_idx: int, news: Sequence[CompletionOutput], cause: str
    ) -> Iterable[bytes]:
        """See Answer."""
        for completion in news:
            if completion.index not in self._parsers:
                prompt = None if self._parsers else self._of_prompt()  # in the first chunk alone
                yield self._chunk(completion.index, {"role": "assistant", "content": ""}, prompt)
                if self._before:
                    yield self._chunk(completion.index, {"content": self._before})
            delta = self._fields(completion)
            if "tool_calls" in delta:
                delta["tool_calls"] = streamed_calls(delta["tool_calls"])
            error = completion.error  # an event of its own, after what came with it
            # After the fields: tool calls may have come.
            reason = None if error else self._finish_reason(completion, cause)
            logprobs = self._logprobs(completion)
            has_tokens = bool(completion.token_ids) or not error
            if delta or reason or (has_tokens and (logprobs or self._body.return_token_ids)):
                more: dict[str, Any] = {"logprobs": logprobs, "finish_reason": reason}
                if reason:
                    more["stop_reason"] = completion.stop_reason
                if self._body.return_token_ids:
                    more["token_ids"] = completion.token_ids
                yield self._chunk(completion.index, delta, **more)
            if error:
                yield error_event(error, self._job)

    def last_lines(self) -> Iterable[bytes]:
        """See Answer."""
        if self._options.include_usage:
            start = head(_CHUNK, self._job)
            yield event({**start, "choices": [], "usage": usage(self._job.states)})

    def _of_prompt(self) -> dict[str, Any]:
        """What the body asks to be told of the prompt."""
        (state,) = self._job.states
        fields: dict[str, Any] = {}
        if self._body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = self._prompt_rows.of(0)
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = state.prompt.token_ids
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
        add_usage(chunk, self._options, self._job.states)
        return event(chunk)

    def _parser(self, index: int) -> ChatParser:
        if index not in self._parsers:
            self._parsers[index] = self._format.parser()
        return self._parsers[index]

    def _fields(self, completion: CompletionOutput) -> dict[str, Any]:
        """What the new text adds to the message; lists and texts of the parser's two pieces are
        put together."""
        parser = self._parser(completion.index)
        fields: dict[str, Any] = dict(parser.feed(completion.text))
        if completion.finish_reason is not None:
            for name, value in parser.finish().items():
                fields[name] = fields[name] + value if name in fields else value
        return fields

    def _choice(self, completion: CompletionOutput, cause: str) -> dict[str, Any]:
        fields = self._fields(completion)
        if "tool_calls" in fields:
            fields["tool_calls"] = merged(fields["tool_calls"])
        text = self._before + (fields.get("content") or "")
        content = text if text or "tool_calls" not in fields else None
        choice: dict[str, Any] = {
            "index": completion.index,
            "message": {"role": "assistant", **fields, "content": content},
            "logprobs": self._logprobs(completion),
            "finish_reason": self._finish_reason(completion, cause),
            "stop_reason": completion.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = completion.token_ids
        return choice

    def _finish_reason(self, completion: CompletionOutput, cause: str) -> str | None:
        reason = finish_reason(completion, cause)
        if reason == "stop" and self._parser(completion.index).has_tool_calls:
            return "tool_calls"
        return reason

    def _logprobs(self, completion: CompletionOutput) -> dict[str, Any] | None:
        if not self._body.logprobs or completion.logprobs is None:
            return None
        tokenizer = self._job.model.tokenizer()
        num_top, named = self._body.top_logprobs or 0, self._body.logprob_token_ids or ()
        return chat_logprobs(completion.logprobs, num_top, named, tokenizer)
