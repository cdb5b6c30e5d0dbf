"""The signature of LLM and AsyncLLM, from the table."""

import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

from llmserve.options.engine_options import ENGINE_OPTIONS

_P = ParamSpec("_P")


def takes(
    options: Callable[_P, object],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, _P], None]]:
    """For an `__init__(self, model, **options)` that takes what EngineOptions takes, and vLLM's
    arguments of what is not here: its signature, for type checkers and for people, and its text."""

    def decorate(init: Callable[..., None]) -> Callable[Concatenate[Any, _P], None]:
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        rest = inspect.Parameter("unknown", inspect.Parameter.VAR_KEYWORD, annotation=object)
        parameters = [own, *inspect.signature(options).parameters.values(), rest]
        init.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            parameters, return_annotation=None
        )
        init.__doc__ = "\n".join(
            f"{option.name}: {option.description}." for option in ENGINE_OPTIONS
        )
        return init

    return decorate
