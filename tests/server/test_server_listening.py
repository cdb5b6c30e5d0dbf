"""The sockets: who may connect, TLS, and what is refused before a model is loaded."""

from __future__ import annotations

import http.client
import resource
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from llmserve import AsyncLLM, InvalidArgument
from llmserve.cli import main
from llmserve.server.main import listen, with_descriptors
from llmserve.server.settings import ServerSettings
from serving import (
    DEADLINE_S,
    running_server,
    start_command,
    tls_files,
)


def test_lines_leave_at_once_and_few_of_them_wait_in_the_kernel() -> None:
    (listening,) = listen(ServerSettings(port=0))
    with listening as sock, socket.create_connection(sock.getsockname()):
        ours, _ = sock.accept()
        with ours:
            assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
            assert 2**16 <= ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 2**17


def test_a_client_that_sends_a_letter_at_a_time_is_let_go(demo: AsyncLLM) -> None:
    with running_server(demo, read_timeout=0.3) as server:
        for sent in (b"", b"GET /hea", b"POST /tokenize HTTP/1.1\r\nHost: x\r\n"):
            with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S) as sock:
                sock.sendall(sent)
                assert sock.recv(100).startswith(b"HTTP/1.1 408 ")
        with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S) as sock:
            head = "POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            sock.sendall(f'{head}Content-Length: 100\r\n\r\n{{"prompt'.encode())
            assert sock.recv(100).startswith(b"HTTP/1.1 408 ")
        # A connection that is kept between two requests is not in a hurry.
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE_S)
        for _ in range(2):
            connection.request("GET", "/health")
            assert connection.getresponse().read() == b'{"status":"ok"}'
            time.sleep(0.4)
        connection.close()


@pytest.mark.parametrize(
    ("limits", "raised_to", "num_connections"),
    [
        ((1024, 1_000_000), 4352, 4096),
        ((1024, resource.RLIM_INFINITY), 4352, 4096),
        ((1024, 2048), 2048, 1792),
        ((1024, 1024), None, 768),
        ((65536, 65536), None, 4096),
    ],
)
def test_as_many_files_may_be_open_as_connections(
    limits: tuple[int, int],
    raised_to: int | None,
    num_connections: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, values: given.append(values))
    assert with_descriptors(ServerSettings()).max_connections == num_connections
    assert given == ([] if raised_to is None else [(raised_to, limits[1])])


def test_tls_serves_https_and_nothing_else(demo: AsyncLLM, tmp_path: Path) -> None:
    files = tls_files(tmp_path)
    with running_server(demo, **files) as server:
        context = ssl.create_default_context(cafile=files["ssl_certfile"])
        url = f"https://127.0.0.1:{server.port}/health"
        with urllib.request.urlopen(url, context=context, timeout=DEADLINE_S) as answer:
            assert answer.read() == b'{"status":"ok"}'
        with pytest.raises((OSError, http.client.HTTPException)):
            server.request("GET", "/health")


@pytest.mark.parametrize("bad", ["missing", "no key", "another's key", "a password"])
def test_bad_tls_files_are_refused_before_a_model_is_loaded(
    bad: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = tls_files(tmp_path)
    key = Path(files["ssl_keyfile"])
    if bad == "missing":
        key.unlink()
    elif bad == "no key":
        key.write_text("nonsense")
    elif bad == "another's key":
        (tmp_path / "other").mkdir()
        key.write_bytes(Path(tls_files(tmp_path / "other")["ssl_keyfile"]).read_bytes())
    else:
        command = f"openssl rsa -aes128 -passout pass:sesame -in {key} -out {key}"
        subprocess.run(command.split(), check=True, capture_output=True)
    flags = [f"--{name.replace('_', '-')}={path}" for name, path in files.items()]
    assert main(["serve", "/nowhere", "--port", "0", *flags]) == 2
    assert "ssl_keyfile" in capsys.readouterr().err


def test_a_trace_that_cannot_be_written_is_refused_before_a_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, reason in ((tmp_path / "no" / "t.json", "No such file"), (tmp_path, "directory")):
        assert main(["serve", "/nowhere", "--port", "0", "--trace", str(path)]) == 2
        error = capsys.readouterr().err
        assert f"trace '{path}' cannot be written" in error
        assert reason in error


def test_only_the_loopback_is_listened_on_by_default() -> None:
    psutil = pytest.importorskip("psutil")
    process, port = start_command()
    try:
        listening = [
            c.laddr for c in psutil.Process(process.pid).net_connections() if c.status == "LISTEN"
        ]
        assert listening == [("127.0.0.1", port)]
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0


def test_several_addresses_answer_on_one_port(demo: AsyncLLM) -> None:
    sockets = listen(ServerSettings(port=0, host="127.0.0.1, 127.0.0.2"))
    names = [sock.getsockname() for sock in sockets]
    assert [host for host, _ in names] == ["127.0.0.1", "127.0.0.2"]
    assert len({port for _, port in names}) == 1
    for sock in sockets:
        sock.close()
    with pytest.raises(InvalidArgument, match="cannot listen on no such host:"):
        listen(ServerSettings(port=0, host="127.0.0.1,no such host"))


def test_a_path_of_the_file_system_is_an_address(tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    settings = ServerSettings(host=f"unix:{path}")
    (first,) = listen(settings)
    with pytest.raises(InvalidArgument, match=f"cannot listen on unix:{path}: Address already"):
        listen(settings)
    first.close()  # its file is left, and nobody answers there
    process = subprocess.Popen(
        [sys.executable, "-m", "llmserve", "serve", "--uds", str(path), "--num-threads", "1"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        assert any(f"serving demo on unix:{path}" in line for line in process.stderr)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(DEADLINE_S)
            sock.connect(str(path))
            body = b'{"prompt": "Once", "max_tokens": 2}'
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            sock.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            assert sock.recv(4096).startswith(b"HTTP/1.1 200 ")
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=DEADLINE_S)
