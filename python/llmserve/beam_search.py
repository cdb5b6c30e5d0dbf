"""Beam search: results, and a request on its way. The search itself is the engine's."""

from dataclasses import dataclass

from llmserve import _core
from llmserve.beam_search_params import BeamSearchParams
from llmserve.outputs import Logprob
from llmserve.prompts import Prompt
from llmserve.request_state import RequestState
from llmserve.sampling_params import SamplingParams
from llmserve.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One continuation."""

    tokens: list[int]  # the prompt's and those generated, an end-of-sequence token included
    logprobs: list[dict[int, Logprob]]  # a dict a generated token: the candidates it was among
    cum_logprob: float  # of the generated tokens
    text: str | None  # of all tokens; None without a tokenizer
    finish_reason: str | None = None  # "stop" or "length"
    stop_reason: int | None = None  # the end-of-sequence token, if one ended it
    lora_request: None = None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The best continuations of a prompt, best first: beam_width of them, if there are as many."""

    sequences: list[BeamSearchSequence]
    error: str | None = None  # llmserve's own: what went wrong; there are no sequences then


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
