"""generation_config.json: the sampling parameters that a model's makers recommend."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmserve import _core
from llmserve.checkpoint.model_files import (
    JsonObject,
    checked_field,
    is_gguf,
    read_json_object,
    token_id_tuple,
)
from llmserve.common.arguments import describe, integer, refuse_unknown
from llmserve.errors import CorruptFile, InvalidArgument
from llmserve.sampling_params import SAMPLING_FIELDS, SamplingParams

# The sampling parameters that makers of models set; of others a file may say what it wants.
_RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# Those that who starts a server sets besides.
_MORE = ("presence_penalty", "frequency_penalty", "top_n_sigma")


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """What the file says about sampling, and the ids that end a sequence."""

    eos_token_ids: tuple[int, ...] = ()
    max_new_tokens: int | None = None
    default_params: SamplingParams = field(default_factory=SamplingParams)


def read_generation_config(source: Path, gguf: _core.GgufFile | None = None) -> GenerationConfig:
    """generation_config.json of a directory, or what a GGUF file says of sampling; all defaults
    where that is nothing. `gguf` is the file, where it is open already. Raises CorruptFile."""
    if is_gguf(source):
        from llmserve.requests.gguf_generation import gguf_generation_fields

        return _from_fields(source, gguf_generation_fields(source, gguf))
    path = source / "generation_config.json"
    return _from_fields(path, read_json_object(source, path.name) or {})


def overridden(config: GenerationConfig, overrides: object) -> GenerationConfig:
    """With the fields of override_generation_config in the place of the config's. Raises
    InvalidArgument."""
    if not overrides:
        return config
    if not isinstance(overrides, Mapping):
        raise InvalidArgument(
            f"override_generation_config must be a dict, got {describe(overrides)}"
        )
    names = ("max_new_tokens", *_RECOMMENDED, *_MORE)
    refuse_unknown("override_generation_config", overrides, names)
    given = dict(overrides)
    if "max_new_tokens" in given:
        given["max_tokens"] = given.pop("max_new_tokens")
    try:
        params = config.default_params.clone(**given)
    except InvalidArgument as error:
        raise InvalidArgument(f"override_generation_config: {error}") from None
    return replace(config, default_params=params)


def own_max_tokens(defaults: SamplingParams) -> int | None:
    """What generation_config.json says; None where it is SamplingParams' own default."""
    return None if defaults.max_tokens == SamplingParams().max_tokens else defaults.max_tokens


def _from_fields(path: Path, fields: JsonObject) -> GenerationConfig:
    max_new_tokens = checked_field(
        path, fields, "max_new_tokens", lambda name, value: integer(name, value, 1)
    )
    return GenerationConfig(
        eos_token_ids=checked_field(path, fields, "eos_token_id", token_id_tuple) or (),
        max_new_tokens=max_new_tokens,
        default_params=_default_params(path, fields, max_new_tokens),
    )


def _default_params(
    path: Path, fields: Mapping[str, object], max_new_tokens: int | None
) -> SamplingParams:
    """SamplingParams' own defaults under what the file says, as vLLM does it."""
    given: dict[str, Any] = {
        name: checked_field(path, fields, name, SAMPLING_FIELDS[name].check)
        for name in _RECOMMENDED
    }
    given["max_tokens"] = max_new_tokens
    try:
        return SamplingParams(**{k: value for k, value in given.items() if value is not None})
    except InvalidArgument as error:
        raise CorruptFile(f"{path}: {error}") from error
