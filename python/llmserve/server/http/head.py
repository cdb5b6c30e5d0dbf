"""The head of a request."""

import re

from starlette.types import Scope

_REQUEST_ID = re.compile(rb"[!-~]{1,128}")


def header(scope: Scope, name: bytes) -> str:
    """The first header of this name, which is in lower case as ASGI has them; empty without one."""
    return header_bytes(scope, name).decode("latin-1")


def header_bytes(scope: Scope, name: bytes) -> bytes:
    """Likewise, as it came: clients do not agree on how to write what is not ASCII."""
    return next((bytes(value) for key, value in scope["headers"] if key == name), b"")


def given_request_id(scope: Scope) -> bytes:
    """The id that the client chose for its request; empty for none, or one of odd characters."""
    value = header_bytes(scope, b"x-request-id")
    return value if _REQUEST_ID.fullmatch(value) else b""
