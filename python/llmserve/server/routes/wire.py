"""Pieces of answers that routes have in common."""

from collections.abc import Sequence
from typing import Any

from llmserve.outputs import CompletionOutput
from llmserve.requests.state import RequestState
from llmserve.server.http.errors import ApiError
from llmserve.server.http.events import event
from llmserve.server.running.activity import TIMEOUT
from llmserve.server.running.failures import generation_error
from llmserve.server.running.job import Job

Usage = dict[str, Any]


def error_event(message: str, job: Job) -> bytes:
    """What a stream says where it cannot go on."""
    return error_line(generation_error(message, job))


def error_line(error: ApiError) -> bytes:
    """Likewise."""
    return event(error.body())


def head(kind: str, job: Job) -> dict[str, Any]:
    """What every document and chunk of an answer begins with."""
    return {
        "id": job.request_id,
        "object": kind,
        "created": job.created,
        "model": job.model.name,
    }


# Of whole answers, as vLLM has them.
NULLS = {"service_tier": None, "system_fingerprint": None, "kv_transfer_params": None}


def finish_reason(completion: CompletionOutput, cause: str) -> str | None:
    """The engine's, or "length" where the server's time limit ended it: clients with types know no
    other word for an answer that was cut."""
    if completion.finish_reason == "abort" and cause == TIMEOUT:
        return "length"
    return completion.finish_reason


def stop_reason(completion: CompletionOutput, cause: str) -> int | str | None:
    """The stop string or token that ended it, or "timeout"."""
    if completion.finish_reason == "abort" and cause == TIMEOUT:
        return TIMEOUT
    return completion.stop_reason


def usage(
    states: Sequence[RequestState],
    num_reasoning_tokens: int | None = None,
    num_told: int | None = None,
) -> Usage:
    """Token counts of an HTTP request so far, as OpenAI's answers have them. num_reasoning_tokens:
    None where nothing was thought. num_told: new tokens up to a chunk; None: all that came."""
    prompt_tokens = sum(len(state.prompt.token_ids) for state in states)
    completion_tokens = num_told
    if completion_tokens is None:
        completion_tokens = sum(state.num_generation_tokens for state in states)
    cached_tokens = sum(state.num_cached_tokens for state in states)
    counts: Usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    details = {}
    if num_reasoning_tokens is not None:
        details["reasoning_tokens"] = num_reasoning_tokens
    num_guesses = sum(state.num_draft_tokens for state in states)
    if num_guesses > 0:
        num_right = sum(state.num_accepted_tokens for state in states)
        details["accepted_prediction_tokens"] = num_right
        details["rejected_prediction_tokens"] = num_guesses - num_right
    if details:
        counts["completion_tokens_details"] = details
    return counts
