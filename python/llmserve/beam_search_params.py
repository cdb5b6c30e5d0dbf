"""What a beam search is asked for."""

from dataclasses import dataclass

from llmserve import _core
from llmserve.common.arguments import boolean, describe, integer, number, refuse_unknown
from llmserve.common.init_signature import InitSignature
from llmserve.errors import NotSupported


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Beam search parameters; names and defaults as users of vLLM know them.

    beam_width: continuations kept at each token, 1 to 64. max_tokens: generated at most.
    ignore_eos: an end-of-sequence token is one like others. temperature: 0 alone, the search draws
    nothing. length_penalty: results are ranked by cum_logprob / tokens ** length_penalty, where the
    prompt's tokens count and an end-of-sequence token does not.
    include_stop_str_in_output: the text of an end-of-sequence token is part of the text.

    >>> BeamSearchParams(beam_width=4, max_tokens=16).length_penalty
    1.0
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    __signature__ = InitSignature()

    def __new__(cls, *args: object, **kwargs: object) -> "BeamSearchParams":
        """Refuses unknown names with a hint before the generated __init__ sees them."""
        refuse_unknown("BeamSearchParams", kwargs, cls.__slots__)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        integer("beam_width", self.beam_width, 1)
        integer("max_tokens", self.max_tokens, 1)
        for name in ("ignore_eos", "include_stop_str_in_output"):
            object.__setattr__(self, name, boolean(name, getattr(self, name)))
        if number("temperature", self.temperature) != 0:
            raise NotSupported(
                f"BeamSearchParams: temperature={describe(self.temperature)} is not supported: "
                f"the search takes the most likely continuations and draws nothing; leave it at 0"
            )
        number("length_penalty", self.length_penalty)
        self.to_core().validate()

    def to_core(self) -> _core.BeamSearchParams:
        """The engine's struct; the rest is what a search has in common with sampling."""
        return _core.BeamSearchParams(
            beam_width=self.beam_width, length_penalty=float(self.length_penalty)
        )
