"""How the tokens of one request are chosen and when it ends."""

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

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
from llmserve.beam_search_params import BeamSearchParams as BeamSearchParams  # as vLLM has it
from llmserve.errors import InvalidArgument
from llmserve.structured_outputs import StructuredOutputsParams

# Fields that are accepted at their default, None, and refused otherwise. extra_args for good: it is
# for plugins, of which llmserve has none, and what nobody reads is better refused.
_NOT_YET_SUPPORTED = ("extra_args",)

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
    "allowed_token_ids",
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
    seed: the same seed gives the same tokens whatever else runs; None takes one from the LLM's.
    stop: a string or several that end the text, left out of it unless include_stop_str_in_output.
    stop_token_ids: ids that end it besides the model's own; ignore_eos: the model's own do not.
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
    tokenizer has any. skip_reading_prefix_cache computes the whole prompt.
    logits_processors, slow: for every token each is called with the tokens so far (int32 [T],
    prompt and output) and the logits (float32 [V]), NumPy arrays that torch.from_dlpack takes
    without a copy, before biases, masks and penalties; it changes the logits in place or returns
    others. It runs in a Python thread that the engine waits for; what it raises ends the request
    with finish_reason "error".

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

    def __new__(cls, *args: object, **kwargs: object) -> "SamplingParams":
        """Refuses unknown names with a hint before the generated __init__ sees them."""
        refuse_unknown("SamplingParams", kwargs, cls.__slots__)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name in _NOT_YET_SUPPORTED:
            refuse_unless_default("SamplingParams", name, getattr(self, name), None)
        self._set("n", integer("n", self.n, 1, 128))
        for name in _NUMBERS:
            self._set(name, number(name, getattr(self, name)))
        self._set("top_k", integer("top_k", self.top_k, -1))
        seed = optional_integer("seed", self.seed, -1, 2**64 - 1)
        self._set("seed", None if seed == -1 else seed)
        self._set("stop", _strings("stop", self.stop))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        self._set("max_tokens", optional_integer("max_tokens", self.max_tokens, 1))
        self._set("min_tokens", integer("min_tokens", self.min_tokens, 0))
        logprobs = 1 if self.logprobs is True else self.logprobs  # as vLLM reads it
        self._set("logprobs", optional_integer("logprobs", logprobs, -1))
        prompt_logprobs = 1 if self.prompt_logprobs is True else self.prompt_logprobs
        self._set("prompt_logprobs", optional_integer("prompt_logprobs", prompt_logprobs, -1))
        for name in _BOOLEANS:
            boolean(name, getattr(self, name))
        self._check_draw()
        self._check_objects()
        self.to_core().validate()

    def _check_draw(self) -> None:
        """What changes the draw, or is reported of it; None stays where it asks for nothing."""
        self._set("logit_bias", _logit_bias(self.logit_bias))
        for name in ("allowed_token_ids", "logprob_token_ids"):
            value = getattr(self, name)
            self._set(name, None if value is None else _token_ids(name, value))
        self._set("bad_words", _strings("bad_words", self.bad_words) or None)
        if self.bad_words and not all(word.strip() for word in self.bad_words):
            raise InvalidArgument("bad_words must not contain an empty string")
        budget = optional_integer("thinking_token_budget", self.thinking_token_budget, -1)
        self._set("thinking_token_budget", None if budget == -1 else budget)
        self._set("logits_processors", _callables("logits_processors", self.logits_processors))

    def _check_objects(self) -> None:
        if self.skip_reading_prefix_cache is not None:
            boolean("skip_reading_prefix_cache", self.skip_reading_prefix_cache)
        _check_kind("output_kind", self.output_kind, RequestOutputKind)
        if self.repetition_detection is not None:
            _check_kind(
                "repetition_detection", self.repetition_detection, RepetitionDetectionParams
            )
        if self.structured_outputs is not None:
            _check_kind("structured_outputs", self.structured_outputs, StructuredOutputsParams)

    def to_core(self, max_tokens: int = 2**31 - 1) -> _core.SamplingParams:
        """The engine's struct; `max_tokens` stands in where the field is None. What takes a
        tokenizer is the door's to fill in: bad_words, thinking_budget and grammar."""
        params = _core.SamplingParams()
        for name in _SAME_IN_CORE:
            setattr(params, name, getattr(self, name))
        params.max_tokens = max_tokens if self.max_tokens is None else self.max_tokens
        params.logit_bias = list((self.logit_bias or {}).items())
        params.logprob_token_ids = list(self.logprob_token_ids or ())
        params.skip_reading_prefix_cache = bool(self.skip_reading_prefix_cache)
        detection = self.repetition_detection
        if detection is not None and detection.max_pattern_size > 0:
            params.repetition_detection = detection.to_core()
        params.prompt_logprobs = self.prompt_logprobs
        return params

    @property
    def has_logprobs(self) -> bool:
        """Whether any are reported."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

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


def _logit_bias(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"logit_bias must map token ids to numbers, got {describe(value)}")
    # Keys of JSON are strings.
    ids = [int(k) if isinstance(k, str) and k.isdecimal() else k for k in value]
    return {
        integer("logit_bias: token id", token_id, 0): number(f"logit_bias[{token_id}]", bias)
        for token_id, bias in zip(ids, value.values(), strict=True)
    }


def _check_kind(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise InvalidArgument(f"{name} must be a {kind.__name__}, got {describe(value)}")


def _callables(name: str, value: object) -> tuple[PythonLogitsProcessor, ...] | None:
    if value is None:
        return None
    if not isinstance(value, Iterable) or isinstance(value, str):
        raise InvalidArgument(f"{name} must be a list of functions, got {describe(value)}")
    functions = tuple(value)
    for idx, function in enumerate(functions):
        if not callable(function):
            raise InvalidArgument(f"{name}[{idx}] must be a function, got {describe(function)}")
    return functions or None
