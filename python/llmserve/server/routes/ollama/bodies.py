"""What clients of Ollama send. A value of None is one that was not given."""

from typing import Any

import msgspec

from llmserve.server.routes.bodies import Count


class OllamaBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that chats and generations have in common."""

    model: str
    # Ollama streams unless told otherwise
    stream: bool | None = None
    # "json", or a JSON schema
    format: str | dict[str, Any] | None = None
    # Sampling parameters by Ollama's names: see options.py
    options: dict[str, Any] | None = None
    # Whether, or how hard, the model thinks first
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    # Accepted, and of no effect here: models stay, and what does not fit is refused
    keep_alive: str | float | None = None
    truncate: bool | None = None
    shift: bool | None = None


class OllamaChatBody(OllamaBody, kw_only=True):
    """POST /api/chat."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateBody(OllamaBody, kw_only=True):
    """POST /api/generate."""

    prompt: str | None = None
    system: str | None = None
    # The prompt as it is, without the chat template
    raw: bool | None = None
    # Refused where they have a value
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None
    images: list[str] | None = None
    width: int | None = None
    height: int | None = None
    steps: int | None = None


class OllamaEmbedBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /api/embed."""

    model: str
    input: str | list[str]
    truncate: bool | None = None
    dimensions: int | None = None
    options: dict[str, Any] | None = None
    # Accepted, and of no effect here, as in OllamaBody
    keep_alive: str | float | None = None


class OllamaEmbeddingsBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /api/embeddings."""

    model: str
    prompt: str
    options: dict[str, Any] | None = None
    keep_alive: str | float | None = None


class OllamaPullBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /api/pull."""

    model: str | None = None
    name: str | None = None  # what it was called once
    insecure: bool | None = None
    stream: bool | None = None


class OllamaShowBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /api/show."""

    model: str | None = None
    name: str | None = None  # what it was called once
    verbose: bool | None = None
