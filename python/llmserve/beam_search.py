"""Beam search: its results. The search itself is the engine's."""

from dataclasses import dataclass

from llmserve.outputs import Logprob


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
