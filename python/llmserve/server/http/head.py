"""The head of a request."""

from starlette.types import Scope


def header(scope: Scope, name: bytes) -> str:
    """The first header of this name, which is in lower case as ASGI has them; empty without one."""
    return header_bytes(scope, name).decode("latin-1")


def header_bytes(scope: Scope, name: bytes) -> bytes:
    """Likewise, as it came: clients do not agree on how to write what is not ASCII."""
    return next((bytes(value) for key, value in scope["headers"] if key == name), b"")
