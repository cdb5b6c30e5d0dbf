"""What the kernel takes for the lines of streams, which no server can take less than: the same
number of bytes over TCP on the loopback, to readers asleep in recv, right after all threads have
read through more memory than the caches hold, as a step reads its weights."""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys

from core_testing import testing
from llmserve import _core

# A streamed chunk of /v1/completions, framed.
_LINE_BYTES = 210
_SWEEP_BYTES = 256 * 2**20
_NUM_STEPS = 60
# argv: port, and how many connections to make; each has a thread that reads until its end.
_READERS = """
import socket, sys, threading
def read(sock):
    while sock.recv(65536): pass
address = ("127.0.0.1", int(sys.argv[1]))
threads = [threading.Thread(target=read, args=(socket.create_connection(address),))
           for _ in range(int(sys.argv[2]))]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def bare_send_us(num_streams: int, num_threads: int, isa: str = "") -> float:
    """Processor time of one send, in microseconds, where a step is followed by one to each of
    `num_streams` readers; the median over steps."""
    memory = _core.MachineProbe(num_threads, isa, _SWEEP_BYTES)
    with socket.create_server(("127.0.0.1", 0), backlog=num_streams) as listener:
        command = [sys.executable, "-c", _READERS, str(listener.getsockname()[1]), str(num_streams)]
        with subprocess.Popen(command) as readers:
            socks = [listener.accept()[0] for _ in range(num_streams)]
            try:
                for sock in socks:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                fds = [sock.fileno() for sock in socks]
                times_ns = []
                for _ in range(_NUM_STEPS):
                    memory.read_gb_per_s()
                    times_ns.append(testing.send_ns(fds, bytes(_LINE_BYTES)))
            finally:
                for sock in socks:
                    sock.close()
        assert readers.returncode == 0
    return statistics.median(times_ns) / num_streams / 1000
