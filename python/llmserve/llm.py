"""The offline entry point: a model, and prompts in batches."""

import inspect
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from llmserve import _core
from llmserve.arguments import (
    INT64_MAX,
    boolean,
    describe,
    integer,
    number,
    optional_integer,
    refuse_unknown,
    refuse_unless_default,
    text,
)
from llmserve.errors import InvalidArgument
from llmserve.generation_config import GenerationConfig, read_generation_config
from llmserve.model_files import checkpoint_directory, read_vocab_size
from llmserve.outputs import RequestOutput
from llmserve.progress import Progress
from llmserve.prompts import Prompts, SinglePrompt
from llmserve.request_door import RequestDoor, RequestLimits
from llmserve.request_runner import RequestRunner
from llmserve.request_state import RequestState
from llmserve.sampling_params import RequestOutputKind, SamplingParams
from llmserve.tokenizer import Tokenizer


class LLM:
    """A model, loaded, with an engine of its own that runs prompts in continuous batches.

    model: a Hugging Face checkpoint directory (config.json, *.safetensors, tokenizer.json).
    tokenizer: another folder with a tokenizer.json. dtype: "auto" (as the checkpoint), "float32" or
    "bfloat16". device: "auto", "cpu" or "ref" (the slow reference). max_model_len: tokens of prompt
    and output together, by default the model's maximum. The KV cache takes num_gpu_blocks_override
    blocks of block_size tokens, or kv_cache_memory_bytes, or what gpu_memory_utilization of the
    memory at hand leaves for it (by default half on the CPU). max_num_batched_tokens and
    max_num_seqs bound one step. num_threads: by default the physical cores. seed: what requests
    without a seed of their own draw theirs from. generation_config: "auto" takes default sampling
    parameters from the model's generation_config.json, "vllm" takes none, a path takes those of
    another folder.

    Several LLMs may live in one process; every method may be called from any thread. Ctrl-C ends a
    call and leaves the LLM usable. Raises InvalidArgument, NotSupported, CorruptFile or
    ResourceExhausted; arguments of features that are not there yet are refused by name.

    >>> from llmserve import LLM, SamplingParams, demo_model_path
    >>> with LLM(demo_model_path()) as llm:
    ...     outputs = llm.generate("Once upon a time", SamplingParams(max_tokens=8), use_tqdm=False)
    >>> outputs[0].outputs[0].finish_reason
    'length'
    """

    _engine: _core.Engine | None = None

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        tokenizer: str | os.PathLike[str] | None = None,
        dtype: str = "auto",
        quantization: None = None,
        device: str = "auto",
        max_model_len: int | None = None,
        seed: int = 0,
        gpu_memory_utilization: float | None = None,
        kv_cache_memory_bytes: int | None = None,
        kv_cache_dtype: str = "auto",
        block_size: int = 16,
        enable_prefix_caching: bool = True,
        max_num_batched_tokens: int | None = None,
        max_num_seqs: int | None = None,
        enable_chunked_prefill: bool = True,
        scheduling_policy: str = "fcfs",
        max_num_queued_reqs: int | None = None,
        num_threads: int | None = None,
        num_gpu_blocks_override: int | None = None,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        enforce_eager: bool = False,
        hf_overrides: None = None,
        chat_template: None = None,
        trust_remote_code: bool = False,
        max_logprobs: int = 20,
        generation_config: str | os.PathLike[str] = "auto",
        speculative_config: None = None,
        structured_outputs_config: None = None,
        enable_lora: bool = False,
        **unknown: object,
    ) -> None:
        refuse_unknown("LLM", unknown, _argument_names())
        for name, value, default in (
            ("quantization", quantization, None),
            ("tensor_parallel_size", tensor_parallel_size, 1),
            ("pipeline_parallel_size", pipeline_parallel_size, 1),
            ("hf_overrides", hf_overrides, None),
            ("chat_template", chat_template, None),
            ("trust_remote_code", trust_remote_code, False),
            ("speculative_config", speculative_config, None),
            ("structured_outputs_config", structured_outputs_config, None),
            ("enable_lora", enable_lora, False),
        ):
            refuse_unless_default("LLM", name, value, default)
        boolean("enforce_eager", enforce_eager)  # nothing is captured or compiled in either case
        directory = checkpoint_directory(model)
        defaults = _read_generation_config(directory, generation_config)
        self._tokenizer = _read_tokenizer(directory, tokenizer)
        self._config = _core.resolve_config(
            model=str(directory),
            device=text("device", device),
            dtype=text("dtype", dtype),
            kv_cache_dtype=text("kv_cache_dtype", kv_cache_dtype),
            max_model_len=optional_integer("max_model_len", max_model_len, 2, INT64_MAX),
            block_size=integer("block_size", block_size, 1),
            enable_prefix_caching=boolean("enable_prefix_caching", enable_prefix_caching),
            kv_cache_memory_bytes=optional_integer(
                "kv_cache_memory_bytes", kv_cache_memory_bytes, 1, INT64_MAX
            ),
            num_gpu_blocks_override=optional_integer(
                "num_gpu_blocks_override", num_gpu_blocks_override, 1
            ),
            gpu_memory_utilization=(
                None
                if gpu_memory_utilization is None
                else number("gpu_memory_utilization", gpu_memory_utilization)
            ),
            max_num_batched_tokens=optional_integer(
                "max_num_batched_tokens", max_num_batched_tokens, 1
            ),
            max_num_seqs=optional_integer("max_num_seqs", max_num_seqs, 1),
            max_num_queued_reqs=optional_integer("max_num_queued_reqs", max_num_queued_reqs, 1),
            enable_chunked_prefill=boolean("enable_chunked_prefill", enable_chunked_prefill),
            scheduling_policy=text("scheduling_policy", scheduling_policy),
            num_threads=optional_integer("num_threads", num_threads, 1, 1024),
            seed=integer("seed", seed, 0, 2**64 - 1),
            max_logprobs=integer("max_logprobs", max_logprobs, 0),
            eos_token_ids=defaults.eos_token_ids,
        )
        vocab_size = read_vocab_size(directory)
        if self._tokenizer is not None:
            self._tokenizer.check_fits(vocab_size)
        limits = RequestLimits(
            vocab_size, self._config.scheduler.max_model_len, self._config.max_logprobs
        )
        self._door = RequestDoor(self._tokenizer, limits, defaults.default_params)
        vocabulary = self._tokenizer.to_core() if self._tokenizer is not None else None
        self._engine = _core.Engine(self._config, vocabulary)
        self._runner = RequestRunner(self._engine, limits.max_model_len)

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continues every prompt and returns the outputs in the prompts' order.

        prompts: a text, a list of token ids or integer array [T], a dict with "prompt" or
        "prompt_token_ids" (and "cache_salt"), or a list of them. sampling_params: one for all or
        one a prompt; None takes get_default_sampling_params(). priority: one a prompt, lower runs
        earlier where scheduling_policy looks at it.

        A bad prompt or parameter is refused (InvalidArgument, NotSupported) before anything runs.
        What goes wrong for one request later on concerns that request alone: its output has
        finish_reason "error" and says why in `error`, and the others are complete.
        """
        self._open_engine()
        refuse_unless_default("generate", "lora_request", lora_request, None)
        boolean("use_tqdm", use_tqdm)
        states = self._door.admit(prompts, sampling_params, priority)
        progress = Progress(len(states), use_tqdm)
        try:
            for state in self._runner.run(states, is_streamed=False):
                if state.is_finished:
                    progress.finish(state)
        finally:
            progress.close()
        return [state.output() for state in states]

    def stream(
        self,
        prompt: SinglePrompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
    ) -> Iterator[RequestOutput]:
        """Continues one prompt and yields an output whenever there is something new.

        Each output holds everything so far, or what SamplingParams.output_kind says. Text is whole
        characters and never taken back. Leaving the loop early aborts the request.

        >>> from llmserve import LLM, RequestOutputKind, SamplingParams, demo_model_path
        >>> params = SamplingParams(max_tokens=4, output_kind=RequestOutputKind.DELTA)
        >>> with LLM(demo_model_path()) as llm:
        ...     sum(len(output.outputs[0].token_ids) for output in llm.stream("Hello", params))
        4
        """
        self._open_engine()
        states = self._door.admit(prompt, sampling_params, priority)
        if len(states) != 1:
            raise InvalidArgument(f"stream takes one prompt, got {len(states)}; use generate")
        return self._stream(states[0])

    def _stream(self, state: RequestState) -> Iterator[RequestOutput]:
        kind = state.params.output_kind
        is_streamed = kind is not RequestOutputKind.FINAL_ONLY
        for _ in self._runner.run([state], is_streamed):
            if state.is_finished or is_streamed:
                yield state.output(kind)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises InvalidArgument if the model has none."""
        if self._tokenizer is None:
            raise InvalidArgument(f"{self._config.model_path} has no tokenizer.json")
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` takes where it is given none: SamplingParams' own defaults, with those of
        the model's generation_config.json over them."""
        return self._door.default_params

    def get_metrics(self) -> _core.EngineMetrics:
        """Counters since the start: requests, steps, tokens, prefix cache, KV blocks."""
        return self._open_engine().metrics()

    def trace(self) -> list[_core.StepRecord]:
        """The last few thousand steps: phase (prefill or decode), tokens, the times of scheduling,
        execution and commit in microseconds, and for each sequence why it ran or waited."""
        return self._open_engine().trace()

    def reset_prefix_cache(self) -> None:
        """Forgets the cached blocks that no running request uses."""
        self._open_engine().reset_prefix_cache()

    def close(self) -> None:
        """Ends the engine and gives all its memory back. Calls that are waiting in other threads
        raise InvalidArgument. May be called twice."""
        engine, self._engine = self._engine, None
        if engine is not None:
            self._runner.close()

    def __enter__(self) -> "LLM":
        self._open_engine()
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._engine is None:
            return "LLM(closed)"
        config = self._config
        return (
            f"LLM({config.model_path!r}, {self._engine.description}, dtype={config.dtype}, "
            f"max_model_len={config.scheduler.max_model_len}, kv_cache={config.cache.num_blocks} "
            f"blocks of {config.cache.block_size} tokens in {config.kv_cache_dtype})"
        )

    def _open_engine(self) -> _core.Engine:
        if self._engine is None:
            raise InvalidArgument("this LLM is closed; make a new one")
        return self._engine


def _argument_names() -> list[str]:
    parameters = inspect.signature(LLM.__init__).parameters
    return [name for name in parameters if name not in ("self", "unknown")]


def _read_generation_config(directory: Path, argument: object) -> GenerationConfig:
    if argument in ("auto", "vllm"):
        config = read_generation_config(directory)
        return config if argument == "auto" else GenerationConfig(config.eos_token_ids)
    if not isinstance(argument, str | os.PathLike) or not os.path.isdir(argument):
        raise InvalidArgument(
            f"generation_config must be 'auto', 'vllm' or a folder with generation_config.json, "
            f"got {describe(argument)}"
        )
    return read_generation_config(Path(os.fsdecode(argument)))


def _read_tokenizer(directory: Path, argument: object) -> Tokenizer | None:
    if argument is None:
        return Tokenizer.from_directory(directory)
    if not isinstance(argument, str | os.PathLike) or not os.path.isdir(argument):
        raise InvalidArgument(
            f"tokenizer must be a folder with tokenizer.json, got {describe(argument)}"
        )
    tokenizer = Tokenizer.from_directory(Path(os.fsdecode(argument)))
    if tokenizer is None:
        raise InvalidArgument(f"tokenizer: {os.fsdecode(argument)} has no tokenizer.json")
    return tokenizer
