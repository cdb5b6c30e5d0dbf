"""A wire between two nodes that takes its time: what goes through comes later, at a bounded rate.

As a script, `slow_wire.py PORT DELAY_S BYTES_PER_S`, it prints its own port, and goes to PORT of
this machine.
"""

from __future__ import annotations

import queue
import socket
import sys
import threading
import time
from contextlib import suppress

_PIECE_BYTES = 1 << 18
# Beyond it the sender waits, as for a wire.
_MAX_PIECES_UNDER_WAY = 64


class _Direction:
    """Of all connections together: when what comes now has gone through."""

    def __init__(self, delay_s: float, bytes_per_s: float) -> None:
        self._delay_s = delay_s
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def arrival(self, num_bytes: int) -> float:
        with self._lock:
            begin = max(self._free_at, time.monotonic())
            self._free_at = begin + num_bytes / self._bytes_per_s
            return self._free_at + self._delay_s


class SlowWire:
    """Listens on `port`, and goes to another port of this machine."""

    def __init__(self, to: int, delay_s: float = 0.0, bytes_per_s: float = 1e12) -> None:
        self._to = to
        self._left: int | None = None  # bytes until it breaks
        self._directions = [_Direction(delay_s, bytes_per_s) for _ in range(2)]
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._start(self._run)

    @staticmethod
    def _start(work: object, *arguments: object) -> None:
        threading.Thread(target=work, args=arguments, daemon=True).start()  # type: ignore[arg-type]

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._to))
                except OSError:  # node 0 does not listen yet
                    near.close()
                    continue
                for sock in (near, far):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._join(near, far, self._directions[0])
                self._join(far, near, self._directions[1])

    def _join(self, one: socket.socket, other: socket.socket, direction: _Direction) -> None:
        pieces: queue.Queue[tuple[float, bytes]] = queue.Queue(_MAX_PIECES_UNDER_WAY)
        self._start(self._take, one, pieces, direction)
        self._start(self._give, other, pieces)

    def cut_after(self, num_bytes: int) -> None:
        """A connection ends, once, when so many bytes more have come from the nearer side."""
        self._left = num_bytes

    def _breaks(self, num_bytes: int, direction: _Direction) -> bool:
        if self._left is None or direction is not self._directions[0]:
            return False
        self._left -= num_bytes
        if self._left > 0:
            return False
        self._left = None
        return True

    def _take(
        self, sock: socket.socket, pieces: queue.Queue[tuple[float, bytes]], direction: _Direction
    ) -> None:
        data = b"."
        while data:
            try:
                data = sock.recv(_PIECE_BYTES)
            except OSError:
                data = b""
            if self._breaks(len(data), direction):
                data = b""
            pieces.put((direction.arrival(len(data)), data))

    @staticmethod
    def _give(sock: socket.socket, pieces: queue.Queue[tuple[float, bytes]]) -> None:
        with suppress(OSError):
            while True:
                arrival, data = pieces.get()
                time.sleep(max(0.0, arrival - time.monotonic()))
                if not data:
                    sock.shutdown(socket.SHUT_RDWR)
                    return
                sock.sendall(data)

    def close(self) -> None:
        self._listener.close()


if __name__ == "__main__":
    wire = SlowWire(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
    print(wire.port, flush=True)
    sys.stdin.read()  # until its parent ends
