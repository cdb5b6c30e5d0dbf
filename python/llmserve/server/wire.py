"""Pieces of answers that routes have in common."""

from collections.abc import Sequence
from typing import Any

import msgspec

from llmserve.outputs import CompletionOutput
from llmserve.request_state import RequestState
from llmserve.server.activity import TIMEOUT

_encode = msgspec.json.Encoder().encode


def event(data: object) -> bytes:
    """A server-sent event."""
    return b"data: " + _encode(data) + b"\n\n"


def error_event(message: str) -> bytes:
    """What a stream says where it cannot go on."""
    error = {"message": message, "type": "server_error", "param": None, "code": "generation_failed"}
    return event({"error": error})


def finish_reason(completion: CompletionOutput, cause: str) -> str | None:
    """The engine's, or "timeout" where the server ended it."""
    if completion.finish_reason == "abort" and cause == TIMEOUT:
        return TIMEOUT
    return completion.finish_reason


def usage(states: Sequence[RequestState]) -> dict[str, Any]:
    """Token counts of an HTTP request so far, as OpenAI's answers have them."""
    prompt_tokens = sum(len(state.prompt.token_ids) for state in states)
    completion_tokens = sum(state.num_generation_tokens for state in states)
    cached_tokens = sum(state.num_cached_tokens for state in states)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
