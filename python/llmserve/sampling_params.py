"""How the tokens of one request are chosen and when it ends."""

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from llmserve import _core
from llmserve.beam_search_params import BeamSearchParams as BeamSearchParams  # as vLLM has it
from llmserve.common.arguments import (
    boolean,
    describe,
    integer,
    number,
    optional_integer,
    refuse_unknown,
    refuse_unless_default,
    truncation,
    unicode_text,
)
from llmserve.errors import InvalidArgument
from llmserve.structured_outputs import StructuredOutputsParams

# fn(token_ids int32 [T], logits float32 [V]) -> None or an array [V]
PythonLogitsProcessor = Callable[..., object]


class RequestOutputKind(enum.Enum):
    """What a streamed RequestOutput holds; `LLM.generate` returns whole outputs whatever it is."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # what is new since the last one
    FINAL_ONLY = 2  # one output, at the end


@dataclass(frozen=True, slots=True)
class RepetitionDetectionParams:
    """Ends an output that repeats itself: finish_reason "stop", stop_reason "repetition_detected".

    It ends once its last tokens are a pattern of min_pattern_size to max_pattern_size tokens that
    stands there min_count times in a row. max_pattern_size: at most 1024, 0 detects nothing;
    min_pattern_size: 0 is 1; min_count: at least 2. Raises InvalidArgument.

    >>> RepetitionDetectionParams(max_pattern_size=20, min_count=4).min_pattern_size
    0
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = integer(f"repetition_detection: {name}", getattr(self, name), 0)
            object.__setattr__(self, name, value)
        if self.max_pattern_size > 0:
            self.to_core().validate()

    def to_core(self) -> _core.RepetitionDetection:
        """The engine's struct."""
        detection = _core.RepetitionDetection()
        detection.max_pattern_size = self.max_pattern_size
        detection.min_pattern_size = self.min_pattern_size
        detection.min_count = self.min_count
        return detection


_NUMBERS = (
    *("temperature", "top_p", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
_BOOLEANS = (
    *("ignore_eos", "detokenize", "skip_special_tokens"),
    *("spaces_between_special_tokens", "include_stop_str_in_output"),
)
_SAME_IN_CORE = (
    *_NUMBERS,
    *_BOOLEANS,
    *("n", "top_k", "seed", "stop", "stop_token_ids", "min_tokens", "logprobs"),
    *("prompt_logprobs", "allowed_token_ids"),
)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request; names and defaults as users of vLLM know them.

    n: sequences sampled from the prompt, 1 to 128.
    temperature: at least 0; below 1e-5 the most likely token is taken. top_p in (0, 1]; top_k 0 or
    -1 keeps all; min_p in [0, 1] is relative to the most likely token.
    repetition_penalty: more than 0; tokens of prompt and output have positive logits divided and
    others multiplied by it. frequency_penalty and presence_penalty, -2 to 2: taken off a token's
    logit for each time, and once, that it is in the output.
    logit_bias: token id to what is added to its logit, -100 to 100. allowed_token_ids: no others
    are drawn. bad_words: strings whose tokens, with and without a space before them, are not drawn
    one after another.
    seed: the same seed gives the same tokens whatever else runs; -2^63 to 2^64 - 1, modulo 2^64.
    None and -1 take one from the LLM's.
    stop: a string or several that end the text, left out of it unless include_stop_str_in_output.
    stop_token_ids: ids that end it besides the model's own, which are those of its configs and the
    tokenizer's eos_token; ignore_eos: the model's own do not.
    max_tokens: None runs to the end of the context. min_tokens: nothing ends before.
    repetition_detection: RepetitionDetectionParams. thinking_token_budget: once a section of
    thinking is open, in the prompt or the output, so many tokens are drawn in it at most and then
    its end; what opens and ends it says LLM(reasoning_config), or the tokenizer's own <think>.
    logprobs: report the sampled token's log-probability and those of so many most likely tokens (-1
    for all), natural logarithms of the raw distribution: before any of the above.
    prompt_logprobs: the same for the prompt's tokens; the prefix cache is not read then.
    logprob_token_ids: report those of these tokens, too; at most 128.
    detokenize=False leaves the text empty; skip_special_tokens leaves special tokens out of it;
    spaces_between_special_tokens=False drops the space before one that follows another, where the
    tokenizer has any. skip_reading_prefix_cache computes the whole prompt. truncate_prompt_tokens:
    so many of the prompt's last tokens alone; -1 as many as fit beside one new token.
    logits_processors, slow: for every token each is called with the tokens so far (int32 [T],
    prompt and output) and the logits (float32 [V]), NumPy arrays that torch.from_dlpack takes
    without a copy, before biases, masks and penalties; it changes the logits in place or returns
    others. It runs in a Python thread that the engine waits for, so that it cannot generate with
    its own LLM; what it raises ends the request with finish_reason "error".

    structured_outputs: StructuredOutputsParams, what the text must match. Its end is the grammar's:
    min_tokens and ignore_eos do not lengthen a text that is complete, and max_tokens, stop strings
    and stop_token_ids cut it off.

    extra_args is refused by name unless None. Raises InvalidArgument that names the field and the
    value, or NotSupported.

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
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    extra_args: Mapping[str, object] | None = None
    logprob_token_ids: Sequence[int] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    logits_processors: Sequence[PythonLogitsProcessor] | None = None
    truncate_prompt_tokens: int | None = None

    def __new__(cls, *args: object, **kwargs: object) -> "SamplingParams":
        """Refuses unknown names with a hint before the generated __init__ sees them."""
        refuse_unknown("SamplingParams", kwargs, cls.__slots__)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name, value in self._given(_CHECKS):
            object.__setattr__(self, name, _CHECKS[name](name, value))
        self.to_core().validate()

    def clone(self, **changes: Any) -> "SamplingParams":
        """Parameters like these but for what is given: they are values, which are not changed.

        >>> SamplingParams(temperature=0.8).clone(max_tokens=100).max_tokens
        100
        """
        return replace(self, **changes)

    def to_core(self, max_tokens: int = 2**31 - 1) -> _core.SamplingParams:
        """The engine's struct; `max_tokens` stands in where the field is None. What takes a
        tokenizer is filled in at admission: bad_words, thinking_budget and grammar."""
        params = _core.SamplingParams()
        for name, value in self._given(_SAME_IN_CORE):
            setattr(params, name, value)
        params.max_tokens = max_tokens if self.max_tokens is None else self.max_tokens
        if self.logit_bias:
            params.logit_bias = list(self.logit_bias.items())
        if self.logprob_token_ids:
            params.logprob_token_ids = list(self.logprob_token_ids)
        if self.skip_reading_prefix_cache:
            params.skip_reading_prefix_cache = True
        detection = self.repetition_detection
        if detection is not None and detection.max_pattern_size > 0:
            params.repetition_detection = detection.to_core()
        return params

    @property
    def has_logprobs(self) -> bool:
        """Whether any are reported."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

    def _given(self, names: Iterable[str]) -> Iterator[tuple[str, object]]:
        """Those of these fields, with their values, that are not as they are without an argument,
        here and in the engine. Most fields of most requests are, and need no check."""
        for name in names:
            value, plain = getattr(self, name), _PLAIN[name]
            if type(value) is not type(plain) or value != plain:
                yield name, value


def _none_if_minus_1(name: str, value: object) -> int | None:
    result = optional_integer(name, value, -1)
    return None if result == -1 else result


def _seed(name: str, value: object) -> int | None:
    """Negative ones are what they are in 64 bits without a sign; but -1 is none, as in vLLM."""
    result = integer(name, value, -(2**63), 2**64 - 1)
    return None if result == -1 else result % 2**64


def _num_logprobs(name: str, value: object) -> int | None:
    return optional_integer(name, 1 if value is True else value, -1)  # as vLLM reads it


def _bad_words(name: str, value: object) -> tuple[str, ...] | None:
    words = _strings(name, value)
    if not all(word.strip() for word in words):
        raise InvalidArgument("bad_words must not contain an empty string")
    return words or None


def _strings(name: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (unicode_text(name, value),)
    if not isinstance(value, Iterable):
        raise InvalidArgument(f"{name} must be a string or a list of them, got {describe(value)}")
    return tuple(unicode_text(f"{name}[{idx}]", item) for idx, item in enumerate(value))


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise InvalidArgument(f"{name} must be a list of token ids, got {describe(value)}")
    return tuple(integer(f"{name}[{idx}]", item, 0) for idx, item in enumerate(value))


def _logit_bias(_name: str, value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"logit_bias must map token ids to numbers, got {describe(value)}")
    # Keys of JSON are strings.
    ids = [int(k) if isinstance(k, str) and k.isdecimal() else k for k in value]
    return {
        integer("logit_bias: token id", token_id, 0): number(f"logit_bias[{token_id}]", bias)
        for token_id, bias in zip(ids, value.values(), strict=True)
    }


def _of_kind(name: str, value: object, kind: type) -> object:
    if not isinstance(value, kind):
        raise InvalidArgument(f"{name} must be a {kind.__name__}, got {describe(value)}")
    return value


def _callables(name: str, value: object) -> tuple[PythonLogitsProcessor, ...] | None:
    if not isinstance(value, Iterable) or isinstance(value, str):
        raise InvalidArgument(f"{name} must be a list of functions, got {describe(value)}")
    functions = tuple(value)
    for idx, function in enumerate(functions):
        if not callable(function):
            raise InvalidArgument(f"{name}[{idx}] must be a function, got {describe(function)}")
    return functions or None


def _refused(name: str, value: object) -> None:
    """For good: extra_args is for plugins, of which llmserve has none, and what nobody reads is
    better refused."""
    refuse_unless_default("SamplingParams", name, value, None)


# Every field's check, which gives the value as it is kept. Raises InvalidArgument, NotSupported.
_CHECKS: Mapping[str, Callable[[str, object], object]] = {
    "extra_args": _refused,
    "n": partial(integer, minimum=1, maximum=128),
    **dict.fromkeys(_NUMBERS, number),
    "top_k": partial(integer, minimum=-1),
    "seed": _seed,
    "stop": _strings,
    "stop_token_ids": _token_ids,
    "max_tokens": partial(optional_integer, minimum=1),
    "min_tokens": partial(integer, minimum=0),
    "logprobs": _num_logprobs,
    "prompt_logprobs": _num_logprobs,
    **dict.fromkeys(_BOOLEANS, boolean),
    "logit_bias": _logit_bias,
    "allowed_token_ids": _token_ids,
    "logprob_token_ids": _token_ids,
    "bad_words": _bad_words,
    "thinking_token_budget": _none_if_minus_1,
    "logits_processors": _callables,
    "truncate_prompt_tokens": truncation,
    "skip_reading_prefix_cache": boolean,
    "output_kind": partial(_of_kind, kind=RequestOutputKind),
    "repetition_detection": partial(_of_kind, kind=RepetitionDetectionParams),
    "structured_outputs": partial(_of_kind, kind=StructuredOutputsParams),
}
# What a field is without an argument, as its check leaves it.
_PLAIN: Mapping[str, object] = {
    **{field.name: field.default for field in fields(SamplingParams)},
    "stop": (),
    "stop_token_ids": (),
}
