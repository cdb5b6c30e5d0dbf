"""How the tokens of one request are chosen and when it ends."""

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, field, fields, replace
from functools import partial
from operator import attrgetter
from typing import Any

from llmserve import _core
from llmserve.beam_search_params import BeamSearchParams as BeamSearchParams  # as vLLM has it
from llmserve.common import sampling_checks as checks
from llmserve.common.arguments import (
    boolean,
    integer,
    number,
    optional_integer,
    refuse_unknown,
    truncation,
)
from llmserve.common.init_signature import InitSignature
from llmserve.common.sampling_checks import PythonLogitsProcessor as PythonLogitsProcessor
from llmserve.common.sampling_fields import FIELD, SamplingField, apart, same
from llmserve.errors import InvalidArgument, NotSupported
from llmserve.structured_outputs import GuidedDecodingParams as GuidedDecodingParams
from llmserve.structured_outputs import StructuredOutputsParams as StructuredOutputsParams


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


class _Taken:
    """Beside the fields, and none of them: the last copy that `checked` made."""

    __slots__ = ("_taken",)
    _taken: "SamplingParams | None"


@dataclass(slots=True, unsafe_hash=True)
class SamplingParams(_Taken):
    """Sampling parameters of one request; names and defaults as users of vLLM know them.

    n: sequences sampled from the prompt, 1 to 128.
    temperature: at least 0; below 1e-5 the most likely token is taken. top_p in (0, 1]; top_k 0 or
    -1 keeps all; min_p in [0, 1] is relative to the most likely token. top_n_sigma, at least
    0, keeps tokens whose logit is so many standard deviations of all below the largest; 0 all.
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

    extra_args: what classes of LLM(logits_processors) read; without such classes requests with any
    are refused.

    best_of: so many sequences run, n to 128, and the n with the largest cumulative_logprob come
    out, the best first; not in deltas. use_beam_search and guided_decoding are older names of
    vLLM's: guided_decoding is structured_outputs, use_beam_search is refused with what to use.

    Fields may be assigned; a request takes the values that they have when it comes in, and those
    are checked then. Raises InvalidArgument that names the field and the value, or NotSupported.

    >>> SamplingParams(temperature=0.8, top_p=0.95, max_tokens=64, stop="\\n").stop
    ('\\n',)
    """

    n: int = field(default=1, metadata=same(partial(integer, minimum=1, maximum=128)))
    presence_penalty: float = field(default=0.0, metadata=same(number, float))
    frequency_penalty: float = field(default=0.0, metadata=same(number, float))
    repetition_penalty: float = field(default=1.0, metadata=same(number, float))
    temperature: float = field(
        default=1.0,
        metadata=same(number, float, "0 takes the most likely token; higher is more varied"),
    )
    top_p: float = field(
        default=1.0,
        metadata=same(
            number, float, "keep the most likely tokens up to this share of the probability"
        ),
    )
    top_k: int = field(
        default=0,
        metadata=same(
            partial(integer, minimum=-1), int, "keep this many most likely tokens; 0 keeps all"
        ),
    )
    min_p: float = field(
        default=0.0,
        metadata=same(
            number, float, "drop tokens less likely than this share of the most likely one"
        ),
    )
    seed: int | None = field(
        default=None, metadata=same(checks.seed, int, "makes the run repeatable")
    )
    stop: str | Sequence[str] | None = field(default=None, metadata=same(checks.strings))
    stop_token_ids: Sequence[int] | None = field(default=None, metadata=same(checks.token_ids))
    ignore_eos: bool = field(default=False, metadata=same(boolean, bool))
    max_tokens: int | None = field(default=16, metadata=apart(partial(optional_integer, minimum=1)))
    min_tokens: int = field(default=0, metadata=same(partial(integer, minimum=0)))
    logprobs: int | None = field(default=None, metadata=same(checks.num_logprobs))
    prompt_logprobs: int | None = field(default=None, metadata=same(checks.num_logprobs))
    detokenize: bool = field(default=True, metadata=same(boolean))
    skip_special_tokens: bool = field(default=True, metadata=same(boolean))
    spaces_between_special_tokens: bool = field(default=True, metadata=same(boolean, bool))
    include_stop_str_in_output: bool = field(default=False, metadata=same(boolean, bool))
    output_kind: RequestOutputKind = field(
        default=RequestOutputKind.CUMULATIVE, metadata=apart(checks.of_kind(RequestOutputKind))
    )
    structured_outputs: StructuredOutputsParams | None = field(
        default=None, metadata=apart(checks.of_kind(StructuredOutputsParams))
    )
    logit_bias: Mapping[int, float] | None = field(
        default=None, hash=False, metadata=apart(checks.logit_bias)
    )
    allowed_token_ids: Sequence[int] | None = field(default=None, metadata=same(checks.token_ids))
    bad_words: Sequence[str] | None = field(default=None, metadata=apart(checks.bad_words))
    extra_args: Mapping[str, object] | None = field(
        default=None, hash=False, metadata=apart(checks.extra_args)
    )
    logprob_token_ids: Sequence[int] | None = field(default=None, metadata=apart(checks.token_ids))
    skip_reading_prefix_cache: bool | None = field(default=None, metadata=apart(boolean, bool))
    thinking_token_budget: int | None = field(
        default=None, metadata=apart(checks.none_if_minus_1, int)
    )
    repetition_detection: RepetitionDetectionParams | None = field(
        default=None, metadata=apart(checks.of_kind(RepetitionDetectionParams))
    )
    logits_processors: Sequence[PythonLogitsProcessor] | None = field(
        default=None, metadata=apart(checks.callables)
    )
    truncate_prompt_tokens: int | None = field(default=None, metadata=apart(truncation))
    top_n_sigma: float = field(
        default=0.0,
        metadata=same(
            number, float, "keep tokens whose logit is so many standard deviations from the best"
        ),
    )

    best_of: int | None = field(
        default=None, metadata=apart(partial(optional_integer, minimum=1, maximum=128))
    )

    # Of older versions of vLLM.
    use_beam_search: InitVar[bool] = False
    guided_decoding: InitVar[StructuredOutputsParams | None] = None

    __signature__ = InitSignature()

    def __new__(cls, *args: object, **kwargs: object) -> "SamplingParams":
        """Refuses unknown names with a hint before the generated __init__ sees them."""
        refuse_unknown("SamplingParams", kwargs, (*cls.__slots__, *_OLDER_NAMES))
        return object.__new__(cls)

    def __post_init__(
        self,
        use_beam_search: bool,
        guided_decoding: StructuredOutputsParams | None,
    ) -> None:
        if guided_decoding is not None:
            if self.structured_outputs is not None:
                raise InvalidArgument("guided_decoding is structured_outputs; give one")
            self.structured_outputs = guided_decoding
        self._taken = None  # type: ignore[misc]  # the base has the slot
        self._check()
        self.to_core().validate()
        if use_beam_search:
            raise NotSupported(
                "SamplingParams: use_beam_search=True is not supported; use LLM.beam_search("
                "prompts, BeamSearchParams(beam_width=..., max_tokens=...))"
            )

    @classmethod
    def from_optional(cls, **fields: Any) -> "SamplingParams":
        """As the constructor; what is None is left at its default.

        >>> SamplingParams.from_optional(n=None, top_p=0.5).n
        1
        """
        return cls(**{name: value for name, value in fields.items() if value is not None})

    def _check(self) -> None:
        """Each field by itself, and brought to the form in which it is kept."""
        for name, value in self._given(SAMPLING_FIELDS):
            setattr(self, name, SAMPLING_FIELDS[name].check(name, value))
        self._check_best_of()

    def _check_best_of(self) -> None:
        if self.best_of is None:
            return
        if self.best_of < self.n:
            raise InvalidArgument(f"best_of must be at least n={self.n}, got {self.best_of}")
        if self.best_of == self.n:
            self.best_of = None
        elif self.output_kind is RequestOutputKind.DELTA:
            raise InvalidArgument(
                f"best_of={self.best_of}: which are the best is known at the end, and none can be "
                f"had in deltas; take output_kind FINAL_ONLY, or leave best_of out"
            )

    def of_the_run(self) -> "SamplingParams":
        """What runs for these: all of best_of, with the log-probabilities that rank them."""
        if self.best_of is None:
            return self
        logprobs = 0 if self.logprobs is None else self.logprobs
        return self.clone(n=self.best_of, best_of=None, logprobs=logprobs)

    def checked(self) -> "SamplingParams":
        """A copy for one request or several, whatever is assigned to this one later. What is wrong
        between fields is said by the engine's own check. Raises InvalidArgument, NotSupported."""
        values = _VALUES(self)
        with suppress(ValueError):  # an array, which is not simply equal or not
            if self._taken is not None and _VALUES(self._taken) == values:
                return self._taken  # most are used again as they are
        copy: SamplingParams = object.__new__(type(self))
        for name, value, plain in zip(_NAMES, values, _PLAIN_VALUES, strict=True):
            setattr(
                copy, name, value if value is plain else SAMPLING_FIELDS[name].check(name, value)
            )
        copy._check_best_of()
        copy._taken = None  # type: ignore[misc]
        self._taken = copy  # type: ignore[misc]
        return copy

    def clone(self, **changes: Any) -> "SamplingParams":
        """Parameters like these but for what is given.

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
        if self.best_of is not None:
            params.n = self.best_of
            params.logprobs = 0 if self.logprobs is None else self.logprobs
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


_OLDER_NAMES = ("use_beam_search", "guided_decoding")

# What is known of each, by name.
SAMPLING_FIELDS: Mapping[str, SamplingField] = {
    item.name: item.metadata[FIELD] for item in fields(SamplingParams)
}
_NAMES = tuple(SAMPLING_FIELDS)
_VALUES = attrgetter(*_NAMES)
_SAME_IN_CORE = tuple(name for name, known in SAMPLING_FIELDS.items() if known.is_same_in_core)
# What a field is without an argument, as its check leaves it.
_PLAIN: Mapping[str, object] = {
    **{item.name: item.default for item in fields(SamplingParams)},
    "stop": (),
    "stop_token_ids": (),
}
_PLAIN_VALUES = tuple(_PLAIN[name] for name in _NAMES)
