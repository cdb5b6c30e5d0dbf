"""hf_overrides: fields that stand in for those of a checkpoint's config.json."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llmserve.checkpoint.model_files import JsonObject, is_gguf, read_json_object
from llmserve.common.arguments import describe
from llmserve.errors import InvalidArgument, NotSupported

# Objects of config.json that are one value: half of one and half of another means nothing.
_WHOLE = ("rope_parameters", "rope_scaling", "quantization_config")

_LAYERS = "num_hidden_layers"


class HfConfig:
    """A config.json as an object, as functions of hf_overrides know it from transformers.

    >>> config = HfConfig({"num_hidden_layers": 3, "rope_parameters": {"rope_theta": 1e4}})
    >>> config.num_hidden_layers, config.rope_parameters["rope_theta"]
    (3, 10000.0)
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        vars(self).update(fields)

    def update(self, fields: Mapping[str, Any]) -> None:
        """Sets fields."""
        vars(self).update(fields)

    def get(self, name: str, default: Any = None) -> Any:
        """A field, or the default where there is none."""
        return vars(self).get(name, default)

    def to_dict(self) -> dict[str, Any]:
        """All fields."""
        return dict(vars(self))


def overridden_config(source: Path, overrides: Mapping[str, object] | Callable[[Any], Any]) -> str:
    """The text of config.json with these fields. overrides: a dict, or a function that takes an
    HfConfig and gives it back, changed, or another. Raises InvalidArgument, NotSupported for a
    GGUF file, CorruptFile."""
    fields = None if is_gguf(source) else read_json_object(source, "config.json")
    if fields is None:
        raise NotSupported(
            f"hf_overrides change a config.json, and {source} has none; leave them out"
        )
    if isinstance(overrides, Mapping):
        changed: JsonObject = _merged(fields, overrides)
    elif callable(overrides):
        changed = _called(overrides, HfConfig(json.loads(json.dumps(fields))))
    else:
        raise InvalidArgument(
            f"hf_overrides must be a dict or a function, got {describe(overrides)}"
        )
    try:
        return json.dumps(changed, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"hf_overrides: not what JSON can hold: {error}") from None


def _merged(fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(fields)
    for name, value in overrides.items():
        if not isinstance(name, str):
            raise InvalidArgument(f"hf_overrides: a field has a name, got {describe(name)}")
        own = merged.get(name)
        if isinstance(own, Mapping) and isinstance(value, Mapping) and name not in _WHOLE:
            value = _merged(own, value)
        merged[name] = value
    return _with_one_rope(_with_fewer_layers(merged, fields, overrides), overrides)


def _with_fewer_layers(
    merged: dict[str, Any], fields: Mapping[str, Any], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Lists with an entry a layer (layer_types …), cut to the layers that are left, unless they
    were given as well."""
    old, new = fields.get(_LAYERS), overrides.get(_LAYERS)
    if type(old) is not int or type(new) is not int or not 0 <= new < old:
        return merged
    return {
        name: value[:new]
        if isinstance(value, list) and len(value) == old and name not in overrides
        else value
        for name, value in merged.items()
    }


def _with_one_rope(merged: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE under its newer name, where the file has that and the older ones were given."""
    rope = merged.get("rope_parameters")
    if not isinstance(rope, Mapping) or "rope_parameters" in overrides:
        return merged
    given = {}
    if isinstance(overrides.get("rope_scaling"), Mapping):
        given = {"rope_theta": rope.get("rope_theta"), **merged.pop("rope_scaling")}
    if "rope_theta" in overrides:
        given = {**(given or rope), "rope_theta": merged.pop("rope_theta")}
    return {**merged, "rope_parameters": given} if given else merged


def _called(function: Callable[[Any], Any], config: HfConfig) -> JsonObject:
    try:
        changed = function(config)
    except Exception as error:
        raise InvalidArgument(
            f"hf_overrides: the function raised {type(error).__name__}: {error}"
        ) from error
    if changed is None:
        changed = config  # changed in place
    if isinstance(changed, Mapping):
        return dict(changed)
    if not callable(getattr(changed, "to_dict", None)):
        raise InvalidArgument(
            f"hf_overrides: the function must give the config back, got {describe(changed)}"
        )
    fields: JsonObject = changed.to_dict()
    return fields
