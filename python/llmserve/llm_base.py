"""What `LLM` and `AsyncLLM` have in common: a model, loaded, with an engine, and what it tells."""

import atexit
import logging
import os
import weakref
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from llmserve import _core
from llmserve.chat.chat_template import template_variables
from llmserve.checkpoint.model_files import (
    config_file,
    find_checkpoint,
    find_tokenizer_folder,
    is_gguf,
    plain_name,
    text_source,
)
from llmserve.checkpoint.numerics_class import OPTIONS as CLASS_OPTIONS
from llmserve.checkpoint.numerics_class import numerics_class
from llmserve.common.arguments import (
    INT64_MAX,
    boolean,
    describe,
    integer,
    optional_integer,
    refuse_unknown,
    text,
)
from llmserve.common.html_table import html_table
from llmserve.common.pooler_config import as_pooler_config
from llmserve.errors import InvalidArgument, NotSupported
from llmserve.llm_insight import EngineInsight
from llmserve.options.engine_options import EngineOptions, read_options
from llmserve.options.eplb_config import read_expert_balance, refuse_on_device
from llmserve.options.fitting import resolve
from llmserve.options.signature import takes
from llmserve.options.speculative_config import is_exact, with_model_found
from llmserve.pooling_params import PoolingConfig, read_pooling_config
from llmserve.requests.admission import RequestAdmission, RequestLimits
from llmserve.requests.generation_config import (
    GenerationConfig,
    overridden,
    read_generation_config,
)
from llmserve.requests.grammars import Grammars
from llmserve.requests.hands_over import HandsOver
from llmserve.requests.prompt_parser import check_text
from llmserve.requests.runner import RequestRunner
from llmserve.requests.word_tokens import read_thinking_tokens
from llmserve.sampling_params import SamplingParams
from llmserve.tokenization.draft_vocabulary import read_draft_vocabulary
from llmserve.tokenization.eos_token import read_end_token_ids
from llmserve.tokenization.length_bound import LengthBound
from llmserve.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llmserve.insight.metric_objects import EngineMetrics
    from llmserve.insight.profile import Profile
    from llmserve.model_config import ModelConfig, VllmConfig
    from llmserve.options.engine_args import EngineArgs
    from llmserve.plan.memory_plan import MemoryPlan
    from llmserve.requests.stepped import SteppedRequests

_log = logging.getLogger(__name__)

_Self = TypeVar("_Self", bound="LLMBase")

# What vLLM's from_engine_args takes besides.
_OF_FROM_ENGINE_ARGS = (
    *("usage_context", "start_engine_loop", "stat_loggers", "enable_log_requests"),
    "disable_log_stats",
)
MEMORY_TAGS = ("weights", "kv_cache")  # what wake_up() gets back


class LLMBase(EngineInsight, HandsOver):
    """A model, loaded, with an engine of its own. Its arguments are described at `LLM`."""

    _engine: _core.Engine | None = None
    _default_max_stall_ms = 0
    _spreads_prompts = True

    @takes(EngineOptions)
    def __init__(self, model: str | os.PathLike[str], **given: object) -> None:
        try:
            self._load(model, given)
        except BaseException:  # Ctrl-C as well
            self.close()
            raise

    def _load(self, model: str | os.PathLike[str], given: dict[str, object]) -> None:
        options = read_options(type(self).__name__, model, given)
        if options.node_rank:
            raise InvalidArgument(
                f"node_rank={describe(options.node_rank)} takes no requests: run `llmserve serve` "
                f"with these options on that node, which computes for node 0"
            )
        if options.seed is None:
            options = replace(options, seed=int.from_bytes(os.urandom(4), "little"))
            _log.info("seed=%d was drawn; the same one gives the same tokens", options.seed)
        if options.enable_dbo and options.nnodes == 1:
            _log.warning("enable_dbo=True changes nothing with nnodes=1: no wire is to be hidden")
        self._name = plain_name(model)
        self._pooler_config = as_pooler_config(options.pooler_config)
        balance = read_expert_balance(
            options.enable_eplb,
            options.eplb_config,
            bool(options.enable_expert_parallel) and options.tensor_parallel_size > 1,
            options.nnodes,
            options.tensor_parallel_cut,
        )
        self._seed = integer("seed", options.seed, 0, 2**64 - 1)
        self._profile = None if options.profiler_config is None else self._make_profile(options)
        if options.max_stall_ms is None and options.enable_chunked_prefill is not False:
            options = replace(options, max_stall_ms=self._default_max_stall_ms)
        checkpoint = find_checkpoint(
            model,
            options.revision,
            options.download_dir,
            is_overridden=bool(options.hf_overrides),
        )
        options = replace(
            options,
            speculative_config=with_model_found(  # type: ignore[arg-type]  # checked there
                options.speculative_config, options.download_dir
            ),
        )
        source = text_source(checkpoint)
        # Once, for all that a start reads of it.
        opened = _core.Checkpoint(str(checkpoint), config_text(options, source))
        defaults = overridden(
            _read_generation_config(source, options.generation_config, opened.gguf),
            options.override_generation_config,
        )
        self._config = resolve(
            options,
            opened,
            eos_token_ids=defaults.eos_token_ids,
            spreads_prompts=self._spreads_prompts,
        )
        if balance is not None:
            refuse_on_device(self._config.device, options.eplb_config)
        vocab_size = opened.read_vocab_size()
        tokenizer = options.tokenizer
        text_path = source
        if tokenizer is not None:
            text_path = find_tokenizer_folder(tokenizer, None, options.download_dir)
        if tokenizer is not None or not is_gguf(source):  # whose end is among `defaults`
            _add_ends(self._config.scheduler, read_end_token_ids(text_path), vocab_size)
        takes_embeds = boolean("enable_prompt_embeds", options.enable_prompt_embeds)
        with _core.LoadingModel(self._config, opened) as loading:
            self._tokenizer = (
                None
                if boolean("skip_tokenizer_init", options.skip_tokenizer_init)
                else _read_tokenizer(text_path, options, opened.gguf)
            )
            if self._tokenizer is not None:
                _warn_of_tokens(self._tokenizer.check_fits(vocab_size), vocab_size)
            thinking = read_thinking_tokens(options.reasoning_config, self._tokenizer)
            vocabulary = self._tokenizer.to_core() if self._tokenizer is not None else None
            drafts = read_draft_vocabulary(options.speculative_config)
            self._engine = _core.Engine(loading, vocabulary, *drafts)
            self._runner = RequestRunner(self._engine)
        if balance is not None:
            self._engine.balance_experts(**asdict(balance))
        if boolean("count_expert_loads", options.count_expert_loads):
            self._engine.count_expert_loads()
        if self._engine.warning:
            _log.warning("%s", self._engine.warning)
        limits = RequestLimits(
            self._config.scheduler.max_model_len,
            self._config.scheduler.policy,
            takes_embeds,
            None if self._tokenizer is None else LengthBound(self._tokenizer),
        )
        grammars = None
        if vocabulary is not None:
            ends = self._config.scheduler.eos_token_ids
            end_token_ids = [token_id for token_id in ends if token_id < vocab_size]
            grammars = Grammars(vocabulary, self._engine.vocab_size, end_token_ids)
        self._admission = RequestAdmission(
            self._engine, self._tokenizer, limits, defaults.default_params, thinking, grammars
        )
        self._text_path = text_path
        self._vocab_size = vocab_size
        self._quantization = options.quantization
        self._class_options = {name: getattr(options, name) for name in CLASS_OPTIONS}
        if not is_exact(options.speculative_config):
            self._class_options["guesses"] = os.urandom(8).hex()  # no other engine gives the same
        if options.logits_processors:
            from llmserve.requests.processor_classes import ProcessorClasses  # seldom needed

            self._admission.processor_classes = ProcessorClasses.from_argument(
                options.logits_processors, self.vllm_config
            )
        _OPEN.add(self)
        self._begin()

    @classmethod
    def from_engine_args(cls: type[_Self], engine_args: "EngineArgs", **vllms: object) -> _Self:
        """One with the arguments that an EngineArgs holds. vllms: what vLLM takes besides, and what
        changes nothing here: usage_context, start_engine_loop, stat_loggers, enable_log_requests,
        disable_log_stats."""
        refuse_unknown(f"{cls.__name__}.from_engine_args", vllms, _OF_FROM_ENGINE_ARGS)
        return cls(**vars(engine_args))

    def _begin(self) -> None:
        """Sets up what a subclass has beside the engine."""

    @classmethod
    def plan(
        cls,
        model: str | os.PathLike[str],
        *,
        contexts: Sequence[int] | None = None,
        available_memory_bytes: int | None = None,
        bandwidth: float | None = None,
        flops: float | None = None,
        **arguments: Any,
    ) -> "MemoryPlan":
        """What an LLM of the same arguments would take, before anything is loaded: weights by
        group, workspace, KV cache, and how many users it holds. Made by the code that allocates.

        model: as in LLM, or a config.json by itself. contexts: tokens of a user, for which the
        users are counted; by default a few up to max_model_len. available_memory_bytes: plan for
        another machine or container than this one. bandwidth (bytes a second) and flops (a second):
        adds an estimate of speed, bounded by reading the weights and KV cache, and by arithmetic.
        What would not fit is a plan whose `refusal` says why; raises what LLM raises on arguments
        that are wrong in any memory.

        >>> from llmserve import LLM, demo_model_path
        >>> plan = LLM.plan(demo_model_path(), max_num_seqs=4)
        >>> plan.refusal is None, plan.kv_cache_bytes == plan.num_tokens * plan.kv_bytes_per_token
        (True, True)
        """
        from llmserve.plan.memory_plan import plan_memory  # loading a model needs none of it

        options = read_options(f"{cls.__name__}.plan", model, arguments)
        if options.hf_overrides:
            raise NotSupported(
                f"{cls.__name__}.plan: hf_overrides are not supported; give a config.json with the "
                f"fields changed, of which there may be a copy by itself"
            )
        path = config_file(model) or find_checkpoint(model, options.revision, options.download_dir)
        found = with_model_found(options.speculative_config, options.download_dir)
        options = replace(options, speculative_config=found)  # type: ignore[arg-type]
        request = options.to_request(
            path,
            available_memory_bytes=optional_integer(
                "available_memory_bytes", available_memory_bytes, 0, INT64_MAX
            ),
        )
        return plan_memory(request, contexts, bandwidth, flops)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises InvalidArgument if the model has none."""
        if self._tokenizer is None:
            raise InvalidArgument(
                f"{self._config.model_path} has no tokenizer, or none was read "
                f"(skip_tokenizer_init=True)"
            )
        return self._tokenizer

    def check_text(self, prompt: str) -> None:
        """For who tokenizes a prompt and hands in its token ids: raises PromptTooLong if there will
        be too many of them however it is tokenized, which takes a microsecond a character."""
        check_text("prompt", prompt, self._admission.limits.prompt_limits())

    @property
    def model_config(self) -> "ModelConfig":
        """What is known of the model, by vLLM's names."""
        from llmserve.model_config import ModelConfig  # seldom needed

        return ModelConfig(
            model=self._config.model_path,
            tokenizer=None if self._tokenizer is None else str(self._text_path),
            dtype=self._config.dtype,
            max_model_len=self._config.scheduler.max_model_len,
            seed=self._seed,
            vocab_size=self._vocab_size,
            quantization=self._quantization,
        )

    @property
    def vllm_config(self) -> "VllmConfig":
        """The engine's own sizes, by vLLM's names."""
        from llmserve.model_config import VllmConfig  # seldom needed

        return VllmConfig.of(self.model_config, self._config)

    @cached_property
    def numerics_class(self) -> str:
        """A digest of what decides the tokens: build, backend, instruction set, types, options and
        weights. Engines of one give the same, bit for bit. On CUDA in its mode of fixed sums."""
        return numerics_class(self._config, self.description, self._class_options)

    @cached_property
    def _stepped(self) -> "SteppedRequests":
        """What `LLMEngine` runs."""
        from llmserve.requests.stepped import SteppedRequests  # seldom needed

        return SteppedRequests(self._runner)

    def pooling_config(self) -> PoolingConfig:
        """How one vector of a prompt is made: as the checkpoint says, or pooler_config. Raises
        CorruptFile."""
        if self._pooler_config.pooling_type is not None:  # whatever modules there are
            return PoolingConfig().overridden(self._pooler_config)
        read = read_pooling_config(Path(self._config.model_path))
        return read.overridden(self._pooler_config)

    def collective_rpc(self, *_arguments: object, **_keywords: object) -> NoReturn:
        """Not here: raises NotSupported that says what to use."""
        raise NotSupported(
            "collective_rpc is not supported: there are no worker processes to call into; "
            "get_metrics(), get_memory_use(), trace(), sleep() and wake_up() are methods of LLM"
        )

    def apply_model(self, *_arguments: object, **_keywords: object) -> NoReturn:
        """Not here: raises NotSupported that says what to use."""
        raise NotSupported(
            "apply_model is not supported: the model is C++ and no torch module; encode(..., "
            "pooling_task='token_embed') gives hidden states, 'token_logits' logits, and "
            "llmserve.ops the operations that models are made of"
        )

    @property
    def errored(self) -> bool:
        """Whether the engine has stopped; `failure` says why."""
        return self._engine is None or self.failure is not None

    def shutdown(self, timeout: float | None = None) -> None:
        """As `close`, which waits for nothing: timeout is vLLM's and changes nothing."""
        self.close()

    @property
    def failure(self) -> str | None:
        """Why the engine stopped and takes no more requests; None while it runs."""
        return self._open_engine().failure or None

    @property
    def device(self) -> str:
        """What the model runs on: "cpu", "cuda" or "ref"."""
        return self._config.device

    @property
    def description(self) -> str:
        """Architecture, data type and backend: "LlamaForCausalLM bfloat16 on cpu/avx2"."""
        return self._open_engine().description

    @property
    def has_tokenizer(self) -> bool:
        """Whether prompts and outputs may be text."""
        return self._tokenizer is not None

    @property
    def engine_is_sleeping(self) -> bool:
        """As `is_sleeping`, which AsyncLLM has to be awaited for."""
        return self._open_engine().is_sleeping

    @property
    def can_bound_thinking(self) -> bool:
        """Whether thinking_token_budget is taken: what opens and ends a section is known."""
        return self._admission.thinking is not None

    @property
    def max_model_len(self) -> int:
        """Tokens that a prompt and its output may have together."""
        return self._config.scheduler.max_model_len

    @property
    def max_num_seqs(self) -> int:
        """Sequences that may run at once: in one step, of all replicas."""
        return self.num_replicas * self._config.scheduler.max_num_seqs

    def _ease_off(self, share: float) -> None:
        """This share of max_num_seqs runs at once from the next step on, at least one; those that
        run go on."""
        of_each = self._config.scheduler.max_num_seqs
        self._open_engine().allow_seats(max(1, round(share * of_each)))

    @property
    def block_size(self) -> int:
        """Tokens of a block of the KV cache."""
        return self._config.cache.block_size

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that the KV cache holds, those of all replicas together."""
        return self.num_replicas * self._config.cache.num_blocks * self._config.cache.block_size

    @property
    def default_sampling_params(self) -> SamplingParams:
        """As `get_default_sampling_params`, but shared, and not to be changed."""
        return self._admission.default_params

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` takes where it is given none: SamplingParams' own defaults, with those of
        the model's generation_config.json over them: a copy, to be changed as one likes."""
        return replace(self._admission.default_params)

    def get_metrics(self) -> "EngineMetrics":
        """Counters since the start: requests, steps, tokens, prefix cache, KV blocks. Each is a
        field, and to iterate over them gives metrics by vLLM's names, distributions as well."""
        from llmserve.insight.metric_objects import EngineMetrics  # no call of generate needs them

        engine = self._open_engine()
        return EngineMetrics(engine.metrics(), engine.histograms, self._name)

    def get_histograms(self) -> _core.EngineHistograms:
        """Distributions since the start: latencies, and sizes of requests and steps."""
        return self._open_engine().histograms()

    def get_memory_use(self) -> _core.MemoryUse:
        """The bytes that the engine holds."""
        return self._open_engine().memory_use

    def _start_profile(self) -> None:
        self._open_engine()
        if self._profile is None:
            self._profile = self._make_profile(EngineOptions(""))
        self._profile.start()

    def _stop_profile(self) -> None:
        if self._profile is None:
            raise InvalidArgument("stop_profile: no profile was started; call start_profile first")
        _log.info("wrote %s", self._profile.stop(self.trace()))

    @staticmethod
    def _make_profile(options: EngineOptions) -> "Profile":
        from llmserve.insight.profile import Profile  # seldom needed

        return Profile(options.profiler_config)

    def _sleep(self, level: object) -> None:
        engine = self._open_engine()
        self._runner.check_may_wait()
        engine.sleep(integer("level", level, 1, 2))

    def _wake_up(self, tags: object) -> None:
        engine = self._open_engine()
        self._runner.check_may_wait()
        if tags is None:
            tags = MEMORY_TAGS
        if isinstance(tags, str) or not isinstance(tags, Sequence):
            raise InvalidArgument(f"tags must be a list of {MEMORY_TAGS}, got {describe(tags)}")
        engine.wake_up([text(f"tags[{idx}]", tag) for idx, tag in enumerate(tags)])

    def close(self) -> None:
        """Ends the engine and gives all its memory back. Calls that are waiting in other threads
        raise InvalidArgument. May be called twice. In a forked child it does nothing: the engine is
        the parent's."""
        engine = self._engine
        if engine is None:
            return
        if engine.is_of_this_process:
            # Without a runner the constructor has not come to its end.
            (getattr(self, "_runner", None) or engine).close()
        self._engine = None  # last: a call that was interrupted may be repeated

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: its engine has one owner; share "
            f"the object, or make another"
        )

    def __del__(self) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._engine is None:
            return f"{type(self).__name__}(closed)"
        config = self._config
        return (
            f"{type(self).__name__}({config.model_path!r}, {self._engine.description}, "
            f"dtype={config.dtype}, max_model_len={config.scheduler.max_model_len}, "
            f"kv_cache={config.cache.num_blocks} blocks of {config.cache.block_size} tokens in "
            f"{config.kv_cache_dtype}"
            + (f", replicas={self.num_replicas})" if self.num_replicas > 1 else ")")
        )

    def _repr_html_(self) -> str:
        if self._engine is None:
            return html_table(repr(self), [], [])
        config, metrics, use = self._config, self._engine.metrics(), self._engine.memory_use
        rows = [
            ("model", config.model_path),
            ("runs", self._engine.description + (", asleep" if self._engine.is_sleeping else "")),
            ("max_model_len", config.scheduler.max_model_len),
            ("max_num_seqs", config.scheduler.max_num_seqs),
            ("max_num_batched_tokens", config.scheduler.max_num_batched_tokens),
            ("weights", f"{use.weight_bytes / 2**20:.1f} MiB"),
            ("workspace", f"{use.workspace_bytes / 2**20:.1f} MiB"),
            (
                "KV cache",
                f"{use.kv_cache_bytes / 2**20:.1f} MiB: {config.cache.num_blocks} blocks of "
                f"{config.cache.block_size} tokens in {config.kv_cache_dtype}",
            ),
            (
                "KV blocks",
                f"{metrics.num_blocks_used} used, {metrics.num_blocks_cached} cached, "
                f"{metrics.num_blocks_free} free",
            ),
            (
                "requests",
                f"{metrics.num_requests_running} running, {metrics.num_requests_waiting} waiting, "
                f"{metrics.num_requests_finished} finished",
            ),
            ("generated", f"{metrics.num_generation_tokens} tokens"),
        ]
        return html_table(type(self).__name__, [], rows)

    def _open_engine(self) -> _core.Engine:
        if self._engine is None:
            raise InvalidArgument("this LLM is closed; make a new one")
        if not self._engine.is_of_this_process:
            raise InvalidArgument(
                "this LLM belongs to the process that this one was forked from; make a new one "
                "here, or start processes by multiprocessing's 'spawn'"
            )
        return self._engine


_OPEN: weakref.WeakSet[LLMBase] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Lets daemon threads out of the engine while there is still an interpreter to come back to:
    later they would abort the process."""
    for llm in list(_OPEN):
        llm.close()


def _read_generation_config(
    source: Path, argument: object, gguf: _core.GgufFile | None
) -> GenerationConfig:
    if argument in ("auto", "vllm"):
        config = read_generation_config(source, gguf)
        return config if argument == "auto" else GenerationConfig(config.eos_token_ids)
    if not isinstance(argument, str | os.PathLike) or not os.path.isdir(argument):
        raise InvalidArgument(
            f"generation_config must be 'auto', 'vllm' or a folder with generation_config.json, "
            f"got {describe(argument)}"
        )
    return read_generation_config(Path(os.fsdecode(argument)))


def config_text(options: EngineOptions, source: Path) -> str:
    """config.json with hf_overrides in it; empty without."""
    if not options.hf_overrides:
        return ""
    from llmserve.checkpoint.config_overrides import overridden_config  # seldom needed

    if options.packed_cache_bytes:
        raise NotSupported(
            "packed_cache_bytes is not supported with hf_overrides, of which the packed files know "
            "nothing; leave one of them out"
        )
    return overridden_config(source, options.hf_overrides)


def _read_tokenizer(
    path: Path, options: EngineOptions, gguf: _core.GgufFile | None
) -> Tokenizer | None:
    is_given = options.tokenizer is not None
    tokenizer = Tokenizer.from_path(path, options.chat_template, None if is_given else gguf)
    if tokenizer is None and is_given:
        raise InvalidArgument(f"tokenizer: {path} has no tokenizer")
    name = "default_chat_template_kwargs"
    variables = template_variables(name, options.default_chat_template_kwargs)
    if tokenizer is not None:
        tokenizer.default_template_variables = variables
    return tokenizer


def _warn_of_tokens(beyond: list[str], vocab_size: int) -> None:
    if beyond:
        _log.warning(
            "the tokenizer adds %s beyond the %d tokens that the model has embeddings for: prompts "
            "with them are refused, and nothing generates them",
            describe(beyond),
            vocab_size,
        )


def _add_ends(config: _core.SchedulerConfig, token_ids: list[int], vocab_size: int) -> None:
    """The tokenizer's ends beside those of generation_config.json or config.json."""
    for token_id in token_ids:
        if 0 <= token_id < vocab_size and token_id not in config.eos_token_ids:
            config.eos_token_ids = [*config.eos_token_ids, token_id]
