"""How one vector of a prompt is made, by vLLM's names."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from llmserve.common.arguments import boolean, describe, optional_integer, refuse_unknown
from llmserve.errors import InvalidArgument

_TYPES = ("LAST", "CLS", "MEAN")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolerConfig:
    """pooling_type: LAST, CLS or MEAN, of the last hidden states. normalize, or use_activation: to
    an L2 norm of 1. dimensions: the first so many, of requests that say nothing. None is what the
    model's files say. Raises InvalidArgument.

    >>> PoolerConfig(pooling_type="mean").pooling_type
    'MEAN'
    """

    pooling_type: str | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    dimensions: int | None = None

    def __post_init__(self) -> None:
        kind = self.pooling_type
        if kind is not None:
            if not isinstance(kind, str) or kind.upper() not in _TYPES:
                raise InvalidArgument(
                    f"pooler_config: pooling_type must be one of {', '.join(_TYPES)}, got "
                    f"{describe(kind)}"
                )
            object.__setattr__(self, "pooling_type", kind.upper())
        for name in ("normalize", "use_activation"):
            if getattr(self, name) is not None:
                boolean(f"pooler_config: {name}", getattr(self, name))
        optional_integer("pooler_config: dimensions", self.dimensions, 1)


def as_pooler_config(value: object) -> PoolerConfig:
    """Of a dict, or as it is; None is one that says nothing. Raises InvalidArgument."""
    if value is None:
        return PoolerConfig()
    if isinstance(value, PoolerConfig):
        return value
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"pooler_config must be a dict, got {describe(value)}")
    refuse_unknown("pooler_config", value, [item.name for item in fields(PoolerConfig)])
    return PoolerConfig(**value)
