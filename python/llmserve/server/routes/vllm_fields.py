"""Fields of vLLM's bodies that have nothing to do here: what each may be, and why nothing else."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from llmserve.common.arguments import describe
from llmserve.server.http.errors import ApiError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Field:
    kind: Any
    neutral: tuple[object, ...] = ()  # values, beside none at all, that ask for nothing
    why: str = ""  # anything else is refused; empty: it is taken, and changes nothing


_BEAMS = "beams are LLM.beam_search's"
_MEDIA = "the model reads and writes text"
_EXPERTS = "which experts ran is not told"
_TRANSFER = "the KV cache stays with this server"

FIELDS: Mapping[str, _Field] = {
    "use_beam_search": _Field(bool, (False,), _BEAMS),
    "length_penalty": _Field(float, (1.0,), _BEAMS),
    "watermarking": _Field(bool, (False,), "texts are not marked"),
    "truncation_side": _Field(str, ("left",), "a prompt that is cut keeps its last tokens"),
    "return_token_offsets": _Field(bool, (False,), "text_offset is in completions' logprobs"),
    "return_weight_versions": _Field(bool, (False,), "weights do not change"),
    "routed_experts_prompt_start": _Field(int, (0,), _EXPERTS),
    "media_io_kwargs": _Field(dict[str, Any], ({},), _MEDIA),
    "mm_processor_kwargs": _Field(dict[str, Any], ({},), _MEDIA),
    "return_mm_kwargs": _Field(bool, (False,), _MEDIA),
    "kv_transfer_params": _Field(dict[str, Any], ({},), _TRANSFER),
    "ec_transfer_params": _Field(dict[str, Any], ({},), _TRANSFER),
    "vllm_xargs": _Field(dict[str, Any], ({},), "nothing here reads it"),
    "mm_payload": _Field(str),
    "session_id": _Field(str),
    "stream_interval": _Field(int),
}
_told: set[str] = set()


def check_vllm_fields(body: msgspec.Struct) -> None:
    """Raises ApiError for the first of these fields that asks for something. One that changes
    nothing is warned of once."""
    for name, field in FIELDS.items():
        value = getattr(body, name)
        if value is None or value in field.neutral:
            continue
        if field.why:
            shown = f"{name}: {field.why}; leave it out, got {describe(value)}"
            raise ApiError(400, shown, param=name, code="unsupported_parameter")
        if name not in _told:
            _told.add(name)
            _log.warning("a request's %s changes nothing here; this is said once", name)
