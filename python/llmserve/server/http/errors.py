"""Errors as OpenAI's API words them: a status, a message, the parameter's name."""

import logging
import math
import re
from collections.abc import Iterator, Mapping
from http import HTTPStatus

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from llmserve.errors import (
    InvalidArgument,
    LLMServeError,
    NotSupported,
    PromptTooLong,
    QueueFull,
    ResourceExhausted,
)

_log = logging.getLogger(__name__)

_CONTEXT = re.compile(r"\bmax_model_len=(\d+)")
_PREFIX = re.compile(r"^(?:sampling_params|pooling_params)\[\d+\]: ")
# A message that is about a field begins with its name, perhaps in a list or dict: `stop[1] must`.
_FIELD = re.compile(r"([a-z][a-z0-9_]*)(?=[ :\[=])")
# What a route calls differently than the engine does.
_OTHER_NAMES = {
    "logprobs": "top_logprobs",
    "prompts": "prompt",
    "prompt": "input",
    "input": "messages",
}
# Of a document: itself, its choices, a choice, its log-probabilities; within them is a row a token.
_NUM_LEVELS = 4
# What looks like a path of this machine; messages never say where a model lies.
_PATH = re.compile(r"(?<![\w:/.])/(?:[\w.@+-]+/)+[\w.@+-]*")


class ApiError(Exception):
    """A request that gets an answer of this status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = "invalid_value" if code is None and status == 400 and param else code
        self.retry_after = retry_after

    def body(self) -> dict[str, object]:
        """{"error": {"message", "type", "param", "code"}}."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def headers(self) -> dict[str, str]:
        """Those beside the content's."""
        headers = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after)))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        """The whole answer."""
        return JsonResponse(self.body(), self.status, {**self.headers(), **(headers or {})})


class JsonResponse(Response):
    """JSON by msgspec."""

    media_type = "application/json"

    def render(self, content: object) -> bytes | memoryview:
        """The body's bytes."""
        return msgspec.json.encode(content)


class LargeJsonResponse(JsonResponse):
    """JSON of megabytes, for a thread to make: msgspec lets no other thread run within a call, so
    that one call makes no more than a row."""

    def render(self, content: object) -> bytes | memoryview:
        """The same bytes."""
        body = bytearray()
        for piece in _pieces(content, _NUM_LEVELS):
            body += piece
        return memoryview(body)


def _pieces(value: object, num_levels: int) -> Iterator[bytes]:
    if num_levels and isinstance(value, dict) and value:
        for idx, (key, item) in enumerate(value.items()):
            yield b"%b%b:" % (b"," if idx else b"{", msgspec.json.encode(str(key)))
            yield from _pieces(item, num_levels - 1)
        yield b"}"
    elif num_levels and isinstance(value, list) and any(map(_is_nested, value)):
        for idx, item in enumerate(value):
            yield b"," if idx else b"["
            yield from _pieces(item, num_levels - 1)
        yield b"]"
    else:
        yield msgspec.json.encode(value)


def _is_nested(value: object) -> bool:
    return isinstance(value, dict | list)


def to_api_error(
    error: Exception, fields: frozenset[str] = frozenset(), request_id: str = ""
) -> ApiError:
    """What a client is told of an exception. fields: those of the body, of which one may be named
    as the error's param. request_id: by which the log is searched for what is only said there."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, error.detail or HTTPStatus(error.status_code).phrase)
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="queue_full", retry_after=1)
    if isinstance(error, InvalidArgument | NotSupported):
        message = _PREFIX.sub("", _PATH.sub("<path>", str(error)))
        param, code = _param(message, fields), "invalid_value"
        if isinstance(error, PromptTooLong):
            code = "context_length_exceeded"
            if found := _CONTEXT.search(message):  # by these words clients know to shorten it
                message = (
                    f"This model's maximum context length is {found[1]} tokens. However, {message}"
                )
        return ApiError(400, message, param=param, code=code)
    if isinstance(error, ResourceExhausted):  # of this request alone: trying again does not help
        return ApiError(422, _PATH.sub("<path>", str(error)), code="does_not_fit")
    of_request = {"request_id": request_id}
    if isinstance(error, LLMServeError):  # the engine's; details are for the log
        _log.error("the engine failed: %s", error, extra=of_request)
        return ApiError(503, "the engine has stopped; see the server's log", code="engine_stopped")
    _log.error("a request failed", exc_info=error, extra=of_request)
    return ApiError(500, f"an error of the server; its log has {request_id}", code="internal_error")


def _param(message: str, fields: frozenset[str]) -> str | None:
    """The field of a body that a message is about."""
    found = _FIELD.match(message)
    name = found[1] if found else ""
    if message.startswith("the chat template of"):  # what it fails on is in them
        name = "messages"
    for _ in range(len(_OTHER_NAMES) + 1):
        other = _OTHER_NAMES.get(name, "")
        # A chat has both of logprobs: how many are asked for is the other's to say.
        if name in fields and (name != "logprobs" or other not in fields):
            return name
        name = other
    return None
