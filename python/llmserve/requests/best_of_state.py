"""A request of which the best of several continuations are given out."""

from dataclasses import replace

from llmserve import _core
from llmserve.outputs import CompletionOutput
from llmserve.requests.prompt_parser import Prompt
from llmserve.requests.state import RequestState
from llmserve.sampling_params import SamplingParams
from llmserve.tokenization.tokenizer import Tokenizer


class BestOfState(RequestState):
    """One request: best_of samples run, and the n with the largest cumulative_logprob come out, the
    best first. Before the end they are the best so far."""

    def __init__(
        self,
        prompt: Prompt,
        params: SamplingParams,
        core_params: _core.SamplingParams,
        priority: int,
        tokenizer: Tokenizer | None,
    ) -> None:
        assert params.best_of is not None
        super().__init__(prompt, params.of_the_run(), core_params, priority, tokenizer)
        self.asked = params

    @property
    def num_returned(self) -> int:
        """See RequestState."""
        return self.asked.n

    def completions(self) -> list[CompletionOutput]:
        """See RequestState."""
        ranked = sorted(super().completions(), key=lambda one: -(one.cumulative_logprob or 0.0))
        has_logprobs = self.asked.has_logprobs
        return [
            replace(completion, index=rank, logprobs=completion.logprobs if has_logprobs else None)
            for rank, completion in enumerate(ranked[: self.asked.n])
        ]
