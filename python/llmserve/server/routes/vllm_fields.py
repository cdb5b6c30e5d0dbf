"""Fields of bodies of vLLM's, OpenAI's and LM Studio's servers that have nothing to do here."""

from collections.abc import Mapping
from typing import Any

from llmserve.server.routes.neutral_fields import NeutralField

_MEDIA = "the model reads and writes text"
_EXPERTS = "which experts ran is not told"
_TRANSFER = "the KV cache stays with this server"

FIELDS: Mapping[str, NeutralField] = {
    "watermarking": NeutralField(bool, (False,), "texts are not marked"),
    "truncation_side": NeutralField(str, ("left",), "a prompt that is cut keeps its last tokens"),
    "return_token_offsets": NeutralField(bool, (False,), "text_offset is in completions' logprobs"),
    "return_weight_versions": NeutralField(bool, (False,), "weights do not change"),
    "routed_experts_prompt_start": NeutralField(int, (0,), _EXPERTS),
    "media_io_kwargs": NeutralField(dict[str, Any], ({},), _MEDIA),
    "mm_processor_kwargs": NeutralField(dict[str, Any], ({},), _MEDIA),
    "return_mm_kwargs": NeutralField(bool, (False,), _MEDIA),
    "kv_transfer_params": NeutralField(dict[str, Any], ({},), _TRANSFER),
    "ec_transfer_params": NeutralField(dict[str, Any], ({},), _TRANSFER),
    "vllm_xargs": NeutralField(dict[str, Any], ({},), "nothing here reads it"),
    "mm_payload": NeutralField(str),
    "verbosity": NeutralField(str),
    "prediction": NeutralField(dict[str, Any]),
    "ttl": NeutralField(int),
    "session_id": NeutralField(str),
    "stream_interval": NeutralField(int),
}
