"""Names of vLLM's whose features are not here: they can be imported, and using one says why."""

from collections.abc import Mapping
from typing import Any, NoReturn

from llmserve.errors import NotSupported

_NO_HEADS = "heads for classification and scores are not loaded; embed and encode are there"
REFUSED_NAMES: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("ClassificationOutput", "ClassificationRequestOutput"),
            *("ScoringOutput", "ScoringRequestOutput"),
        ),
        _NO_HEADS,
    ),
    "initialize_ray_cluster": "an LLM is one process; docs/ray.md has Ray Serve and Ray Data",
    "KVTransferConfig": "weights and KV cache stay in one memory",
    "LoRARequest": "adapters are not applied; merge them into the checkpoint (peft's "
    "merge_and_unload), and load that",
    "ModelRegistry": "models are C++; docs/adding-a-model.md says how one is added",
    "SpeculativeConfig": "LLM(speculative_config) takes a dict of its fields",
}


class _Refused(type):
    """Of a class that is never made; it may stand in annotations and isinstance."""

    def __call__(cls, *_arguments: object, **_keywords: object) -> NoReturn:
        raise NotSupported(f"{cls.__name__} is not supported: {REFUSED_NAMES[cls.__name__]}")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotSupported(f"{cls.__name__}.{name} is not supported: {REFUSED_NAMES[cls.__name__]}")


_CLASSES = {
    name: _Refused(name, (), {"__doc__": f"Not here: {reason}."})
    for name, reason in REFUSED_NAMES.items()
}


def refused_class(name: str) -> type:
    """The one of that name.

    >>> refused_class("LoRARequest").__name__
    'LoRARequest'
    """
    return _CLASSES[name]


def __getattr__(name: str) -> type:
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _CLASSES[name]
