"""How the tokens of one request are chosen and when it ends."""

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from llmserve import _core
from llmserve.arguments import (
    boolean,
    describe,
    integer,
    number,
    optional_integer,
    refuse_unknown,
    refuse_unless_default,
    text,
)
from llmserve.errors import InvalidArgument, NotSupported

# Fields that are accepted at their default and refused otherwise.
_NOT_YET_SUPPORTED = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "prompt_logprobs",
    "spaces_between_special_tokens",
    "structured_outputs",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "extra_args",
    "logprob_token_ids",
    "skip_reading_prefix_cache",
    "thinking_token_budget",
    "repetition_detection",
)


class RequestOutputKind(enum.Enum):
    """What a streamed RequestOutput holds; `LLM.generate` returns whole outputs whatever it is."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # what is new since the last one
    FINAL_ONLY = 2  # one output, at the end


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request; names and defaults as users of vLLM know them.

    n: sequences sampled from the prompt, 1 to 128.
    temperature: at least 0; below 1e-5 the most likely token is taken. top_p in (0, 1]; top_k 0 or
    -1 keeps all; min_p in [0, 1] is relative to the most likely token.
    seed: the same seed gives the same tokens whatever else runs; None takes one from the LLM's.
    stop: a string or several that end the text, left out of it unless include_stop_str_in_output.
    stop_token_ids: ids that end it besides the model's own; ignore_eos: the model's own do not.
    max_tokens: None runs to the end of the context. min_tokens: nothing ends before.
    logprobs: report the sampled token's log-probability and those of so many most likely tokens,
    natural logarithms of the raw distribution.
    detokenize=False leaves the text empty; skip_special_tokens leaves special tokens out of it.

    The penalties, biases and the other fields of later releases are refused by name unless at their
    default. Raises InvalidArgument that names the field and the value, or NotSupported.

    >>> SamplingParams(temperature=0.8, top_p=0.95, max_tokens=64, stop="\\n").stop
    ('\\n',)
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: object | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    extra_args: Mapping[str, object] | None = None
    logprob_token_ids: Sequence[int] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: object | None = None

    def __new__(cls, *args: object, **kwargs: object) -> "SamplingParams":
        """Refuses unknown names with a hint before the generated __init__ sees them."""
        refuse_unknown("SamplingParams", kwargs, cls.__slots__)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        defaults = {field.name: field.default for field in fields(self)}
        for name in _NOT_YET_SUPPORTED:
            refuse_unless_default("SamplingParams", name, getattr(self, name), defaults[name])
        self._set("n", integer("n", self.n, 1, 128))
        for name in ("temperature", "top_p", "min_p"):
            self._set(name, number(name, getattr(self, name)))
        self._set("top_k", integer("top_k", self.top_k, -1))
        seed = optional_integer("seed", self.seed, -1, 2**64 - 1)
        self._set("seed", None if seed == -1 else seed)
        self._set("stop", _strings("stop", self.stop))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        self._set("max_tokens", optional_integer("max_tokens", self.max_tokens, 1))
        self._set("min_tokens", integer("min_tokens", self.min_tokens, 0))
        self._set("logprobs", _num_logprobs(self.logprobs))
        for name in (
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "include_stop_str_in_output",
        ):
            boolean(name, getattr(self, name))
        if not isinstance(self.output_kind, RequestOutputKind):
            raise InvalidArgument(
                f"output_kind must be a RequestOutputKind, got {describe(self.output_kind)}"
            )
        self.to_core().validate()

    def to_core(self, max_tokens: int = 2**31 - 1) -> _core.SamplingParams:
        """The engine's struct; `max_tokens` stands in where the field is None."""
        params = _core.SamplingParams()
        params.n = self.n
        params.temperature = self.temperature
        params.top_p = self.top_p
        params.top_k = self.top_k
        params.min_p = self.min_p
        params.seed = self.seed
        params.stop = list(self.stop or ())
        params.stop_token_ids = list(self.stop_token_ids or ())
        params.ignore_eos = self.ignore_eos
        params.max_tokens = max_tokens if self.max_tokens is None else self.max_tokens
        params.min_tokens = self.min_tokens
        params.logprobs = self.logprobs
        params.detokenize = self.detokenize
        params.skip_special_tokens = self.skip_special_tokens
        params.include_stop_str_in_output = self.include_stop_str_in_output
        return params

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def _strings(name: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Iterable):
        raise InvalidArgument(f"{name} must be a string or a list of them, got {describe(value)}")
    return tuple(text(f"{name}[{idx}]", item) for idx, item in enumerate(value))


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise InvalidArgument(f"{name} must be a list of token ids, got {describe(value)}")
    return tuple(integer(f"{name}[{idx}]", item, 0) for idx, item in enumerate(value))


def _num_logprobs(value: object) -> int | None:
    if value is True:  # as vLLM reads it
        return 1
    count = optional_integer("logprobs", value, -1)
    if count == -1:
        raise NotSupported(
            "SamplingParams: logprobs=-1 (the whole vocabulary) is not supported yet; "
            "ask for a number of most likely tokens"
        )
    return count
