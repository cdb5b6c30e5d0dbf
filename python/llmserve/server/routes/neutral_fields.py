"""Fields of other servers' bodies that have nothing to do here: what each may be, and why nothing
else."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from llmserve.common.arguments import describe
from llmserve.server.http.errors import ApiError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NeutralField:
    """A field whose feature is not here."""

    kind: Any
    neutral: tuple[object, ...] = ()  # values, beside none at all, that ask for nothing
    why: str = ""  # anything else is refused; empty: it is taken, and changes nothing


_told: set[str] = set()


def check_neutral(body: msgspec.Struct, fields: Mapping[str, NeutralField]) -> None:
    """Raises ApiError for the first of these fields that asks for something. One that changes
    nothing is warned of once."""
    for name, field in fields.items():
        value = getattr(body, name)
        if value is None or value in field.neutral:
            continue
        if field.why:
            shown = f"{name}: {field.why}; leave it out, got {describe(value)}"
            raise ApiError(400, shown, param=name, code="unsupported_parameter")
        if name not in _told:
            _told.add(name)
            _log.warning("a request's %s changes nothing here; this is said once", name)
