"""Runs the server: sockets, signals, and the end."""

import asyncio
import dataclasses
import logging
import os
import resource
import socket
import ssl
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import uvicorn
from starlette.applications import Starlette

from llmserve.errors import InvalidArgument
from llmserve.server.app import create_app
from llmserve.server.context import ServerContext
from llmserve.server.early_refusal import EarlyRefusal
from llmserve.server.http.protocol import http_protocol
from llmserve.server.models import ServedModel
from llmserve.server.settings import UNIX, ServerSettings
from llmserve.server.tracing import Tracing

_log = logging.getLogger(__name__)

_BACKLOG = 2048
# Some hundred lines of a stream; the kernel takes twice as much.
_SEND_BUFFER_BYTES = 2**16
# For the last bytes of what was ended at the drain's deadline, or by a second Ctrl-C; then the
# connections are cut.
_FLUSH_S, _FORCED_FLUSH_S = 5.0, 1.0
# Until uvicorn gives up by itself: what runs on a thread may take a moment to notice.
_CLOSE_S = 10
_POLL_S = 0.05
# Descriptors that the process has for what is no client's connection.
_NUM_OWN_DESCRIPTORS = 256


def uvicorn_config(
    app: Starlette, settings: ServerSettings, protocol: type[asyncio.Protocol], **more: Any
) -> uvicorn.Config:
    """Of a server and of a router: answers, logs and errors are llmserve's own. more: uvicorn's."""
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        ssl_certfile=settings.ssl_certfile or None,
        ssl_keyfile=settings.ssl_keyfile or None,
        timeout_graceful_shutdown=_CLOSE_S,
        **more,
    )


class Server(uvicorn.Server):
    """uvicorn's server, which drains before it closes: after SIGTERM or Ctrl-C what runs may
    finish, new requests and those whose body has not come get 503, and at the deadline, or a second
    Ctrl-C, the rest ends with what it has."""

    def __init__(self, app: Starlette, settings: ServerSettings) -> None:
        refusal = EarlyRefusal(app.state.server)
        protocol = http_protocol(settings, app.state.server.metrics.count_answer, refusal)
        config = uvicorn_config(app, settings, protocol)
        self._loop: asyncio.AbstractEventLoop | None = None  # while it waits for its end
        self._is_to_exit = asyncio.Event()
        self._is_forced = False  # by another Ctrl-C
        super().__init__(config)
        self._settings = settings
        self._app = app

    @property
    def should_exit(self) -> bool:
        """Whether the server is to end: set by signals, or on any thread by whoever runs it."""
        return self._should_exit

    @should_exit.setter
    def should_exit(self, should_exit: bool) -> None:
        self._should_exit = should_exit
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._is_to_exit.set)

    @property
    def force_exit(self) -> bool:
        """Never, to uvicorn, which would leave connections and the lifespan as they are: `shutdown`
        sees to it."""
        return False

    @force_exit.setter
    def force_exit(self, is_forced: bool) -> None:
        self._is_forced = is_forced

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Says where it listens once it does."""
        await super().startup(sockets)
        server: ServerContext = self._app.state.server
        names = ", ".join(model.name for model in server.models)
        for sock in sockets or ():
            _log.info("serving %s on %s", names, address(sock, self._settings))

    async def main_loop(self) -> None:
        """Sleeps until the end, where uvicorn's looks ten times a second; what it does then, the
        date of answers, is `http_protocol`'s."""
        self._loop = asyncio.get_running_loop()
        if not self.should_exit:
            await self._is_to_exit.wait()
        self._loop = None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drains, then closes."""
        server: ServerContext = self._app.state.server
        drain = asyncio.create_task(server.activity.drain(self._settings.drain_timeout))
        while not drain.done() and not self._is_forced:
            await asyncio.wait([drain], timeout=_POLL_S)
        drain.cancel()
        flush_s = _FLUSH_S
        if self._is_forced:
            # By a second Ctrl-C. What it ends is to leave all the same, unless there is a third.
            self._is_forced = False
            server.activity.end_all()
            flush_s = _FORCED_FLUSH_S
        cut = asyncio.create_task(self._cut_after(flush_s))
        await super().shutdown(sockets)
        cut.cancel()
        self._captured_signals.clear()  # or uvicorn would raise them anew

    async def _cut_after(self, flush_s: float) -> None:
        """Cuts what has not been read by then, or by the next Ctrl-C, and drops what is still at
        work for it. uvicorn would cancel the tasks alone, and wait for their connections."""
        until = time.monotonic() + flush_s
        while time.monotonic() < until and not self._is_forced:
            await asyncio.sleep(_POLL_S)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await asyncio.sleep(_POLL_S)  # they are told, and most end by themselves
        for task in list(self.server_state.tasks):
            task.cancel()


def with_descriptors(settings: ServerSettings) -> ServerSettings:
    """Raises the process' limit of open files so that it holds max_connections, or lowers that to
    what the limit holds: past it nobody gets in, not even a probe."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = settings.max_connections + _NUM_OWN_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return settings
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if limit > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit == needed:
        return settings
    num = max(limit - _NUM_OWN_DESCRIPTORS, 1)
    _log.warning(
        "max_connections is %d and not %d: the process may have %d files open (ulimit -n)",
        *(num, settings.max_connections, limit),
    )
    return dataclasses.replace(settings, max_connections=num)


def serve(
    models: Sequence[ServedModel],
    settings: ServerSettings,
    sockets: list[socket.socket],
    tracing: Tracing | None = None,
) -> None:
    """Serves on what `listen` gave until SIGTERM or Ctrl-C."""
    settings = with_descriptors(settings)
    app = create_app(models, settings, tracing)
    if not settings.api_key and not all(map(is_of_this_machine, sockets)):
        _log.warning("no api_key: everybody who reaches this machine may use the server")
    Server(app, settings).run(sockets=sockets)


def address(sock: socket.socket, settings: ServerSettings) -> str:
    """What clients call it."""
    if sock.family == socket.AF_UNIX:
        return f"{UNIX}{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    scheme = "https" if settings.ssl_certfile else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def is_of_this_machine(sock: socket.socket) -> bool:
    """Whether nobody from outside reaches it."""
    return sock.family == socket.AF_UNIX or sock.getsockname()[0] in ("127.0.0.1", "::1")


def _check_tls(settings: ServerSettings) -> None:
    """Raises InvalidArgument that names the file."""
    if not settings.ssl_certfile:
        return
    for name in ("ssl_certfile", "ssl_keyfile"):
        try:
            with open(getattr(settings, name), "rb"):
                pass
        except OSError as error:
            path = getattr(settings, name)
            raise InvalidArgument(f"{name} {path!r} cannot be read: {error.strerror}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # uvicorn would ask for a password on the terminal, which a server may not have.
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password=lambda: "")
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"ssl_certfile {settings.ssl_certfile!r} and ssl_keyfile {settings.ssl_keyfile!r} must "
            f"be a certificate in PEM and its private key without a password: {error}"
        ) from None


def listen(settings: ServerSettings) -> list[socket.socket]:
    """A socket an address of `host`, listening, so that no model is loaded for nothing: who comes
    early waits. Raises InvalidArgument."""
    _check_tls(settings)
    found: list[socket.socket] = []
    port = settings.port
    for host in settings.hosts:
        try:
            found.append(_unix_socket(host) if host.startswith(UNIX) else _tcp_socket(host, port))
        except OSError as error:
            for sock in found:
                sock.close()
            where = host if host.startswith(UNIX) else f"{host}:{port}"
            hint = "" if host.startswith(UNIX) else "; choose another --port, or 0 for a free one"
            raise InvalidArgument(f"cannot listen on {where}: {error.strerror}{hint}") from None
        port = port or _port(found[-1])  # port 0 takes a free one, the same for all
    return found


def _port(sock: socket.socket) -> int:
    """0 of a file's."""
    return 0 if sock.family == socket.AF_UNIX else int(sock.getsockname()[1])


def _tcp_socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:  # the IPv4 addresses are another socket's
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        # What follows, its connections inherit. A token's line is to leave when it is written, not
        # when the next one fills the packet.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _begin(sock, (host, port))
    except OSError:
        sock.close()
        raise
    return sock


def _unix_socket(host: str) -> socket.socket:
    """A file's, in the place of one that a server has left."""
    path = host.removeprefix(UNIX)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.stat(path).st_mode) and not _is_answered(path):
                os.unlink(path)
        _begin(sock, path)
    except OSError:
        sock.close()
        raise
    return sock


def _is_answered(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == 0


def _begin(sock: socket.socket, address: object) -> None:
    # What a client has not read is to wait in the engine's state, where it is counted, and not in
    # megabytes of the kernel's.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    sock.bind(address)  # type: ignore[arg-type]  # of the socket's family
    sock.listen(_BACKLOG)  # or a second server could bind it, too, and fail later
