"""What a field of SamplingParams says of itself, so that nobody else has to list it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

FIELD = "llmserve"  # the key in a field's metadata


@dataclass(frozen=True, slots=True)
class SamplingField:
    """Besides name, type and default, which the dataclass has."""

    # Gives the value as it is kept. Raises InvalidArgument, NotSupported.
    check: Callable[[str, object], object]
    # The engine's struct takes it as it is, under the same name.
    is_same_in_core: bool
    # Of its value in the server's bodies, which pass it on and do nothing else with it.
    body: type | None
    # What the command line says of its option; empty where it has none.
    option: str


def same(
    check: Callable[[str, object], object], body: type | None = None, option: str = ""
) -> Mapping[str, SamplingField]:
    """The metadata of a field that is the engine's, too."""
    return {FIELD: SamplingField(check, True, body, option)}


def apart(
    check: Callable[[str, object], object], body: type | None = None
) -> Mapping[str, SamplingField]:
    """The metadata of a field that the engine has not got, or in another form."""
    return {FIELD: SamplingField(check, False, body, "")}
