"""From a body's fields to SamplingParams: the model's defaults, with what was given over them."""

import dataclasses
import math
from functools import lru_cache
from typing import Any

import msgspec

from llmserve.errors import InvalidArgument
from llmserve.sampling_params import (
    SAMPLING_FIELDS,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
)
from llmserve.server.http.errors import ApiError
from llmserve.server.routes.bodies import GenerationBody
from llmserve.server.routes.constraints import structured_outputs
from llmserve.server.settings import ServerSettings

# Of the fields of bodies that are sampling parameters, those that are more than passed on.
_OWN = {"max_tokens", "repetition_detection", "structured_outputs"}
_SAME = tuple(
    name
    for name in GenerationBody.__struct_fields__
    if name in SAMPLING_FIELDS and name not in _OWN
)
_NUMBERS = (bool, int, float, type(None))


def sampling_params(
    body: GenerationBody,
    defaults: SamplingParams,
    settings: ServerSettings,
    max_tokens: int | None,
    **more: Any,
) -> SamplingParams:
    """max_tokens: None runs to the end of the context or the server's cap. more: fields that
    depend on the route. Raises ApiError, InvalidArgument."""
    given: dict[str, Any] = {name: getattr(body, name) for name in _SAME} | more
    if given["repetition_penalty"] is None:
        given["repetition_penalty"] = body.repeat_penalty
    if given["skip_reading_prefix_cache"] is None and body.cache_prompt is False:
        given["skip_reading_prefix_cache"] = True
    most = settings.max_num_samples
    for name, value in (("n", body.n), ("best_of", more.get("best_of"))):
        if value is not None and value > most:
            raise ApiError(400, f"{name} must be at most {most}, got {value}", param=name)
    if body.repetition_detection is not None:
        values = {
            name: getattr(body.repetition_detection, name)
            for name in body.repetition_detection.__struct_fields__
        }
        given["repetition_detection"] = RepetitionDetectionParams(**values)
    given["structured_outputs"] = structured_outputs(body, settings)
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    changes = {name: value for name, value in given.items() if value is not None}
    cap = settings.max_output_tokens
    if cap and (max_tokens is None or max_tokens > cap):
        max_tokens = cap
    changes["max_tokens"] = max_tokens
    is_small = all(isinstance(value, _NUMBERS) for value in changes.values())
    replace = _remembered if is_small else dataclasses.replace
    return replace(defaults, output_kind=kind, **changes)


def given_max_tokens(*values: int | None) -> int | None:
    """The first that is given; None, as many as the context has room for, where that is -1 or none
    is."""
    value = next((value for value in values if value is not None), None)
    return None if value == -1 else value


@lru_cache(maxsize=64, typed=True)
def _remembered(defaults: SamplingParams, **changes: Any) -> SamplingParams:
    """A client sends the same few numbers over and over, and each time they would take longer to
    check than its prompt."""
    return dataclasses.replace(defaults, **changes)


def refuse_given(body: msgspec.Struct, names: tuple[str, ...], why: str) -> None:
    """Raises ApiError for the first of these fields that has a value."""
    for name in names:
        if getattr(body, name) is not None:
            raise ApiError(
                400, f"{name} is not supported: {why}", param=name, code="unsupported_parameter"
            )


def timeout_s(body_timeout: float | None, settings: ServerSettings) -> float:
    """Seconds that a request may take as a whole; 0: no bound."""
    most = settings.request_timeout
    if body_timeout is None:
        return most
    if not 0 < body_timeout <= (most or math.inf):
        at_most = f" and at most {most:g} (request_timeout)" if most else ""
        raise InvalidArgument(
            f"timeout must be more than 0{at_most}, in seconds, got {body_timeout}"
        )
    return body_timeout
