"""Real servers for tests: uvicorn on a socket of this machine, in a thread or a process."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from llmserve import AsyncLLM
from llmserve.server.app import create_app
from llmserve.server.main import Server, listen
from llmserve.server.models import ServedModel
from llmserve.server.running.activity import Activity
from llmserve.server.settings import ServerSettings

# Tells an answer from a hang; what is waited for takes milliseconds.
DEADLINE_S = 60.0


def tls_files(folder: Path) -> dict[str, str]:
    """A server's settings: a key and a certificate of its own for this machine, made there."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = (
        f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {certificate} -days 2 "
        f"-subj /CN=localhost -addext subjectAltName=DNS:localhost,IP:127.0.0.1"
    )
    subprocess.run(command.split(), check=True, capture_output=True)
    return {"ssl_keyfile": str(key), "ssl_certfile": str(certificate)}


def openai_client(port: int, **options: Any) -> openai.OpenAI:
    """The official client."""
    options = {"api_key": "none", "max_retries": 0, **options}
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", **options)


def http_request(
    port: int,
    method: str,
    path: str,
    body: object = None,
    headers: dict[str, str] | None = None,
) -> tuple[int, Any, dict[str, str]]:
    """(status, the JSON or text, headers in lower case)."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    try:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **(headers or {})}
        connection.request(method, path, data, sent)
        response = connection.getresponse()
        text = response.read()
        received = {name.lower(): value for name, value in response.getheaders()}
        is_json = received.get("content-type", "").startswith("application/json")
        return response.status, json.loads(text) if is_json else text.decode(), received
    finally:
        connection.close()


class RunningServer:
    """A server and the simplest client."""

    def __init__(
        self, llm: AsyncLLM, activity: Activity, port: int, server: Server | None = None
    ) -> None:
        self._server = server
        self.llm = llm
        self.activity = activity
        self.port = port

    @property
    def num_connections(self) -> int:
        """Those that are open."""
        return len(self._server.server_state.connections) if self._server else 0

    def stop(self, is_forced: bool = False) -> None:
        """As a signal does. is_forced: as another Ctrl-C does."""
        assert self._server is not None
        self._server.should_exit = True
        self._server.force_exit = is_forced

    def openai(self, **options: Any) -> openai.OpenAI:
        """The official client."""
        return openai_client(self.port, **options)

    def request(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """(status, the JSON or text, headers in lower case)."""
        return http_request(self.port, method, path, body, headers)

    def post(self, path: str, **body: object) -> tuple[int, Any]:
        """(status, the JSON)."""
        status, answer, _ = self.request("POST", path, body)
        return status, answer

    def open_stream(self, path: str, **body: object) -> socket.socket:
        """A socket on which a request was written and nothing was read."""
        data = json.dumps(body).encode()
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", self.port))
        sock.settimeout(DEADLINE_S)
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        sock.sendall(head.encode() + data)
        return sock

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        """Fails after the deadline."""
        until = time.monotonic() + DEADLINE_S
        while not holds():
            assert time.monotonic() < until, f"not within {DEADLINE_S} s: {what}"
            time.sleep(0.005)

    def wait_until_idle(self) -> None:
        """Nothing runs, and every block is free or cached."""

        def is_idle() -> bool:
            metrics = self.llm.get_metrics()
            unfinished = metrics.num_requests_running + metrics.num_requests_waiting
            admissions = self.activity.admissions.values()
            is_empty = not any(a.num_requests or a.num_tokens for a in admissions)
            return is_empty and not self.activity.runs and unfinished + metrics.num_blocks_used == 0

        self.wait_until(is_idle, "idle with a full pool")


@contextmanager
def running_server(
    llm: AsyncLLM,
    names: list[str] | None = None,
    loop: str = "auto",
    others: Sequence[ServedModel] = (),
    **settings: Any,
) -> Iterator[Any]:
    """A server in a thread, of this model and others. loop: uvicorn's name of it."""
    record = ServerSettings(port=0, **settings)
    (sock,) = listen(record)
    app = create_app([ServedModel(names or ["demo"], llm), *others], record)
    server = Server(app, record)
    server.config.loop = loop
    port = sock.getsockname()[1]
    name = f"server-{port}"
    thread = threading.Thread(target=server.run, args=([sock],), name=name, daemon=True)
    thread.start()
    running = RunningServer(llm, app.state.server.activity, port, server)
    try:
        running.wait_until(lambda: server.started, "started")
        yield running
    finally:
        server.should_exit = True
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "the server did not end"


def events(sock: socket.socket) -> Iterator[str]:
    """The lines that begin with `data: ` or are comments, of a raw stream, to its end."""
    buffer = b""
    while data := sock.recv(65536):
        buffer += data
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            if line.startswith((b"data: ", b":")):
                yield line.decode().strip()
            if line.strip() == b"data: [DONE]":
                return


def data_of(lines: Iterable[str]) -> list[Any]:
    """What the events of a stream say, without the comments and the end."""
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def text_of(lines: Iterable[str]) -> str:
    """The text that the events of a completion give, of all choices."""
    return "".join(c["text"] for d in data_of(lines) for c in d["choices"])


def start_command(*arguments: str) -> tuple[subprocess.Popen[str], int]:
    """`llmserve serve` as a process, and the port that it listens on."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "llmserve",
            "serve",
            "--port",
            "0",
            "--num-threads",
            "1",
            *arguments,
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"serving .* on http://127\.0\.0\.1:(\d+)", line):
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return process, int(found[1])
    raise AssertionError("the server did not start")
