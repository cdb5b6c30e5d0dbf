"""vLLM's arguments of features that are not here: what each may be, and why nothing else.

Those that scripts give, at their defaults: where versions of vLLM differ, each is taken.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence

from llmserve.common.arguments import describe, is_default, refuse_unknown, refuse_unless_default

_log = logging.getLogger(__name__)

_AUTO, _NONE, _OFF, _ONE = ("auto",), (None,), (False, None), (1,)
_NO_ADAPTERS = "adapters are not applied; merge them into the checkpoint"

# By reason: the values that arguments may have, the first being the one to leave it at.
_BY_REASON: Mapping[str, Mapping[str, Sequence[object]]] = {
    "": {
        **dict.fromkeys(("spec_method", "spec_model", "spec_tokens"), _NONE),
    },
    "ranks share a prompt by heads and columns already, and decode_context_parallel_size keeps its "
    "keys once; raise tensor_parallel_size": {
        "prefill_context_parallel_size": _ONE,
    },
    "nothing of a checkpoint is ever executed": {
        "trust_remote_code": (False,),
        "code_revision": _NONE,
    },
    "replicas are threads of one process, which all start with data_parallel_size, and have no "
    "addresses; on several machines run llmserve serve with its own --data-parallel-size on each, "
    "and llmserve route before them": {
        "data_parallel_size_local": _NONE,
        "data_parallel_rank": _NONE,
        "data_parallel_start_rank": _NONE,
        "data_parallel_address": _NONE,
        "data_parallel_rpc_port": _NONE,
        "data_parallel_backend": ("mp",),
        "data_parallel_hybrid_lb": _OFF,
        "data_parallel_external_lb": _OFF,
    },
    "a step that only decodes takes as long as its weights take to be read, which two half batches "
    "would read twice; enable_dbo halves steps that run prompts": {
        "dbo_decode_token_threshold": (32,),
    },
    "ranks are threads of a process, and of one on each of nnodes machines": {
        "expert_placement_strategy": ("linear",),
        "all2all_backend": (None, "allgather_reducescatter"),
        "moe_backend": _AUTO,
        "device_ids": _NONE,
        "distributed_executor_backend": (None, "uni"),
        "disable_custom_all_reduce": _OFF,
        "max_parallel_loading_workers": _NONE,
        "ray_workers_use_nsight": _OFF,
        "worker_use_ray": _OFF,
        "worker_cls": _AUTO,
        "worker_extension_cls": ("",),
    },
    "weights and KV cache stay in one memory; quantization and kv_cache_dtype make them smaller": {
        "cpu_offload_gb": (0,),
        "swap_space": (4, 0),
        "kv_offloading_size": _NONE,
        "kv_offloading_backend": ("native", None),
        "offload_backend": _AUTO,
        "kv_transfer_config": _NONE,
        "kv_events_config": _NONE,
    },
    "nothing is compiled, and CUDA graphs are recorded as they come up": {
        "compilation_config": (None, 0),
        "cuda_graph_sizes": _NONE,
        "cudagraph_capture_sizes": _NONE,
        "max_cudagraph_capture_size": _NONE,
        "max_seq_len_to_capture": (8192,),
        "optimization_level": (None, 2),
        "kernel_config": _NONE,
        "performance_mode": ("balanced",),
    },
    "max_stall_ms bounds what prompts take of a step": {
        "max_num_partial_prefills": _ONE,
        "max_long_partial_prefills": _ONE,
        "long_prefill_token_threshold": (0,),
        "max_num_scheduled_tokens": _NONE,
        "scheduler_reserve_full_isl": (True,),
    },
    "there is one way to load, whatever the checkpoint": {
        "load_format": _AUTO,
        "config_format": _AUTO,
        "model_impl": _AUTO,
        "model_loader_extra_config": _NONE,
        "ignore_patterns": (None, ["original/**/*"]),
        "quantization_config": _NONE,
        "weight_transfer_config": _NONE,
        "safetensors_load_strategy": (None, "lazy"),
        "pt_load_map_location": ("cpu",),
        "use_tqdm_on_load": (True, False),
    },
    "the tokenizers library reads every tokenizer; tokenizer= takes a folder or a file": {
        "tokenizer_mode": _AUTO,
        "tokenizer_revision": _NONE,
        "tokenizer_pool_size": (0,),
    },
    "the cache of the Hugging Face Hub has its token: set HF_TOKEN": {"hf_token": _NONE},
    "hf_overrides={...} changes fields of config.json": dict.fromkeys(
        ("rope_scaling", "rope_theta"), _NONE
    ),
    "the checkpoint's files say it; change it in a copy": {
        "hf_config_path": _NONE,
        "disable_sliding_window": _OFF,
    },
    "models take text alone": {
        "limit_mm_per_prompt": _NONE,
        "mm_processor_kwargs": _NONE,
        "mm_processor_cache_gb": (4,),
        "media_io_kwargs": _NONE,
        "interleave_mm_strings": _OFF,
        "skip_mm_profiling": _OFF,
        "mm_processor_cache_type": ("lru",),
        "mm_shm_cache_max_object_size_mb": (128,),
        "mm_encoder_tp_mode": ("weights",),
        "mm_encoder_only": _OFF,
        "mm_encoder_attn_backend": _NONE,
        "enable_mm_embeds": _OFF,
        "language_model_only": (False, True),
        "video_pruning_rate": _NONE,
        "disable_chunked_mm_input": _OFF,
        "disable_mm_preprocessor_cache": _OFF,
        "allowed_local_media_path": ("",),
        "allowed_media_domains": _NONE,
    },
    _NO_ADAPTERS: {
        "enable_lora": (False,),
        "enable_lora_bias": _OFF,
        "max_loras": _ONE,
        "max_lora_rank": (16,),
        "max_cpu_loras": _NONE,
        "lora_dtype": _AUTO,
        "lora_extra_vocab_size": (256,),
        "fully_sharded_loras": _OFF,
        "default_mm_loras": _NONE,
    },
    "an LLM generates and embeds": {
        "task": (None, "auto", "generate", "embed"),
        "runner": ("auto", "generate", "pooling"),
        "convert": ("auto", "none", "embed"),
        "override_pooler_config": _NONE,
    },
    "llguidance makes the masks, with its defaults": {
        "structured_outputs_config": _NONE,
        "guided_decoding_backend": _AUTO,
        "guided_decoding_disable_fallback": _OFF,
        "guided_decoding_disable_any_whitespace": _OFF,
        "guided_decoding_disable_additional_properties": _OFF,
    },
    "LLM(logits_processors=[...]) and SamplingParams(logits_processors=[...]) take what runs": {
        "logits_processor_pattern": _NONE,
    },
    "log-probabilities are of the raw distribution": {"logprobs_mode": ("raw_logprobs",)},
    "the prefix cache has one hash, of 256 bits": {
        "prefix_caching_hash_algo": ("sha256", "builtin")
    },
    "an fp8 cache sets a scale a row, as it is written": {"calculate_kv_scales": _OFF},
    "the attention kernel is the device's": {
        "attention_backend": _NONE,
        "attention_config": _NONE,
        "disable_cascade_attn": (False, True, None),
        "kv_sharing_fast_prefill": _OFF,
        "disable_hybrid_kv_cache_manager": _OFF,
    },
    "counters are always kept and nothing is logged; see get_metrics()": {
        "disable_log_stats": (True, False),
        "show_hidden_metrics_for_version": _NONE,
        "collect_detailed_traces": _NONE,
        "enable_log_requests": _OFF,
        "disable_log_requests": (True, False),
        "kv_cache_metrics": _OFF,
        "cudagraph_metrics": _OFF,
        "enable_mfu_metrics": _OFF,
        "enable_logging_iteration_details": _OFF,
        "enable_layerwise_nvtx_tracing": _OFF,
    },
    "llmserve serve has it": {
        "served_model_name": _NONE,
        "reasoning_parser": ("", None),
        "reasoning_parser_plugin": ("", None),
        "otlp_traces_endpoint": _NONE,
    },
    "sleep() is there without it": {"enable_sleep_mode": (False, True)},
    "stream() gives what there is as it comes": {"stream_interval": _ONE},
    "models of attention alone run": {
        "mamba_cache_dtype": _AUTO,
        "mamba_ssm_cache_dtype": _AUTO,
        "mamba_block_size": _NONE,
        "mamba_cache_mode": ("none",),
    },
    "there is nothing of the kind to set": {
        "additional_config": _NONE,
        "scheduler_cls": _NONE,
        "num_lookahead_slots": (0,),
        "disable_async_output_proc": _OFF,
        "use_v2_block_manager": (True, False),
        "io_processor_plugin": _NONE,
    },
}


# Of each argument: the values that it may have, and the reason.
NOT_HERE: Mapping[str, tuple[Sequence[object], str]] = {
    name: (values, reason)
    for reason, arguments in _BY_REASON.items()
    for name, values in arguments.items()
}

# Those of which a command line may have several values behind the name.
TAKE_SEVERAL = frozenset(
    (
        *("cuda_graph_sizes", "cudagraph_capture_sizes", "ignore_patterns", "device_ids"),
        *("allowed_media_domains", "collect_detailed_traces", "logits_processors"),
    )
)
MAY_TAKE_NONE = frozenset(("hf_token",))  # the name alone is the default

_ANY = None
# Of those, values that change nothing here, whatever they do in vLLM: they are taken with a warning
# that gives the reason.
_CHANGES_NOTHING: Mapping[str, Sequence[object] | None] = {
    **dict.fromkeys(
        _BY_REASON["nothing is compiled, and CUDA graphs are recorded as they come up"], _ANY
    ),
    **dict.fromkeys(_BY_REASON["models take text alone"], _ANY),
    **dict.fromkeys(
        (
            *("swap_space", "disable_custom_all_reduce", "max_parallel_loading_workers"),
            *("ray_workers_use_nsight", "moe_backend"),
            *("all2all_backend", "expert_placement_strategy"),
            *("safetensors_load_strategy", "pt_load_map_location", "ignore_patterns"),
            *("tokenizer_pool_size", "attention_backend", "attention_config"),
            *("disable_hybrid_kv_cache_manager", "prefix_caching_hash_algo"),
            *("guided_decoding_backend", "guided_decoding_disable_fallback"),
            *("show_hidden_metrics_for_version", "kv_cache_metrics", "cudagraph_metrics"),
            *("enable_log_requests", "disable_async_output_proc", "num_lookahead_slots"),
            *("calculate_kv_scales", "collect_detailed_traces", "model_loader_extra_config"),
            *("max_num_partial_prefills", "max_long_partial_prefills"),
            *("long_prefill_token_threshold", "additional_config"),
            *("mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_block_size", "mamba_cache_mode"),
        ),
        _ANY,
    ),
    "distributed_executor_backend": ("mp", "ray", "external_launcher"),
    "load_format": (
        *("safetensors", "gguf", "hf", "mistral"),
        *("fastsafetensors", "instanttensor", "runai_streamer", "bitsandbytes"),
    ),
    "config_format": ("hf", "mistral"),
    "model_impl": ("vllm", "transformers"),
    "tokenizer_mode": ("slow", "fast", "hf", "mistral"),
    "structured_outputs_config": (),
}


def _is_backend(value: object) -> bool:
    """Of structured_outputs_config: nothing but who makes the masks."""
    return isinstance(value, Mapping) and set(value) <= {"backend", "disable_fallback"}


def check_names(
    what: str, given: Mapping[str, object], known: Iterable[str], warns: bool = True
) -> None:
    """Raises InvalidArgument for the name of no argument, and NotSupported for one of vLLM's whose
    feature is not here, unless it is as vLLM has it by default."""
    refuse_unknown(what, [name for name in given if name not in NOT_HERE], known)
    for name, value in given.items():
        if name in NOT_HERE:
            refuse_what_is_not_here(what, name, value, warns)


def refuse_what_is_not_here(what: str, name: str, value: object, warns: bool = True) -> None:
    """Raises NotSupported for an argument of NOT_HERE, unless it is as vLLM has it by default; a
    value that changes nothing here is taken with a warning."""
    values, reason = NOT_HERE[name]
    if name in _CHANGES_NOTHING and not any(is_default(value, default) for default in values):
        taken = _CHANGES_NOTHING[name]
        if taken is None or value in taken or _is_backend(value):
            if warns:
                _log.warning("%s: %s=%s changes nothing: %s", what, name, describe(value), reason)
            return
    refuse_unless_default(what, name, value, *values, reason=reason)


# The same of the arguments that vLLM's methods have.
_OF_METHODS: Mapping[str, tuple[Sequence[object], str]] = {
    "lora_request": (_NONE, _NO_ADAPTERS),
    "tokenization_kwargs": (_NONE, "prompts are tokenized as the model's files say"),
    "mm_processor_kwargs": (_NONE, "models take text alone"),
    "chat_template_content_format": (_AUTO, "the template takes texts and parts alike"),
    "concurrency_limit": (_NONE, "the engine runs as many as it has room for"),
    "trace_headers": (_NONE, "llmserve serve has traces"),
    "data_parallel_rank": (_NONE, "a request goes to the replica where it costs least"),
    "prompt_text": (_NONE, "give the text in the prompt, {'prompt': ..., 'prompt_token_ids': ...}"),
}


def check_method_arguments(method: str, **given: object) -> None:
    """Raises NotSupported for an argument of one of vLLM's methods, unless it is as vLLM has it by
    default."""
    for name, value in given.items():
        values, reason = _OF_METHODS[name]
        refuse_unless_default(method, name, value, *values, reason=reason)
