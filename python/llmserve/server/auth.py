"""Keys: every route but /health asks for one once there is one."""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from llmserve.server.errors import ApiError
from llmserve.server.head import header
from llmserve.server.settings import ServerSettings

_OPEN = ("/health",)
_ADMIN = "/debug"


def _digest(key: str) -> bytes:
    """So that comparing takes the same time for keys of any length."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class Keys:
    """Some keys, none of which is kept."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys if key]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def has(self, key: str) -> bool:
        """Compares with all of them, in constant time."""
        given = _digest(key)
        found = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(found)


class Authentication:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._clients = Keys([*settings.api_keys, settings.admin_key])
        self._is_open = not settings.api_keys
        self._admins = Keys([settings.admin_key])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 401 or 403, or hands the request on."""
        if scope["type"] == "http" and (error := self._refusal(scope)):
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        path = scope["path"]
        if path in _OPEN:
            return None
        kind, _, key = header(scope, b"authorization").partition(" ")
        key = key.strip() if kind.lower() == "bearer" else ""
        if path == _ADMIN or path.startswith(_ADMIN + "/"):
            if not self._admins:
                return ApiError(
                    403, "this route needs an admin key, and the server was started without one"
                )
            is_let_in = self._admins.has(key)
        else:
            is_let_in = self._is_open or self._clients.has(key)
        if is_let_in:
            if not self._is_open:
                scope["llmserve.key"] = _digest(key).hex()  # whose quotas count
            return None
        return ApiError(
            401,
            "the API key is wrong" if key else "send an API key: Authorization: Bearer <key>",
            code="invalid_api_key",
        )
