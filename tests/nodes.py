"""Models on several nodes: the others are threads of this process, or processes of their own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmserve import _core
from llmserve.cli.follow import make_node

PATIENCE_S = 60


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Node:
    """A node other than the first, on a thread."""

    def __init__(self, path: Path | str, options: dict[str, Any]) -> None:
        self.node: _core.NodeFollower = make_node(str(path), options)
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.node.run()
        except BaseException as error:
            self.failure = error.with_traceback(None)

    def end(self) -> None:
        """After node 0, which tells it to."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the node goes on"

    def stop(self) -> None:
        self.node.stop()
        self.end()


@contextmanager
def nodes(path: Path | str, num_nodes: int, **options: Any) -> Iterator[dict[str, Any]]:
    """Starts nodes 1 and later, and gives the options of node 0."""
    shared = {"nnodes": num_nodes, "master_port": free_port(), **options}
    others = [Node(path, {**shared, "node_rank": rank}) for rank in range(1, num_nodes)]
    try:
        yield shared
        for other in others:
            other.end()
            assert other.failure is None, other.failure
    finally:
        for other in others:
            other.stop()


class NodeProcess:
    """A node other than the first, as a process of its own."""

    def __init__(
        self, path: Path | str, options: dict[str, Any], prefix: tuple[str, ...] = ()
    ) -> None:
        flags = [
            f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
            for name, value in options.items()
            if value is not False
        ]
        self._command = [*prefix, sys.executable, "-m", "llmserve", "serve", str(path), *flags]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=os.environ
        )

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=PATIENCE_S)

    def stop(self) -> str:
        """What it has said; by SIGTERM unless it has ended."""
        self.process.terminate()
        self.process.send_signal(signal.SIGCONT)
        return self.process.communicate(timeout=PATIENCE_S)[1].decode()


def wait_until(is_true: Any, what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < end, what
        time.sleep(0.01)
