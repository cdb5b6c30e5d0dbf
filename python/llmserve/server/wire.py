"""Pieces of answers that routes have in common."""

from collections.abc import Sequence
from typing import Any

import msgspec

from llmserve.outputs import CompletionOutput, RequestOutput
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


class Usage:
    """Token counts of a whole HTTP request."""

    def __init__(self, num_prompts: int) -> None:
        self._prompt_tokens = [0] * num_prompts
        self._cached_tokens = [0] * num_prompts
        self._completion_tokens = 0

    def add(self, prompt_idx: int, output: RequestOutput) -> None:
        """Counts an output's tokens, or a delta's."""
        self._prompt_tokens[prompt_idx] = len(output.prompt_token_ids)
        self._cached_tokens[prompt_idx] = output.num_cached_tokens
        self._completion_tokens += sum(len(c.token_ids) for c in output.outputs)

    def to_dict(self) -> dict[str, Any]:
        """As OpenAI's answers have it."""
        prompt_tokens = sum(self._prompt_tokens)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached_tokens)},
        }


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Of whole outputs."""
    counts = Usage(len(outputs))
    for idx, output in enumerate(outputs):
        counts.add(idx, output)
    return counts.to_dict()
