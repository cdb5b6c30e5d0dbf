"""Pieces of answers that routes have in common."""

from collections.abc import Sequence
from typing import Any

from llmserve.outputs import CompletionOutput
from llmserve.requests.state import RequestState
from llmserve.server.http.events import event
from llmserve.server.routes.bodies import StreamOptions
from llmserve.server.running.activity import TIMEOUT
from llmserve.server.running.failures import generation_error
from llmserve.server.running.job import Job


def error_event(message: str, job: Job) -> bytes:
    """What a stream says where it cannot go on."""
    return event(generation_error(message, job).body())


def head(kind: str, job: Job) -> dict[str, Any]:
    """What every document and chunk of an answer begins with."""
    return {
        "id": job.request_id,
        "object": kind,
        "created": job.created,
        "model": job.model.name,
    }


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


def add_usage(
    chunk: dict[str, Any], options: StreamOptions, states: Sequence[RequestState]
) -> None:
    """What a chunk before the last one says of token counts: nothing, null where the last one has
    them, or those so far."""
    if options.continuous_usage_stats:
        chunk["usage"] = usage(states)
    elif options.include_usage:
        chunk["usage"] = None
