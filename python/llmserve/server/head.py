"""The head of a request."""

from starlette.types import Scope


def header(scope: Scope, name: bytes) -> str:
    """The first header of this name, which is in lower case as ASGI has them; empty without one."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value, "latin-1")
    return ""
