"""Checks of sampling parameters; each gives the value as it is kept. Raises InvalidArgument."""

from collections.abc import Callable, Iterable, Mapping

from llmserve.common.arguments import (
    describe,
    integer,
    number,
    optional_integer,
    unicode_text,
)
from llmserve.errors import InvalidArgument

# fn(token_ids int32 [T], logits float32 [V]) -> None or an array [V]
PythonLogitsProcessor = Callable[..., object]


def none_if_minus_1(name: str, value: object) -> int | None:
    result = optional_integer(name, value, -1)
    return None if result == -1 else result


def seed(name: str, value: object) -> int | None:
    """Negative ones are what they are in 64 bits without a sign; but -1 is none, as in vLLM."""
    result = integer(name, value, -(2**63), 2**64 - 1)
    return None if result == -1 else result % 2**64


def num_logprobs(name: str, value: object) -> int | None:
    return optional_integer(name, 1 if value is True else value, -1)  # as vLLM reads it


def bad_words(name: str, value: object) -> tuple[str, ...] | None:
    words = strings(name, value)
    if not all(word.strip() for word in words):
        raise InvalidArgument("bad_words must not contain an empty string")
    return words or None


def strings(name: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (unicode_text(name, value),)
    if not isinstance(value, Iterable):
        raise InvalidArgument(f"{name} must be a string or a list of them, got {describe(value)}")
    return tuple(unicode_text(f"{name}[{idx}]", item) for idx, item in enumerate(value))


def token_ids(name: str, value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise InvalidArgument(f"{name} must be a list of token ids, got {describe(value)}")
    return tuple(integer(f"{name}[{idx}]", item, 0) for idx, item in enumerate(value))


def logit_bias(_name: str, value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"logit_bias must map token ids to numbers, got {describe(value)}")
    # Keys of JSON are strings.
    ids = [int(k) if isinstance(k, str) and k.isdecimal() else k for k in value]
    return {
        integer("logit_bias: token id", token_id, 0): number(f"logit_bias[{token_id}]", bias)
        for token_id, bias in zip(ids, value.values(), strict=True)
    }


def of_kind(kind: type) -> Callable[[str, object], object]:
    def check(name: str, value: object) -> object:
        if not isinstance(value, kind):
            raise InvalidArgument(f"{name} must be a {kind.__name__}, got {describe(value)}")
        return value

    return check


def callables(name: str, value: object) -> tuple[PythonLogitsProcessor, ...] | None:
    if not isinstance(value, Iterable) or isinstance(value, str):
        raise InvalidArgument(f"{name} must be a list of functions, got {describe(value)}")
    functions = tuple(value)
    for idx, function in enumerate(functions):
        if not callable(function):
            raise InvalidArgument(f"{name}[{idx}] must be a function, got {describe(function)}")
    return functions or None


def extra_args(name: str, value: object) -> Mapping[str, object] | None:
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"{name} must be a dict, got {describe(value)}")
    return dict(value) or None
