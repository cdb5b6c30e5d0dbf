"""A server on this machine that speaks what huggingface-hub asks, for models in a folder."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REVISIONS = ("main", "v1", COMMIT)


class Handler(BaseHTTPRequestHandler):
    """`GET /api/models/<id>/revision/<revision>`, `…/tree/<revision>`, and the files themselves."""

    server: HubServer

    def do_HEAD(self) -> None:
        self.answer(has_body=False)

    def do_GET(self) -> None:
        self.answer(has_body=True)

    def log_message(self, *arguments: object) -> None:
        """Says nothing."""

    def answer(self, has_body: bool) -> None:
        path = urlsplit(self.path).path.strip("/")
        self.server.requests.append(path)
        parts = path.removeprefix("api/models/").split("/")
        model_id = parts[0] if parts[0] in self.server.models else "/".join(parts[:2])
        parts = ["", "", *parts[model_id.count("/") + 1 :]]
        if model_id in self.server.errors:
            self.send_error_code(*self.server.errors[model_id])
        elif model_id not in self.server.models:
            self.send_error_code(404, "RepoNotFound")
        elif len(parts) < 4 or parts[3] not in REVISIONS:
            self.send_error_code(404, "RevisionNotFound")
        elif parts[2] == "revision":
            siblings = [self.sibling(file) for file in self.files(model_id)]
            self.send_json({"id": model_id, "sha": COMMIT, "siblings": siblings}, has_body)
        elif parts[2] == "tree":
            self.send_json([self.entry(p) for p in self.files(model_id)], has_body)
        else:
            self.send_file(self.server.models[model_id] / "/".join(parts[4:]), has_body)

    def files(self, model_id: str) -> list[tuple[str, Path]]:
        root = self.server.models[model_id]
        return [(str(p.relative_to(root)), p) for p in sorted(root.rglob("*")) if p.is_file()]

    def entry(self, file: tuple[str, Path]) -> dict[str, object]:
        name, path = file
        return {"type": "file", "path": name, "size": path.stat().st_size, "oid": etag(path)}

    def sibling(self, file: tuple[str, Path]) -> dict[str, object]:
        name, path = file
        return {"rfilename": name, "size": path.stat().st_size, "blobId": etag(path)}

    def send_json(self, value: object, has_body: bool) -> None:
        self.send_bytes(json.dumps(value).encode(), "application/json", {}, has_body)

    def send_file(self, path: Path, has_body: bool) -> None:
        if not path.is_file():
            self.send_error_code(404, "EntryNotFound")
            return
        headers = {"ETag": f'"{etag(path)}"', "X-Repo-Commit": COMMIT}
        data, status = path.read_bytes(), 200
        wanted = self.headers.get("Range", "") if self.server.has_ranges else ""
        if has_body and wanted:
            self.server.ranges.append(wanted)
            begin = int(wanted.removeprefix("bytes=").removesuffix("-"))
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
            data, status = data[begin:], 206
        self.send_bytes(data, "application/octet-stream", headers, has_body, status)

    def send_bytes(
        self, data: bytes, kind: str, headers: dict[str, str], has_body: bool, status: int = 200
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Type": kind}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if has_body:
            self.wfile.write(data[: self.server.breaks_after])

    def send_error_code(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


class HubServer(ThreadingHTTPServer):
    """What it has, what it refuses, and what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.models: dict[str, Path] = {}
        self.errors: dict[str, tuple[int, str]] = {}
        self.requests: list[str] = []
        self.breaks_after: int | None = None  # bytes of an answer, after which the connection ends
        self.has_ranges = True
        self.ranges: list[str] = []  # that were asked for

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def serve() -> Iterator[HubServer]:
    with HubServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
