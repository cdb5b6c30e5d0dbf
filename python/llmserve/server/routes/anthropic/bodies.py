"""What clients of Anthropic's API send. A value of None is one that was not given."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from llmserve.server.routes.bodies import Strings


class CountTokensBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/messages/count_tokens."""

    messages: list[dict[str, Any]]
    model: str | None = None
    # A text, or blocks of text
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    # {"type": "enabled", "budget_tokens": n}, {"type": "adaptive"} or {"type": "disabled"}
    thinking: dict[str, Any] | None = None
    # {"format": {"type": "json_schema", "schema": ...}, "effort": ...}
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    # vLLM's, as in a chat's body
    chat_template_kwargs: dict[str, Any] | None = None
    # Accepted, and of no effect here: the prefix cache works by itself
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    # Refused where they have a value
    mcp_servers: list[dict[str, Any]] | None = None
    container: str | dict[str, Any] | None = None


class MessagesBody(CountTokensBody, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    stream: bool | None = None
    stop_sequences: Strings | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    # vLLM's and llmserve's own, as in a chat's body
    cache_salt: Annotated[str, Meta(max_length=1024)] | None = None
    seed: int | None = None
    timeout: float | None = None
    # Accepted, and of no effect here
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
    speed: str | None = None
