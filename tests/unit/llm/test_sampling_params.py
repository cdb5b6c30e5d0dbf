"""Every field is checked when the parameters are made, and the message names it."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from typing import Any

import numpy as np
import pytest
from llmserve import (
    LLM,
    BeamSearchParams,
    InvalidArgument,
    NotSupported,
    PoolingParams,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    _core,
)
from llmserve.sampling_params import GuidedDecodingParams

# vLLM's own, in its order (docs of vLLM 0.33).
DEFAULTS = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "stop": (),
    "stop_token_ids": (),
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "detokenize": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "output_kind": RequestOutputKind.CUMULATIVE,
    "structured_outputs": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": None,
    "extra_args": None,
    "logprob_token_ids": None,
    "skip_reading_prefix_cache": None,
    "thinking_token_budget": None,
    "repetition_detection": None,
}
# llmserve's own, after them.
OWN = {
    "logits_processors": None,
    "truncate_prompt_tokens": None,
    "top_n_sigma": 0.0,
    "best_of": None,
}


def test_names_order_and_defaults_are_those_of_the_field() -> None:
    assert dataclasses.asdict(SamplingParams()) == {**DEFAULTS, **OWN}
    assert [field.name for field in dataclasses.fields(SamplingParams)] == [*DEFAULTS, *OWN]


REFUSED = [
    ({"best_of": 1, "n": 2}, "best_of must be at least n=2, got 1"),
    ({"best_of": 129}, "best_of must be"),
    ({"best_of": 2, "output_kind": RequestOutputKind.DELTA}, "best_of=2: which are the best is"),
    ({"n": 0}, "n must be between 1 and 128, got 0"),
    ({"n": 10**18}, "n must be between 1 and 128, got 1000000000000000000"),
    ({"n": True}, "n must be an integer, got True"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be at least 1, or -1"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens must be between -1 and"),
    ({"n": 1.0}, "n must be an integer, got 1.0"),
    ({"temperature": -0.5}, "temperature must be finite and at least 0, got -0.5"),
    ({"temperature": float("nan")}, "temperature must be finite, got nan"),
    ({"temperature": 10**400}, "temperature must be finite, got 1000"),
    ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
    ({"top_p": 0}, r"top_p must be in \(0, 1\], got 0"),
    ({"top_p": 1.5}, r"top_p must be in \(0, 1\], got 1.5"),
    ({"top_k": -2}, "top_k must be between -1 and 2147483647, got -2"),
    ({"min_p": 1.01}, r"min_p must be in \[0, 1\], got 1.01"),
    ({"top_n_sigma": -1}, "top_n_sigma must be finite and at least 0, got -1"),
    ({"seed": -(2**63) - 1}, "seed must be between -9223372036854775808 and 184.*15, got -922"),
    ({"seed": 2**64}, "seed must be between -9223372036854775808 and 18446744073709551615, got 1"),
    ({"stop": ["a", 3]}, r"stop\[1\] must be a string, got 3"),
    ({"stop": [""]}, "stop must not contain an empty string"),
    ({"stop": "\ud800"}, "stop has a lone surrogate, which is not Unicode"),
    ({"stop": ["a", "\udcff"]}, r"stop\[1\] has a lone surrogate, which is not Unicode"),
    ({"stop": 3}, "stop must be a string or a list of them, got 3"),
    ({"stop_token_ids": [1, -1]}, r"stop_token_ids\[1\] must be between 0 and 2147483647, got -1"),
    ({"stop_token_ids": "12"}, "stop_token_ids must be a list of token ids, got '12'"),
    ({"max_tokens": 0}, "max_tokens must be between 1 and 2147483647, got 0"),
    ({"min_tokens": 17}, "min_tokens must not exceed max_tokens=16, got 17"),
    ({"logprobs": -2}, "logprobs must be between -1 and 2147483647, got -2"),
    ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1"),
    ({"stop": "x", "detokenize": False}, "stop strings need detokenize=True"),
    ({"presence_penalty": 2.5}, "presence_penalty must be between -2 and 2, got 2.5"),
    ({"frequency_penalty": -3}, "frequency_penalty must be between -2 and 2, got -3"),
    ({"frequency_penalty": "x"}, "frequency_penalty must be a number, got 'x'"),
    ({"repetition_penalty": 0}, "repetition_penalty must be finite and more than 0, got 0"),
    ({"logit_bias": {5: 101}}, "logit_bias must be between -100 and 100, got 101 for token 5"),
    ({"logit_bias": {5: float("nan")}}, r"logit_bias\[5\] must be finite, got nan"),
    ({"logit_bias": {"a": 1}}, "logit_bias: token id must be an integer, got 'a'"),
    ({"logit_bias": [1]}, r"logit_bias must map token ids to numbers, got \[1\]"),
    ({"allowed_token_ids": []}, "allowed_token_ids must name at least one token"),
    ({"allowed_token_ids": [-1]}, r"allowed_token_ids\[0\] must be between 0 and"),
    (
        {"allowed_token_ids": [3], "stop_token_ids": [3], "min_tokens": 1},
        "allowed_token_ids holds nothing but stop_token_ids, which min_tokens=1 rules out",
    ),
    ({"bad_words": [" "]}, "bad_words must not contain an empty string"),
    ({"bad_words": ["\ud800"]}, r"bad_words\[0\] has a lone surrogate, which is not Unicode"),
    ({"bad_words": [3]}, r"bad_words\[0\] must be a string, got 3"),
    (
        {"logprob_token_ids": list(range(129))},
        "logprob_token_ids must be at most 128 tokens, got 129",
    ),
    ({"thinking_token_budget": -2}, "thinking_token_budget must be between -1 and"),
    ({"skip_reading_prefix_cache": 1}, "skip_reading_prefix_cache must be True or False, got 1"),
    ({"repetition_detection": {"max": 1}}, "repetition_detection must be a RepetitionDetectionP"),
    ({"logits_processors": [3]}, r"logits_processors\[0\] must be a function, got 3"),
    ({"logits_processors": print}, "logits_processors must be a list of functions, got <built-in"),
    ({"output_kind": None}, "output_kind must be a RequestOutputKind, got None"),
    ({"output_kind": "DELTA"}, "output_kind must be a RequestOutputKind, got 'DELTA'"),
    ({"temprature": 0.5}, "SamplingParams has no argument 'temprature'; did you mean 'temp"),
    ({"zzz": 1}, "SamplingParams has no argument 'zzz'; it takes n, presence_penalty"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_a_bad_value_is_refused_with_field_rule_and_value(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=f"^{message}"):
        SamplingParams(**fields)  # type: ignore[arg-type]


NOT_HERE = [
    ({"use_beam_search": True}, "use_beam_search=True is not supported; use LLM.beam_search"),
]


@pytest.mark.parametrize(("fields", "message"), NOT_HERE)
def test_an_older_name_of_vllms_is_refused_with_what_to_use(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(NotSupported, match=f"^SamplingParams: {message}"):
        SamplingParams(**fields)  # type: ignore[arg-type]


def test_an_older_name_of_vllms_is_taken_where_it_asks_for_nothing_else() -> None:
    guided = GuidedDecodingParams(choice=["a", "b"], backend="xgrammar")
    params = SamplingParams(n=2, best_of=2, use_beam_search=False, guided_decoding=guided)
    assert params.structured_outputs == guided
    assert dataclasses.replace(params, n=1).structured_outputs == guided
    with pytest.raises(InvalidArgument, match="guided_decoding is structured_outputs; give one"):
        SamplingParams(guided_decoding=guided, structured_outputs=guided)
    with pytest.raises(InvalidArgument, match="GuidedDecodingParams has no argument 'regexp'"):
        GuidedDecodingParams(regexp="a")


def test_fields_are_assigned_and_checked_when_the_parameters_are_used() -> None:
    params = SamplingParams(temperature=0.5)
    params.stop, params.max_tokens = "end", 9
    taken = params.checked()
    assert (taken.stop, taken.max_tokens) == (("end",), 9)
    assert params.checked() == taken
    params.max_tokens = 3
    assert (taken.max_tokens, params.checked().max_tokens) == (9, 3)
    params.logit_bias = {5: 1.0}
    taken = params.checked()
    params.logit_bias[6] = 2.0
    assert (taken.logit_bias, params.checked().logit_bias) == ({5: 1.0}, {5: 1.0, 6: 2.0})
    params.stop_token_ids = np.array([3, 4])  # type: ignore[assignment]
    assert params.checked().stop_token_ids == params.checked().stop_token_ids == (3, 4)
    params.top_k = "many"  # type: ignore[assignment]
    with pytest.raises(InvalidArgument, match=r"^top_k must be an integer, got 'many'"):
        params.checked()
    with pytest.raises(AttributeError):
        params.max_token = 3  # type: ignore[attr-defined]


PARAMETERS = [SamplingParams, StructuredOutputsParams, PoolingParams, BeamSearchParams]


@pytest.mark.parametrize("kind", PARAMETERS)
def test_help_shows_the_fields_with_their_defaults(kind: type) -> None:
    parameters = inspect.signature(kind).parameters
    for field in dataclasses.fields(kind):
        assert parameters[field.name].default in (field.default, inspect.Parameter.empty)


REFUSED_DETECTIONS = [
    ((1025, 1, 2), "max_pattern_size must be between 1 and 1024, got 1025"),
    ((3, 4, 2), "min_pattern_size must be between 0 and max_pattern_size=3, got 4"),
    ((3, 1, 1), "min_count must be at least 2, got 1"),
    ((-1, 0, 0), "max_pattern_size must be between 0 and"),
    ((3.0, 0, 2), "max_pattern_size must be an integer, got 3.0"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED_DETECTIONS)
def test_a_repetition_that_cannot_be_looked_for_is_refused(
    fields: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=f"^repetition_detection: {message}"):
        RepetitionDetectionParams(*fields)


def test_values_are_brought_to_one_form() -> None:
    params = SamplingParams(
        stop="x", stop_token_ids=np.array([3, 4]), n=np.int64(2), seed=-1, logprobs=True
    )
    assert params.stop == ("x",)
    assert params.stop_token_ids == (3, 4)
    assert type(params.n) is int
    assert params.seed is None
    assert SamplingParams(seed=-2) == SamplingParams(seed=2**64 - 2)
    assert SamplingParams(seed=-(2**63)).to_core().seed == 2**63
    assert SamplingParams(seed=2**64 - 1).clone(n=2).seed == 2**64 - 1
    assert params.logprobs == 1
    assert SamplingParams(logit_bias={"7": 1}).logit_bias == {7: 1.0}
    assert SamplingParams(thinking_token_budget=-1).thinking_token_budget is None
    assert SamplingParams(bad_words=[], logits_processors=[]) == SamplingParams()


BOOLEANS: list[tuple[type[Any], str, dict[str, Any]]] = [
    *((SamplingParams, name, {}) for name in ("ignore_eos", "detokenize", "skip_special_tokens")),
    (SamplingParams, "include_stop_str_in_output", {}),
    (SamplingParams, "skip_reading_prefix_cache", {}),
    (BeamSearchParams, "ignore_eos", {"beam_width": 2, "max_tokens": 3}),
    (StructuredOutputsParams, "disable_any_whitespace", {"json": "{}"}),
    (StructuredOutputsParams, "json_object", {}),
    (PoolingParams, "normalize", {}),
]


@pytest.mark.parametrize(("kind", "name", "others"), BOOLEANS)
def test_a_boolean_of_numpy_is_one(kind: type[Any], name: str, others: dict[str, Any]) -> None:
    params = kind(**{name: np.bool_(True)}, **others)
    assert getattr(params, name) is True
    assert params == kind(**{name: True}, **others)


def test_parameters_are_values() -> None:
    params = SamplingParams(temperature=0.5, stop=["a", "b"])
    assert params == SamplingParams(temperature=0.5, stop=("a", "b"))
    assert hash(params) == hash(copy.deepcopy(params))
    assert pickle.loads(pickle.dumps(params)) == params
    assert dataclasses.replace(params, n=2).n == 2
    assert params.clone() == params
    assert params.clone(n=2, max_tokens=9) == dataclasses.replace(params, n=2, max_tokens=9)
    with pytest.raises(InvalidArgument, match="no argument 'max_token'; did you mean 'max_tokens'"):
        params.clone(max_token=9)
    with pytest.raises(InvalidArgument, match="max_tokens must be between 1"):
        params.clone(max_tokens=0)


def test_a_field_that_was_not_given_is_the_engines_own() -> None:
    ours, own = SamplingParams().to_core(), _core.SamplingParams()
    names = [name for name, kind in vars(type(own)).items() if isinstance(kind, property)]
    assert "temperature" in names
    assert {n: getattr(ours, n) for n in names} == {n: getattr(own, n) for n in names}


def test_every_field_is_checked() -> None:
    unfit = object()
    for field in dataclasses.fields(SamplingParams):
        with pytest.raises((InvalidArgument, NotSupported), match=field.name):
            SamplingParams(**{field.name: unfit})


def test_every_field_reaches_the_engine() -> None:
    fields = {
        "n": 3,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "top_n_sigma": 1.5,
        "seed": 2**64 - 1,
        "stop": ["x", "日本"],
        "stop_token_ids": [5],
        "ignore_eos": True,
        "max_tokens": 9,
        "min_tokens": 4,
        "logprobs": 2,
        "detokenize": True,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "spaces_between_special_tokens": False,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "allowed_token_ids": [3, 9],
        "logprob_token_ids": [4],
        "skip_reading_prefix_cache": True,
    }
    core = SamplingParams(**fields).to_core()  # type: ignore[arg-type]
    assert {name: getattr(core, name) for name in fields} == fields
    assert SamplingParams(logit_bias={4: 2.0}).to_core().logit_bias == [(4, 2.0)]
    detection = SamplingParams(repetition_detection=RepetitionDetectionParams(9, 2, 3)).to_core()
    assert detection.repetition_detection is not None
    assert detection.repetition_detection.max_pattern_size == 9
    assert SamplingParams(max_tokens=None).to_core(max_tokens=77).max_tokens == 77


def test_the_best_of_several_are_those_with_the_largest_probability(llm: LLM) -> None:
    params = SamplingParams(n=5, max_tokens=4, seed=1, logprobs=1)
    prompts: Any = [{"prompt_token_ids": [5, 6, 7]}] * 2
    every = llm.generate(prompts, params, use_tqdm=False)
    ranked = [sorted(o.outputs, key=lambda one: -(one.cumulative_logprob or 0)) for o in every]

    best = params.clone(n=2, best_of=5)
    for logprobs in (1, None):
        best.logprobs = logprobs
        outputs = llm.generate(prompts, best, use_tqdm=False)
        for output, wanted in zip(outputs, ranked, strict=True):
            assert [o.token_ids for o in output.outputs] == [o.token_ids for o in wanted[:2]]
            assert [o.cumulative_logprob for o in output.outputs] == [
                o.cumulative_logprob for o in wanted[:2]
            ]
            assert [o.index for o in output.outputs] == [0, 1]
            assert all((o.logprobs is None) == (logprobs is None) for o in output.outputs)
    llm.enqueue(prompts, best)
    waited = llm.wait_for_completion(use_tqdm=False)
    assert [o.outputs[0].token_ids for o in waited] == [w[0].token_ids for w in ranked]
    best.n = 6
    with pytest.raises(InvalidArgument, match="best_of must be at least n=6, got 5"):
        llm.generate(prompts, best, use_tqdm=False)
