"""What `LLM.embed` and `LLM.encode` return: names as users of vLLM know them; additions are
marked."""

from dataclasses import dataclass

from llmserve._core import Array


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """Hidden states or logits, in memory that the array owns: torch.from_dlpack(data) and
    numpy.asarray(data) take it as it is."""

    data: Array | None  # float32: [E], [T, E] or [T, V]; None where `error` says why


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """One vector of a prompt."""

    data: Array | None  # llmserve's own: float32 [E], as in PoolingOutput

    @property
    def embedding(self) -> list[float]:
        """The vector as Python numbers, empty where there is none."""
        if self.data is None:
            return []
        values: list[float] = self.data.__array__().tolist()
        return values

    @property
    def hidden_size(self) -> int:
        """Its length."""
        return 0 if self.data is None else len(self.data)


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput:
    """A prompt and what was asked of it."""

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int]  # empty where the prompt came as embeddings
    num_cached_tokens: int  # always 0: the cache holds no hidden states
    finished: bool
    error: str | None = None  # llmserve's own: what went wrong


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """A prompt and its embedding."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]  # empty where the prompt came as embeddings
    num_cached_tokens: int  # always 0: the cache holds no hidden states
    finished: bool
    error: str | None = None  # llmserve's own: what went wrong
