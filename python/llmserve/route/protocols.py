"""What a router knows of the routes of servers: which go to any replica, which of their streams go
on elsewhere, and how a stream says that it cannot."""

from collections.abc import Mapping
from typing import Any

import msgspec

from llmserve.route.outgoing import canonical
from llmserve.server.http.errors import ApiError
from llmserve.server.http.events import event, named_event
from llmserve.server.routes.anthropic.errors import anthropic_error
from llmserve.server.routes.ollama.errors import ollama_error

# Streams of choices, each of which goes on by itself: see replay.py.
CHOICES = ("/v1/completions", "/v1/chat/completions")
# Streams of one answer, in the words of other protocols: see frames.py.
FRAMED = ("/v1/messages", "/v1/responses", "/completion", "/api/chat", "/api/generate")
_ANSWERED = (*CHOICES, *FRAMED)
_BARE = ("/completions", "/chat/completions", "/messages", "/responses")
_LM_STUDIOS = ("/api/v0/completions", "/api/v0/chat/completions", "/api/v0/embeddings")
_COUNTS = ("/messages/count_tokens", "/responses/input_tokens", "/chat/completions/input_tokens")
_TEXTS = ("/tokenize", "/detokenize")
# What POST goes to any replica.
POSTED = (
    *_ANSWERED,
    *_BARE,
    *_LM_STUDIOS,
    *("/v1/embeddings", "/embeddings", "/api/embed", "/api/embeddings", "/api/show"),
    *_COUNTS,
    *("/v1" + path for path in _COUNTS),
    *_TEXTS,
    *("/v1" + path for path in _TEXTS),
    "/apply-template",
)
GOT = (
    *("/v1/models", "/models", "/v1/models/{model:path}", "/models/{model:path}"),
    *("/api/v0/models", "/api/v0/models/{model:path}"),
    *("/api/tags", "/api/ps", "/api/version", "/props", "/tokenizer_info"),
)


def is_answered(path: str) -> bool:
    """Whether a model goes on from what is sent there."""
    return canonical(path) in _ANSWERED


def is_stream(path: str, body: Mapping[str, Any]) -> bool:
    """Whether the answer is one that may go on elsewhere. body: of a POST; empty for what is no
    object."""
    path = canonical(path)
    if path not in _ANSWERED or not body:
        return False
    if path.startswith("/api/"):  # Ollama streams unless told otherwise
        return body.get("stream") is not False
    return body.get("stream") is True


def sent_body(path: str, body: Mapping[str, Any], data: bytes) -> bytes:
    """What a replica gets of a body. Raises ApiError for what one replica alone could answer."""
    if canonical(path) not in ("/v1/responses", "/v1/responses/input_tokens") or not body:
        return data
    for name in ("previous_response_id", "background"):
        if body.get(name):
            raise ApiError(
                400,
                f"{name}: servers keep responses, and a router does not know which; send the whole "
                f"conversation as input",
                param=name,
                code="unsupported_parameter",
            )
    return msgspec.json.encode({**body, "store": False})


def last_event(path: str, error: ApiError) -> bytes:
    """Of a stream that ends with an error."""
    path = canonical(path)
    if path == "/v1/messages":
        return named_event("error", anthropic_error(error))
    if path == "/v1/responses":
        fields = {"code": error.code, "message": error.message, "param": error.param}
        return named_event("error", {"type": "error", **fields})
    if path.startswith("/api/"):
        return msgspec.json.encode(ollama_error(error)) + b"\n"
    return event(error.body())
