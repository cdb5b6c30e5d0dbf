"""POST /api/chat and /api/generate."""

import json
import time
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmserve.common.arguments import describe
from llmserve.server.context import context
from llmserve.server.http.errors import ApiError, JsonResponse
from llmserve.server.routes.bodies import ChatBody, CompletionBody
from llmserve.server.routes.chat_job import chat_job
from llmserve.server.routes.chat_parser import ChatFormat
from llmserve.server.routes.completion_job import completion_job
from llmserve.server.routes.ollama.answer import OllamaAnswer, timestamp
from llmserve.server.routes.ollama.bodies import (
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
)
from llmserve.server.routes.ollama.models import served_name
from llmserve.server.routes.ollama.options import body_fields, format_fields
from llmserve.server.routes.request_body import off_the_loop, read_json
from llmserve.server.routes.sampling import (
    refuse_given,
)

Message = dict[str, Any]


async def ollama_chat(request: Request) -> Response:
    """Answers a conversation."""
    server = context(request)
    body = await read_json(request, OllamaChatBody, server.settings, any_media_type=True)
    if not body.messages:
        return _loaded(request, body, {"message": {"role": "assistant", "content": ""}})
    messages = await off_the_loop(request, partial(messages_of, body.messages))
    fields = {**_fields(request, body), **_chat_fields(body)}
    found = await chat_job(
        request, ChatBody(messages=messages, tools=body.tools or None, **fields), "ollama"
    )
    return found.response(OllamaAnswer(found.job, found.form, True, _num_top(body)))


async def ollama_generate(request: Request) -> Response:
    """Continues a prompt, as an answer to it unless it is raw."""
    server = context(request)
    body = await read_json(request, OllamaGenerateBody, server.settings, any_media_type=True)
    refuse_given(body, ("suffix",), "models that fill in the middle are not served")
    refuse_given(body, ("template",), "the server's own template is used, or with raw none")
    refuse_given(body, ("width", "height", "steps"), "the model writes text")
    if body.images:
        raise ApiError(400, "images are not supported: llmserve runs the text part of a model")
    if body.context:
        raise ApiError(400, "context is not supported: send the conversation to /api/chat")
    if not body.prompt:
        return _loaded(request, body, {"response": ""})
    num_top = _num_top(body)
    if body.raw:  # no template is put around it, and all of its answer is text
        completion = CompletionBody(prompt=body.prompt, logprobs=num_top, **_fields(request, body))
        raw = await completion_job(request, completion, "ollama")
        form = ChatFormat(None, (), True, None, False, False)
        return raw.response(OllamaAnswer(raw.job, form, False, num_top))
    messages: list[Message] = [{"role": "user", "content": body.prompt}]
    if body.system:
        messages.insert(0, {"role": "system", "content": body.system})
    fields = {**_fields(request, body), **_chat_fields(body)}
    found = await chat_job(request, ChatBody(messages=messages, **fields), "ollama")
    return found.response(OllamaAnswer(found.job, found.form, False, num_top))


def _fields(request: Request, body: OllamaBody) -> dict[str, Any]:
    """Those that a chat's body and a completion's have in common."""
    settings = context(request).settings
    return {
        "model": served_name(context(request).models, body.model),
        "stream": body.stream is not False,
        **body_fields(body.options, settings),
        **format_fields(body.format),
    }


def _chat_fields(body: OllamaBody) -> dict[str, Any]:
    think, fields = body.think, dict[str, Any]()
    if think is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": think is not False}
        fields["include_reasoning"] = think is not False
    if isinstance(think, str):
        fields["reasoning_effort"] = think
    if body.logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    return fields


def _num_top(body: OllamaBody) -> int | None:
    return (body.top_logprobs or 0) if body.logprobs else None


def messages_of(messages: list[Message]) -> list[Message]:
    """As a chat has them. Raises ApiError."""
    return [_message(f"messages[{idx}]", message) for idx, message in enumerate(messages)]


def _message(label: str, message: Message) -> Message:
    """As a chat's: arguments of calls are text there, and what was thought has another name."""
    if message.get("images"):
        raise ApiError(
            400, f"{label}.images: llmserve runs the text part of a model", param="messages"
        )
    names = ("role", "content", "thinking")
    own: Message = {name: message[name] for name in names if name in message}
    if message.get("tool_name") is not None:
        own["name"] = message["tool_name"]
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise ApiError(400, f"{label}.tool_calls must be a list", param="messages")
        own["tool_calls"] = [_call(label, call) for call in calls]
    return own


def _call(label: str, call: Any) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str):
        raise ApiError(
            400,
            f"{label}.tool_calls must be {{'function': {{'name': ..., 'arguments': ...}}}}, got "
            f"{describe(call)}",
            param="messages",
        )
    arguments = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    return {
        "id": str(call.get("id", "")),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _loaded(request: Request, body: OllamaBody, fields: dict[str, Any]) -> Response:
    """To who only wants a model to be there, which it is. Raises ApiError."""
    models = context(request).models
    model = models.get(served_name(models, body.model))
    head = {"model": model.name, "created_at": timestamp(time.time())}
    return JsonResponse({**head, **fields, "done": True, "done_reason": "load"})
