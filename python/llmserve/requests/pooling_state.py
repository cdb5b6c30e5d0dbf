"""A request on its way that gives hidden states or logits and no tokens."""

from llmserve import _core
from llmserve.pooling_outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
)
from llmserve.requests.prompt_parser import Prompt
from llmserve.requests.state import RequestState
from llmserve.sampling_params import SamplingParams

_NOTHING_SAMPLED = SamplingParams(detokenize=False)


class PoolingState(RequestState):
    """One request: what went in, and what has come out."""

    def __init__(self, prompt: Prompt, pooling: _core.PoolingParams) -> None:
        super().__init__(prompt, _NOTHING_SAMPLED, _NOTHING_SAMPLED.to_core(), 0, None)
        self.pooling = pooling
        self._data: _core.Array | None = None
        self._error: str | None = None

    def apply(self, event: _core.TokenEvent) -> None:
        """Takes the request's only event."""
        self._data = event.pooled
        self._error = event.error or None
        if self._data is None and self._error is None:
            self._error = "the request was aborted"
        self.is_finished = event.is_request_finished

    @property
    def error(self) -> str | None:
        """What went wrong."""
        return self._error

    def pooling_output(self) -> PoolingRequestOutput:
        """Of a finished request."""
        return PoolingRequestOutput(
            request_id=self.name or str(self.request_id),
            outputs=PoolingOutput(self._data),
            prompt_token_ids=self.prompt.token_ids,
            num_cached_tokens=0,
            finished=self.is_finished,
            error=self._error,
        )

    def embedding_output(self) -> EmbeddingRequestOutput:
        """Of a finished request of the task "embed"."""
        return EmbeddingRequestOutput(
            request_id=self.name or str(self.request_id),
            outputs=EmbeddingOutput(self._data),
            prompt_token_ids=self.prompt.token_ids,
            num_cached_tokens=0,
            finished=self.is_finished,
            error=self._error,
        )
