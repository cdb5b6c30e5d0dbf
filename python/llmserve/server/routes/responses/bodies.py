"""What clients of OpenAI's responses send. A value of None is one that was not given."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from llmserve.server.routes.bodies import Count, MaxTokens, Strings, VllmBody


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """How a stream is written."""

    # Of no effect: nothing pads the events
    include_obfuscation: bool | None = None


class ResponsesBody(VllmBody, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/responses, and /v1/responses/input_tokens."""

    # A text, or items: messages, calls, results of calls, reasoning
    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    # Of a response that was stored: its conversation goes on
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: MaxTokens | None = None
    # {"format": {"type": "text" | "json_object" | "json_schema", ...}}
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    # {"effort": ...}
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    top_logprobs: Count | None = None
    truncation: str | None = None
    service_tier: str | None = None
    user: str | None = None
    # vLLM's and llmserve's own, as in a chat's body
    stop: str | Strings | None = None
    logit_bias: dict[str, float] | None = None
    structured_outputs: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: Annotated[str, Meta(max_length=1024)] | None = None
    priority: int | None = None
    timeout: float | None = None
    # Accepted, and of no effect here but that the response repeats them
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    max_tool_calls: Count | None = None
    # It runs on without its client, and is asked for by its id
    background: bool | None = None
    # Refused where they have a value
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    context_management: list[dict[str, Any]] | None = None
    moderation: dict[str, Any] | None = None
