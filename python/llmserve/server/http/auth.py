"""Keys: every route but those of a machine's probes asks for one once there is one."""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from llmserve.server.http.errors import ApiError
from llmserve.server.http.head import header_bytes
from llmserve.server.settings import ServerSettings

# Whether the server lives and takes requests, which says nothing of what it does.
_OPEN = ("/health", "/ready", "/ping")
_ADMIN = "/debug"


def _digest(key: bytes) -> bytes:
    """So that comparing takes the same time for keys of any length."""
    return hashlib.sha256(key).digest()


class Keys:
    """Some keys, none of which is kept."""

    def __init__(self, keys: Sequence[str]) -> None:
        """Of the settings, in UTF-8."""
        self._digests = [_digest(key.encode("utf-8", "surrogateescape")) for key in keys if key]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def find(self, key: bytes) -> bytes | None:
        """The digest of this key if it is one of them, in UTF-8 or in Latin-1: clients write either
        into a header. Compares with all of them, in constant time."""
        found = None
        for given in (_digest(key), _digest(key.decode("latin-1").encode())):
            for digest in self._digests:
                if hmac.compare_digest(given, digest):
                    found = digest
        return found


def tenant(scope: Scope) -> str:
    """Whose quotas a request counts for: its key's digest; empty where no key is asked for."""
    return str(scope.get("llmserve.key", ""))


class KeyCheck:
    """What a server asks of a request before anything else."""

    def __init__(self, settings: ServerSettings) -> None:
        self._clients = Keys([*settings.api_keys, settings.admin_key])
        self._is_open = not settings.api_keys
        self._admins = Keys([settings.admin_key])
        self._open_paths = {*_OPEN, *(["/metrics"] if settings.is_lenient("open_metrics") else [])}

    def refusal(self, scope: Scope) -> ApiError | None:
        """401, 403, or None for one that may go on, whose tenant is known then."""
        path = scope["path"]
        if path in self._open_paths:
            return None
        kind, _, key = header_bytes(scope, b"authorization").partition(b" ")
        key = key.strip() if kind.lower() == b"bearer" else b""
        key = key or header_bytes(scope, b"x-api-key").strip()  # Anthropic's
        if path == _ADMIN or path.startswith(_ADMIN + "/"):
            if not self._admins:
                return ApiError(
                    403, "this route needs an admin key, and the server was started without one"
                )
            found = self._admins.find(key)
        else:
            found = b"" if self._is_open else self._clients.find(key)
        if found is not None:
            if not self._is_open:
                scope["llmserve.key"] = found.hex()  # whose quotas count
            return None
        return ApiError(
            401,
            "the API key is wrong"
            if key
            else "send an API key: Authorization: Bearer <key>, or x-api-key: <key>",
            code="invalid_api_key",
        )


class Authentication:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._keys = KeyCheck(settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hands the request on. Raises ApiError (401, 403)."""
        if scope["type"] == "http" and (error := self._keys.refusal(scope)):
            raise error
        await self._app(scope, receive, send)
