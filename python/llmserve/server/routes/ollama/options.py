"""Ollama's options, as sampling parameters of a body of ours."""

from collections.abc import Mapping
from typing import Any

import msgspec

from llmserve.common.arguments import describe
from llmserve.server.http.errors import ApiError
from llmserve.server.routes.bodies import CompletionBody
from llmserve.server.settings import ServerSettings

# By their names here.
_RENAMED = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
# How Ollama runs a model, which is the server's own affair here.
_NO_EFFECT = frozenset(
    (
        *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "numa"),
        *("low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap", "use_mlock"),
        *("embedding_only", "repeat_last_n", "penalize_newline", "mirostat_tau", "mirostat_eta"),
    )
)
# Ways of sampling that are not here, by the value that turns them off.
_OFF: Mapping[str, object] = {"tfs_z": 1.0, "typical_p": 1.0, "mirostat": 0}


def body_fields(options: Mapping[str, Any] | None, settings: ServerSettings) -> dict[str, Any]:
    """Fields of GenerationBody. Raises ApiError that names the option."""
    fields: dict[str, Any] = {}
    for name, value in (options or {}).items():
        if value is None or name in _NO_EFFECT:
            continue
        if name in _RENAMED:
            fields[_RENAMED[name]] = value
        elif name == "num_predict":  # -2: until the context is full
            fields["max_tokens"] = -1 if value in (-1, -2) else value
        elif name in _OFF:
            if value != _OFF[name]:
                raise _bad(f"options.{name} is not supported; leave it at {_OFF[name]}")
        elif not settings.is_lenient("unknown_fields"):
            known = ", ".join((*_RENAMED, "num_predict"))
            raise _bad(f"options.{name[:80]} is unknown; those with an effect are {known}")
    try:
        msgspec.convert({"prompt": "", **fields}, CompletionBody)
    except msgspec.ValidationError as error:
        raise _bad(f"options: {error}") from None
    return fields


def format_fields(form: str | dict[str, Any] | None) -> dict[str, Any]:
    """What the text must match, as response_format. Raises ApiError."""
    if not form:
        return {}
    if isinstance(form, dict):
        inner = {"name": "format", "schema": form}
        return {"response_format": {"type": "json_schema", "json_schema": inner}}
    if form != "json":
        raise _bad(f"format must be 'json' or a JSON schema, got {describe(form)}")
    return {"response_format": {"type": "json_object"}}


def _bad(message: str) -> ApiError:
    return ApiError(400, message, param="options")
