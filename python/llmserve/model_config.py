"""What an engine says of its model and its own sizes, by the names that vLLM has for them."""

from dataclasses import dataclass, field
from types import SimpleNamespace

from llmserve import _core


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What is known of a model that is loaded."""

    model: str  # the checkpoint's path
    tokenizer: str | None  # where it was read from; None without one
    dtype: str
    max_model_len: int
    seed: int  # requests without one draw theirs from it
    vocab_size: int
    quantization: str | None = None

    def get_vocab_size(self) -> int:
        """Token ids that the model knows."""
        return self.vocab_size


@dataclass(frozen=True, slots=True)
class SchedulerSizes:
    """What a step may hold."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """The KV cache."""

    block_size: int
    num_gpu_blocks: int  # of whatever device


@dataclass(frozen=True, slots=True)
class VllmConfig:
    """What classes of logits processors get of the engine, and `llm.llm_engine.vllm_config`."""

    model_config: ModelConfig
    scheduler_config: SchedulerSizes
    cache_config: CacheSizes
    speculative_config: None = None
    additional_config: SimpleNamespace = field(default_factory=SimpleNamespace)

    @classmethod
    def of(cls, model_config: ModelConfig, config: _core.EngineConfig) -> "VllmConfig":
        """Of an engine."""
        scheduler = config.scheduler
        sizes = SchedulerSizes(
            scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.max_model_len
        )
        cache = CacheSizes(config.cache.block_size, config.cache.num_blocks)
        return cls(model_config, sizes, cache)


class CompilationConfig(dict[str, object]):
    """For LLM(compilation_config=...), where it changes nothing."""

    def __init__(self, level: int | None = None, **fields: object) -> None:
        super().__init__(fields if level is None else {"level": level, **fields})


class ProfilerConfig(dict[str, object]):
    """For LLM(profiler_config=...)."""


class StructuredOutputsConfig(dict[str, object]):
    """For LLM(structured_outputs_config=...), where the backend changes nothing."""
