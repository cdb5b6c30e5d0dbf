"""The options of an engine, in one table: EngineOptions has a field for each.

From it are made the arguments of LLM and AsyncLLM with their checks, the flags of the commands, the
keys of a server's file, what the core makes its config from, and docs/engine-options.md.
"""

# ruff: noqa: RUF009  # engine_option() gives a field, whose default cannot change
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

from llmserve import _core
from llmserve.checkpoint.packed_cache import packed_cache_folder
from llmserve.common.arguments import INT64_MAX, describe, integer, text
from llmserve.common.pooler_config import PoolerConfig
from llmserve.common.units import parse_tokens
from llmserve.common.vllm_arguments import check_names
from llmserve.options.cluster import as_address, cluster_key
from llmserve.options.option import EngineOption, engine_option, kind_of, not_here
from llmserve.options.speculative_config import speculation_config

_log = logging.getLogger(__name__)

# Where an option acts: the sections of the page.
_TEXT, _WEIGHTS, _CACHE = "The model and its text", "Weights and arithmetic", "KV cache"
_STEPS, _REQUESTS = "Steps", "Requests"


def as_dtype(name: str, value: object) -> str:
    """Names as they are here, of torch's and NumPy's types and of vLLM's names for them."""
    dtype = value if isinstance(value, str) else getattr(value, "name", None) or str(value)
    dtype = dtype.removeprefix("torch.")
    if isinstance(value, type) or not dtype.isidentifier():  # numpy.float32, or nothing of the kind
        dtype = text(name, getattr(value, "__name__", value))
    if dtype in ("half", "float16"):
        _log.warning(
            "%s=%s runs as bfloat16: nothing is computed in float16, whose range is small; "
            "bfloat16 takes as many bytes",
            name,
            describe(value),
        )
        return "bfloat16"
    return "float32" if dtype == "float" else dtype  # as vLLM names it, too


def as_max_model_len(name: str, value: object) -> int:
    """Tokens; -1, and "auto", what fits in the KV cache."""
    if isinstance(value, str):
        value = parse_tokens(name, value)
    if isinstance(value, int) and value == -1:
        return -1
    return integer(name, value, 2, INT64_MAX)


def _as_us(name: str, value: object) -> int:
    return 1000 * integer(name, value, 0)


_INTEGERS = ", ".join(name for name, _ in _core.supported_quantizations())
_POLICIES = ", ".join(name for name, _ in _core.supported_policies())


@dataclass(frozen=True, slots=True, eq=False, repr=False)  # nobody asks, and each takes 0.2 ms
class EngineOptions:
    """The arguments of LLM and AsyncLLM. None, which vLLM has where it decides for itself, is the
    default of those that the core takes."""

    model: str | os.PathLike[str]
    _: KW_ONLY
    tokenizer: str | os.PathLike[str] | None = engine_option(
        None,
        _TEXT,
        "another folder with a tokenizer, the file of one, or a Hub id",
        commands="run serve",
        core=None,
        more="tokenizer.json, tekken.json, tokenizer.model, vocab.json (with merges.txt), "
        "*.tiktoken or *.gguf",
    )
    dtype: str = engine_option(
        "auto",
        _WEIGHTS,
        "auto (as the checkpoint), float32 or bfloat16",
        commands="run serve plan bench inspect",
        convert=as_dtype,
        more="float16 checkpoints run as float32; float16 and half are taken as bfloat16",
    )
    quantization: str | None = engine_option(
        None,
        _WEIGHTS,
        f"round weights while they are loaded: {_INTEGERS}; none: floats",
        commands="run serve plan bench inspect",
        more="Linear layers and the head, with a scale an output channel (int8) or a group of 128 "
        "or 32 weights, -asym with a minimum a group; activations are rounded to 8 bits, a token "
        "and group at a time. Blocks of a GGUF file run that way as they are, and none dequantizes "
        "them",
    )
    device: str = engine_option(
        "auto",
        _WEIGHTS,
        "auto (a GPU where there is one), cuda, cpu or ref (slow reference)",
        commands="run serve plan bench",
    )
    max_model_len: int | str | None = engine_option(
        None,
        _REQUESTS,
        "tokens of prompt and output together; default: the model's maximum; auto: what fits",
        commands="run serve plan bench",
        minimum=2,
        maximum=INT64_MAX,
        convert=as_max_model_len,
        more="At least 2, or a text such as 1k (1000) or 1K (1024). auto, and -1, take the model's "
        "maximum or what the KV cache holds, if that is less",
    )
    seed: int | None = engine_option(
        0,
        _REQUESTS,
        "what requests without a seed draw theirs from; None: one is drawn",
        commands="serve bench",
        maximum=2**64 - 1,
    )
    gpu_memory_utilization: float | None = engine_option(
        None,
        _CACHE,
        "share of the memory at hand that weights, workspace and KV cache may take",
        commands="serve plan",
        more="Above 0 and at most 1; default: 0.5 on the CPU, 0.92 of a GPU's own. See "
        "[memory-plan.md](memory-plan.md)",
    )
    kv_cache_memory_bytes: int | None = engine_option(
        None,
        _CACHE,
        "the KV cache's size, in the place of a share, e.g. 4GiB",
        commands="serve plan",
        minimum=1,
        maximum=INT64_MAX,
    )
    kv_cache_dtype: str = engine_option(
        "auto",
        _CACHE,
        "what keys and values are kept in: auto (as dtype), float32, bfloat16 or fp8",
        commands="run serve plan bench inspect",
        more="fp8 is e4m3 with a scale for each row of each head and token: about half the memory "
        "of bfloat16",
    )
    block_size: int | None = engine_option(
        16, _CACHE, "tokens a block", commands="plan bench", minimum=1, more="At most 256"
    )
    enable_prefix_caching: bool | None = engine_option(
        True, _CACHE, "requests share the blocks of equal prefixes", commands="serve"
    )
    max_num_batched_tokens: int | None = engine_option(
        None,
        _STEPS,
        "tokens a step",
        commands="serve plan bench",
        minimum=1,
        more="Default: 512, or more where max_num_seqs asks for it",
    )
    max_num_seqs: int | None = engine_option(
        None,
        _STEPS,
        "sequences a step",
        commands="serve plan bench",
        minimum=1,
        more="Default: 256, or max_num_batched_tokens where that is less",
    )
    enable_chunked_prefill: bool | None = engine_option(
        True, _STEPS, "a prompt may run in several steps; False: in one, or it waits"
    )
    max_stall_ms: int | None = engine_option(
        None,
        _STEPS,
        "most time of a step while others decode, 0: any; default: 0 for LLM, else 1000",
        commands="serve",
        core="max_stall_us",
        convert=_as_us,
        more="While sequences decode, a step takes what runs in that time at the rate of the last "
        "steps with prompts. The caller of LLM waits for all outputs, the streams of AsyncLLM and "
        "of a server for each token",
    )
    scheduling_policy: str = engine_option(
        "fcfs", _STEPS, f"who runs first: {_POLICIES}", commands="serve", core="policy"
    )
    admission_reserve_tokens: int | None = engine_option(
        0,
        _STEPS,
        "tokens of the KV cache that stay free when a request is admitted beside others",
        commands="bench",
        more="Those that run grow into them, and are preempted less often; with the length of an "
        "output hardly ever. A request that runs alone needs none",
    )
    max_num_queued_reqs: int | None = engine_option(
        None,
        _REQUESTS,
        "requests that may wait; one more is refused (QueueFull). Default: no bound",
        minimum=1,
    )
    num_threads: int | None = engine_option(
        None,
        _WEIGHTS,
        "threads of the CPU; default: its physical cores",
        commands="run serve plan bench",
        alias="--threads",
        minimum=1,
        maximum=1024,
        more="With LLMSERVE_PIN_THREADS=1 in the environment each stays on a core",
    )
    num_gpu_blocks_override: int | None = engine_option(
        None,
        _CACHE,
        "the KV cache's number of blocks, in the place of a size",
        commands="plan",
        minimum=1,
    )
    tensor_parallel_size: int = engine_option(
        1,
        _WEIGHTS,
        "ranks, threads of this process, that share each layer; the tokens are the same",
        commands="run serve plan bench",
        minimum=1,
        maximum=64,
        more="Each has its part of weights, KV cache and num_threads, on the memory of its cores, "
        "for machines of several sockets, or a GPU of its own. Any number is possible, as long as "
        "the layers have as many columns. See [ranks.md](ranks.md)",
    )
    tensor_parallel_cut: str = engine_option(
        "columns",
        _WEIGHTS,
        "how ranks share o_proj and down_proj: columns (the bits of one rank), rows (along K: half "
        "the exchanges, rounded otherwise), tree (along K, in a fixed tree: bits of its own at any "
        "number of ranks)",
        commands="run serve plan bench",
        more="rows is for slow networks, tree for ranks that come and go. See "
        "[ranks.md](ranks.md#cut-along-k)",
    )
    enable_expert_parallel: bool | None = engine_option(
        False,
        _WEIGHTS,
        "of a layer of experts each rank has some, whole, in the place of a part of each",
        commands="plan",
    )
    decode_context_parallel_size: int = engine_option(
        1,
        _CACHE,
        "ranks that keep one KV cache together and share long contexts, in the place of a copy "
        "each; the tokens are the same",
        commands="run serve plan bench",
        minimum=1,
        maximum=64,
        more="CPU only. A divisor of tensor_parallel_size, for models of fewer KV heads than ranks "
        "or with latent attention. See [ranks.md](ranks.md#long-contexts-among-ranks)",
    )
    enable_eplb: bool = engine_option(
        False,
        _WEIGHTS,
        "experts that stand whole on ranks run where there is room, and move with their loads",
        commands="run serve bench",
        core=None,
        more="Needs enable_expert_parallel. The tokens are the same. See "
        "[ranks.md](ranks.md#experts-that-are-kept-balanced)",
    )
    eplb_config: Mapping[str, object] | None = engine_option(
        None,
        _WEIGHTS,
        'how, e.g. {"step_interval": 3000, "window_size": 1000, "num_redundant_experts": 0, '
        '"capacity_factor": 1.25}',
        commands="run serve bench",
        core=None,
    )
    data_parallel_size: int = engine_option(
        1,
        _WEIGHTS,
        "engines of this process, each with a KV cache; requests go to where they cost least",
        commands="run serve plan bench",
        minimum=1,
        maximum=64,
        more="The tokens are the same. Each has its part of num_threads, or GPUs of its own with a "
        "copy of the weights; max_num_seqs, "
        "max_num_batched_tokens and the size of the KV cache are of each. See "
        "[ranks.md](ranks.md)",
    )
    pipeline_parallel_size: int = engine_option(
        1,
        _WEIGHTS,
        "stages, each of some layers with threads and memory, or a GPU, of its own; the tokens are "
        "the same",
        commands="run serve plan bench",
        minimum=1,
        maximum=64,
        more="Layers are split by the bytes that a token reads of them. A step passes "
        "through one stage after another. With tensor_parallel_size each has as many ranks. See "
        "[ranks.md](ranks.md#stages)",
    )
    nnodes: int = engine_option(
        1,
        _WEIGHTS,
        "processes that share the ranks, mostly one a machine; the tokens are the same",
        minimum=1,
        maximum=64,
        more="All are given the same options but `node_rank`. See "
        "[ranks.md](ranks.md#several-machines)",
    )
    node_rank: int = engine_option(
        0,
        _WEIGHTS,
        "which of nnodes this is: 0 takes requests, `llmserve serve` on the others computes for it",
        maximum=63,
    )
    enable_dbo: bool | None = engine_option(
        False,
        _WEIGHTS,
        "steps with prompts run in two halves, of which one computes while the other's exchanges "
        "are on the wire: for nnodes",
        more="Without a wire, on one machine, it changes nothing. The tokens are the same. See "
        "[ranks.md](ranks.md#half-batches)",
    )
    dbo_prefill_token_threshold: int = engine_option(
        512,
        _WEIGHTS,
        "the least number of tokens of such a step",
        minimum=2,
    )
    master_addr: str = engine_option(
        "127.0.0.1",
        _WEIGHTS,
        "where node 0 listens for the others: its host name or address",
    )
    master_port: int = engine_option(
        29501, _WEIGHTS, "the port of node 0 for the other nodes", minimum=1, maximum=65535
    )
    cluster_key: str | None = engine_option(
        None,
        _WEIGHTS,
        "what all nodes of a model know and nobody else, 16 characters or more",
        more="Better in LLMSERVE_CLUSTER_KEY, where no list of processes shows it. Needed unless "
        "`master_addr` is of this machine alone",
    )
    distributed_timeout_seconds: int | None = engine_option(
        None,
        _WEIGHTS,
        "how long nodes wait for each other, at the start and after one was lost; default: 600",
        minimum=1,
        maximum=86400,
    )
    enforce_eager: bool = engine_option(
        False, _STEPS, "CUDA: decode steps are not recorded as graphs"
    )
    async_scheduling: bool | None = engine_option(
        True, _STEPS, "CUDA, stages: the next step is launched while one is under way"
    )
    hf_overrides: Mapping[str, object] | Callable[[Any], Any] | None = engine_option(
        None,
        _WEIGHTS,
        "fields of config.json in the place of its own: a dict, or what is given the config",
        core=None,
        commands="run",
        more="Objects within are merged, those of RoPE replaced. For checkpoints in safetensors, "
        "without packed_cache_bytes",
    )
    chat_template: str | os.PathLike[str] | None = engine_option(
        None,
        _TEXT,
        "a Jinja template or its path, in place of the model's own",
        commands="serve",
        core=None,
    )
    default_chat_template_kwargs: Mapping[str, object] | None = engine_option(
        None,
        _TEXT,
        "variables of the chat template where a request says nothing else",
        commands="run",
        core=None,
        more='Such as {"enable_thinking": false}. What a request has in its chat_template_kwargs '
        "goes before",
    )
    trust_remote_code: bool = not_here(False)
    max_logprobs: int = engine_option(
        20,
        _REQUESTS,
        "most log-probabilities a token that a request may ask for; -1: no bound",
        commands="serve",
        minimum=-1,
    )
    generation_config: str | os.PathLike[str] = engine_option(
        "auto",
        _TEXT,
        "default sampling parameters: auto (the model's own), vllm (none), or a folder's",
        commands="serve",
        core=None,
    )
    override_generation_config: Mapping[str, object] | None = engine_option(
        None,
        _TEXT,
        "default sampling parameters in the place of those of generation_config",
        core=None,
        commands="run",
        more='Such as {"temperature": 0.6, "top_k": 20, "max_new_tokens": 512}',
    )
    pooler_config: Mapping[str, object] | PoolerConfig | None = engine_option(
        None,
        _REQUESTS,
        "how one vector of a prompt is made, in the place of what the model's files say",
        core=None,
        more='Such as {"pooling_type": "MEAN", "normalize": true}: LAST, CLS or MEAN',
    )
    speculative_config: Mapping[str, object] | None = engine_option(
        None,
        _STEPS,
        "next tokens are guessed and checked together: "
        '{"method": "ngram", "num_speculative_tokens": 5}, or a model',
        commands="run serve plan bench",
        core="speculation",
        convert=speculation_config,
        more="The tokens are the same. Keys and methods: [speculation.md](speculation.md)",
    )
    structured_outputs_config: None = not_here(None)
    enable_lora: bool = not_here(False)
    reasoning_config: Mapping[str, str] | None = engine_option(
        None,
        _TEXT,
        "what opens and ends a section of thinking, for thinking_token_budget",
        core=None,
        is_text=False,
        more='{"reasoning_start_str": ..., "reasoning_end_str": ...}; default: the tokenizer\'s '
        "`<think>` and `</think>`",
    )
    revision: str | None = engine_option(
        None, _TEXT, "branch, tag or commit on the Hub", commands="run serve inspect", core=None
    )
    download_dir: str | os.PathLike[str] | None = engine_option(
        None, _TEXT, "cache of the Hub's models", core=None
    )
    enable_prompt_embeds: bool = engine_option(
        False,
        _REQUESTS,
        "prompts may be vectors in the place of tokens (EmbedsPrompt)",
        core=None,
    )
    count_expert_loads: bool = engine_option(
        False,
        _REQUESTS,
        "count how many rows each expert is given: LLM.expert_loads(), balance in bench",
        commands="run bench",
        core=None,
        more="for models of experts",
    )
    packed_cache_bytes: int | None = engine_option(
        None,
        _WEIGHTS,
        "disk for packed weights of all models, e.g. 20GiB: quicker starts; see llmserve cache",
        commands="run serve",
        alias="--packed-cache",
        maximum=INT64_MAX,
        more="CPU only: weights are kept in the user's cache folder in the layout that they are "
        "computed in, as far as they fit, and the next start maps them. Default: nothing is kept "
        "or looked for",
    )
    defer_packing: bool | None = engine_option(
        None,
        _WEIGHTS,
        "a large model in floats answers before its weights are packed; default: where it pays",
        more="CPU only: weights run on the file's rows until the engine, between steps and while "
        "it is idle, has packed them. False packs all before the constructor returns. The tokens "
        "are the same",
    )
    profiler_config: Mapping[str, object] | None = engine_option(
        None,
        _STEPS,
        "where stop_profile writes the steps since start_profile: {'torch_profiler_dir': a folder}",
        core=None,
        is_text=False,
    )
    logits_processors: Sequence[type | str] | None = engine_option(
        None,
        _REQUESTS,
        "classes of vLLM's LogitsProcessor, or module:Class, that edit the logits of requests",
        core=None,
        is_text=False,
        more="An object of each for every request; slow. Functions are taken by "
        "SamplingParams(logits_processors)",
    )
    skip_tokenizer_init: bool = engine_option(
        False, _TEXT, "no tokenizer is read: prompts are token ids, outputs have no text", core=None
    )

    def to_request(self, model: str | os.PathLike[str], **settings: object) -> _core.ConfigRequest:
        """What the core resolves a config from, with settings of its own; a setting of None is not
        said. Raises InvalidArgument on values of a wrong type or out of range; what depends on the
        model is checked there."""
        request = {name: value for name, value in settings.items() if value is not None}
        for option in ENGINE_OPTIONS:
            given = getattr(self, option.name)
            value = option.default if given is None else given
            if option.core is not None and value is not None:
                request[option.core or option.name] = option.checked(value)
        if self.nnodes and self.nnodes > 1:
            address = request["master_addr"] = as_address("master_addr", request["master_addr"])
            request["cluster_key"] = cluster_key(self.cluster_key, self.nnodes, address)
        if request.get("max_model_len") == -1:  # fitting.py tries others where that is too much
            del request["max_model_len"]
        if request.get("packed_cache_bytes"):
            request["packed_cache_folder"] = str(packed_cache_folder())
        return _core.ConfigRequest(model=str(model), **request)


# The rows of what is here.
ENGINE_OPTIONS = tuple(
    EngineOption(name=item.name, kind=kind_of(item.name, item.type), **item.metadata)
    for item in fields(EngineOptions)
    if item.metadata
)


def options_of(command: str) -> list[EngineOption]:
    """Those that have a flag of that command."""
    return [option for option in ENGINE_OPTIONS if command in option.commands.split()]


def argument_names() -> list[str]:
    """Of LLM and AsyncLLM."""
    return [item.name for item in fields(EngineOptions)]


def read_options(
    what: str, model: str | os.PathLike[str], given: Mapping[str, Any]
) -> EngineOptions:
    """Raises InvalidArgument for a name that is no argument of `what`, and NotSupported for one of
    vLLM's whose feature is not here, unless it is as vLLM has it by default."""
    names = argument_names()
    check_names(what, given, names)
    return EngineOptions(model, **{name: given[name] for name in names if name in given})
