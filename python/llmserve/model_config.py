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
class VllmConfig:
    """What classes of logits processors get of the engine."""

    model_config: ModelConfig
    scheduler_config: SchedulerSizes
    speculative_config: None = None
    additional_config: SimpleNamespace = field(default_factory=SimpleNamespace)

    @classmethod
    def of(cls, model_config: ModelConfig, scheduler: _core.SchedulerConfig) -> "VllmConfig":
        """Of an engine."""
        sizes = SchedulerSizes(
            scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.max_model_len
        )
        return cls(model_config, sizes)
