"""A beam search on its way."""

from llmserve import _core
from llmserve.beam_search import BeamSearchOutput, BeamSearchSequence
from llmserve.beam_search_params import BeamSearchParams
from llmserve.requests.prompt_parser import Prompt
from llmserve.requests.state import RequestState
from llmserve.sampling_params import SamplingParams
from llmserve.tokenization.tokenizer import Tokenizer


class BeamSearchState(RequestState):
    """One request: what went in, and what has come out."""

    def __init__(
        self, prompt: Prompt, params: BeamSearchParams, tokenizer: Tokenizer | None
    ) -> None:
        sampling = SamplingParams(
            max_tokens=params.max_tokens, ignore_eos=params.ignore_eos, detokenize=False
        )
        super().__init__(prompt, sampling, sampling.to_core(), 0, tokenizer)
        self.beam_search = params.to_core()
        self._includes_stop = params.include_stop_str_in_output
        self._best: list[_core.TokenEvent] = []
        self._error: str | None = None

    @property
    def num_generation_tokens(self) -> int:
        """Of the continuations that are given out."""
        return sum(len(event.token_ids) for event in self._best)

    def apply(self, event: _core.TokenEvent) -> None:
        """Takes one of the best, which come in their order, or the end of a beam that failed."""
        if event.finish_reason in ("stop", "length"):
            self._best.append(event)
        else:
            self._error = event.error or "the request was aborted"
        self.is_finished = event.is_request_finished

    def beam_output(self) -> BeamSearchOutput:
        """Of a finished request."""
        return BeamSearchOutput([self._sequence(event) for event in self._best], self._error)

    def _sequence(self, event: _core.TokenEvent) -> BeamSearchSequence:
        stop = event.stop_reason
        tokens = self.prompt.token_ids + event.token_ids
        return BeamSearchSequence(
            tokens=tokens,
            logprobs=[
                {lp.token_id: self.to_logprob(lp) for lp in top} for top in event.top_logprobs
            ],
            cum_logprob=sum(logprob.logprob for logprob in event.logprobs),
            text=self._text(tokens, isinstance(stop, int)),
            finish_reason=event.finish_reason,
            stop_reason=stop if isinstance(stop, int) else None,
        )

    def _text(self, tokens: list[int], has_stop: bool) -> str | None:
        if self._tokenizer is None:
            return None
        text = self._tokenizer.decode(tokens[:-1] if has_stop else tokens)
        if has_stop and self._includes_stop:
            text += self._tokenizer.token_text(tokens[-1])
        return text
