"""A beam search on its way."""

from llmserve import _core
from llmserve.beam_search import BeamSearchOutput, BeamSearchSequence
from llmserve.beam_search_params import BeamSearchParams
from llmserve.outputs import CompletionOutput
from llmserve.requests.prompt_parser import Prompt
from llmserve.requests.state import RequestState
from llmserve.sampling_params import SamplingParams
from llmserve.tokenization.tokenizer import Tokenizer


class BeamSearchState(RequestState):
    """One request: what went in, and what has come out."""

    def __init__(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        tokenizer: Tokenizer | None,
        skip_special_tokens: bool = True,
    ) -> None:
        sampling = SamplingParams(
            max_tokens=params.max_tokens, ignore_eos=params.ignore_eos, detokenize=False
        )
        # To the engine a search is one request, and to who counts sequences as many as its beams.
        beams = sampling.clone(n=params.beam_width)
        super().__init__(prompt, beams, sampling.to_core(), 0, tokenizer)
        self._skips_special = skip_special_tokens
        self.beam_search = params.to_core()
        self._includes_stop = params.include_stop_str_in_output
        self._best: list[_core.TokenEvent] = []
        self._error: str | None = None

    @property
    def num_generation_tokens(self) -> int:
        """Of the continuations that are given out."""
        return sum(len(event.token_ids) for event in self._best)

    @property
    def max_num_sample_tokens(self) -> int:
        """See RequestState."""
        return max((len(event.token_ids) for event in self._best), default=0)

    @property
    def error(self) -> str | None:
        """See RequestState."""
        return self._error

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

    def completions(self) -> list[CompletionOutput]:
        """The same as outputs of sampling have it: without the prompt."""
        return [self._completed(rank, event) for rank, event in enumerate(self._best)]

    def _completed(self, rank: int, event: _core.TokenEvent) -> CompletionOutput:
        stop = event.stop_reason
        rows = zip(event.logprobs, event.top_logprobs, strict=True)
        text = self._text(event.token_ids, isinstance(stop, int), self._skips_special)
        return CompletionOutput(
            index=rank,
            text=text or "",
            token_ids=event.token_ids,
            cumulative_logprob=sum(logprob.logprob for logprob in event.logprobs),
            logprobs=[self._logprob_dict(chosen, top) for chosen, top in rows],
            finish_reason=event.finish_reason,
        )

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

    def _text(self, tokens: list[int], has_stop: bool, skips_special: bool = True) -> str | None:
        if self._tokenizer is None:
            return None
        text = self._tokenizer.decode(tokens[:-1] if has_stop else tokens, skips_special)
        if has_stop and self._includes_stop:
            text += self._tokenizer.token_text(tokens[-1])
        return text
