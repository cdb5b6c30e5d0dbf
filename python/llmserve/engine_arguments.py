"""The arguments of `LLM` that the engine's config is made from, checked."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields

from llmserve import _core
from llmserve.checkpoint.packed_cache import packed_cache_folder
from llmserve.common.arguments import (
    INT64_MAX,
    boolean,
    integer,
    number,
    optional_integer,
    text,
)
from llmserve.errors import NotSupported


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArguments:
    """Names, meanings and defaults are LLM's, which documents them."""

    device: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    seed: int | None = 0
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    block_size: int | None = 16
    enable_prefix_caching: bool | None = True
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    max_num_queued_reqs: int | None = None
    enable_chunked_prefill: bool | None = True
    max_stall_ms: int | None = None
    scheduling_policy: str = "fcfs"
    num_threads: int | None = None
    max_logprobs: int = 20
    packed_cache_bytes: int | None = None

    def __post_init__(self) -> None:
        # None, which vLLM has where it decides for itself, is the default here.
        for field in fields(self):
            if getattr(self, field.name) is None:
                object.__setattr__(self, field.name, field.default)

    @staticmethod
    def names() -> list[str]:
        """The arguments' names."""
        return [field.name for field in fields(EngineArguments)]

    def to_request(
        self,
        model: str | os.PathLike[str],
        eos_token_ids: Sequence[int] = (),
        available_memory_bytes: int | None = None,
        **more: object,
    ) -> _core.ConfigRequest:
        """What the core resolves a config from; `more` are settings of its own. Raises
        InvalidArgument on values of a wrong type or out of range; what depends on the model is
        checked there."""
        share = self.gpu_memory_utilization
        cache_bytes = optional_integer("packed_cache_bytes", self.packed_cache_bytes, 0, INT64_MAX)
        return _core.ConfigRequest(
            model=str(model),
            device=text("device", self.device),
            dtype=_dtype(self.dtype),
            quantization=(
                "" if self.quantization is None else text("quantization", self.quantization)
            ),
            kv_cache_dtype=text("kv_cache_dtype", self.kv_cache_dtype),
            max_model_len=optional_integer("max_model_len", self.max_model_len, 2, INT64_MAX),
            block_size=integer("block_size", self.block_size, 1),
            enable_prefix_caching=boolean("enable_prefix_caching", self.enable_prefix_caching),
            kv_cache_memory_bytes=optional_integer(
                "kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1, INT64_MAX
            ),
            num_gpu_blocks_override=optional_integer(
                "num_gpu_blocks_override", self.num_gpu_blocks_override, 1
            ),
            gpu_memory_utilization=(
                None if share is None else number("gpu_memory_utilization", share)
            ),
            available_memory_bytes=available_memory_bytes,
            max_num_batched_tokens=optional_integer(
                "max_num_batched_tokens", self.max_num_batched_tokens, 1
            ),
            max_num_seqs=optional_integer("max_num_seqs", self.max_num_seqs, 1),
            max_num_queued_reqs=optional_integer("max_num_queued_reqs", self.max_num_queued_reqs, 1)
            or 0,
            enable_chunked_prefill=boolean("enable_chunked_prefill", self.enable_chunked_prefill),
            max_stall_us=1000 * (optional_integer("max_stall_ms", self.max_stall_ms, 0) or 0),
            policy=text("scheduling_policy", self.scheduling_policy),
            num_threads=optional_integer("num_threads", self.num_threads, 1, 1024),
            seed=integer("seed", self.seed, 0, 2**64 - 1),
            max_logprobs=integer("max_logprobs", self.max_logprobs, -1),
            packed_cache_folder=str(packed_cache_folder()) if cache_bytes else "",
            packed_cache_bytes=cache_bytes or 0,
            eos_token_ids=eos_token_ids,
            **more,
        )


def _dtype(value: object) -> str:
    name = text("dtype", value)
    if name in ("half", "float16"):
        raise NotSupported(
            f"dtype={name!r} is not supported: nothing is computed in float16, whose range is "
            f"small; use 'bfloat16', as many bytes, or 'float32', which 'auto' takes for a "
            f"checkpoint in float16"
        )
    return "float32" if name == "float" else name  # as vLLM names it, too
