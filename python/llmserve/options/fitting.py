"""From options to the config of an engine, with the longest context that its KV cache holds."""

from dataclasses import replace

from llmserve import _core
from llmserve.errors import ResourceExhausted
from llmserve.options.engine_options import EngineOptions, as_dtype, as_max_model_len

_MIN_MODEL_LEN = 2


def resolve(
    options: EngineOptions, checkpoint: _core.Checkpoint, **settings: object
) -> _core.EngineConfig:
    """The config of an engine. max_model_len of "auto" or -1 is the model's maximum or, if the KV
    cache holds less than one sequence of that, what it holds. Raises as the core does."""

    options = replace(options, dtype=as_dtype("dtype", options.dtype))  # which warns once

    def resolved(max_model_len: int | None) -> _core.EngineConfig:
        tried = replace(options, max_model_len=max_model_len)
        return _core.resolve_config(tried.to_request(checkpoint.path, **settings), checkpoint)

    def fits(max_model_len: int) -> bool:
        try:
            resolved(max_model_len)
        except ResourceExhausted:
            return False
        return True

    given = options.max_model_len
    wanted = None if given is None else as_max_model_len("max_model_len", given)
    if wanted != -1:
        return resolved(wanted)
    try:
        return resolved(None)
    except ResourceExhausted:
        if not fits(_MIN_MODEL_LEN):
            raise
    low = _MIN_MODEL_LEN
    while fits(2 * low):
        low *= 2
    high = 2 * low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return resolved(low)
