"""Tiers of service: how many tokens a second the streams of each get."""

from collections.abc import Mapping
from functools import lru_cache

from llmserve.common.arguments import describe
from llmserve.errors import InvalidArgument

# Of requests that name no tier.
DEFAULT_TIER = "default"


@lru_cache(maxsize=8)  # every request asks
def read_tiers(setting: str) -> Mapping[str, float]:
    """Tokens a second by tier, from `free=8,plus=20`. Raises InvalidArgument."""
    tiers = {}
    for item in filter(None, map(str.strip, setting.split(","))):
        tier, equals, rate = item.partition("=")
        try:
            tiers[tier.strip()] = float(rate)
        except ValueError:
            equals = ""
        if not (tier.strip() and equals and 0 < tiers[tier.strip()] < float("inf")):
            raise InvalidArgument(
                f"pace must be TIER=TOKENS_PER_SECOND, several with commas between, got {item!r}"
            )
    return tiers


def read_tier(name: str | None, tiers: Mapping[str, float]) -> str:
    """The tier of a request by its service_tier: one that has a pace, or the default, which clients
    of OpenAI's also call auto. Raises InvalidArgument."""
    if name is not None and name in tiers:
        return name
    if name in (None, DEFAULT_TIER, "auto"):
        return DEFAULT_TIER
    known = ", ".join({**tiers, DEFAULT_TIER: 0.0, "auto": 0.0})
    raise InvalidArgument(
        f"service_tier must be one of {known}, got {describe(name)}; others are named by the "
        f"server's setting pace"
    )
