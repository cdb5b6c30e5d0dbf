"""Real servers as processes, a router before them, and clients that note what they were given."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import openai
from serving import DEADLINE_S, http_request, openai_client

ADMIN = "boss"


class Process:
    """A command of llmserve that listens on a port."""

    def __init__(self, *arguments: str, port: int = 0) -> None:
        command = [sys.executable, "-m", "llmserve", *arguments, "--port", str(port)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.lines: list[str] = []
        self.port = 0
        is_up = threading.Event()

        def read() -> None:
            assert self.process.stderr is not None
            for line in self.process.stderr:
                self.lines.append(line)
                if found := re.search(
                    r"(?:serving|routing to) .* on http://127\.0\.0\.1:(\d+)", line
                ):
                    self.port = int(found[1])
                    is_up.set()
            is_up.set()

        threading.Thread(target=read, daemon=True).start()
        assert is_up.wait(DEADLINE_S), "it did not start"
        assert self.port, "".join(self.lines)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(DEADLINE_S)

    def openai(self, **options: Any) -> openai.OpenAI:
        return openai_client(self.port, **options)

    def request(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        return http_request(self.port, method, path, body, headers)

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + DEADLINE_S
        while not holds():
            assert time.monotonic() < until, f"not within {DEADLINE_S} s: {what}"
            time.sleep(0.02)


def start_server(*arguments: str, port: int = 0) -> Process:
    small = ("--num-threads", "1", "--kv-cache-memory-bytes", "16M", "--admin-key", ADMIN)
    return Process("serve", *small, *arguments, port=port)


Start = Callable[..., Process]


def replica_of(router: Process) -> dict[str, dict[str, Any]]:
    """What the router says of each replica."""
    return {row["url"]: row for row in router.request("GET", "/replicas")[1]["replicas"]}
