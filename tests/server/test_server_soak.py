"""A server under mixed traffic for twenty minutes: its memory, descriptors and threads stay what
they were after the warm-up. LLMSERVE_SOAK_S sets another time.

Stores that are bounded by bytes (stored responses) or by distinct entries (compiled grammars) are
not filled here: their bounds have tests of their own.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from llmserve import demo_model_path
from serving import DEADLINE_S, start_command

SOAK_S = float(os.environ.get("LLMSERVE_SOAK_S", "1200"))
NUM_CLIENTS = 6
PAUSE_S = 0.1
MAX_BYTES_AN_HOUR = 1_000_000
WARM_UP = 0.6  # of the time: what is bounded by a number of requests has to be full

WORDS = [
    "the",
    "fox",
    "and",
    "crow",
    "met",
    "a",
    "lamb",
    "by",
    "river",
    "one",
    "day",
    "in",
    "winter",
]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Client:
    """One that sends whatever comes, over connections that it keeps, drops or cuts."""

    def __init__(self, port: int, seed: int) -> None:
        self.port = port
        self.random = random.Random(seed)
        self.num_done = 0

    def _prompt(self, most: int = 120) -> str:
        return " ".join(self.random.choices(WORDS, k=self.random.randint(1, most)))

    def _post(self, path: str, body: object) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        try:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request("POST", path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            response.read()
            return response.status
        finally:
            connection.close()

    def completion(self) -> None:
        body: dict[str, Any] = {
            "prompt": self._prompt(),
            "max_tokens": self.random.randint(1, 40),
            "temperature": self.random.choice([0, 0.7, 1]),
            "n": self.random.choice([1, 1, 1, 3]),
            "stream": self.random.random() < 0.4,
            "logprobs": self.random.choice([None, 3]),
        }
        assert self._post("/v1/completions", body) == 200

    def chat(self) -> None:
        messages = [{"role": "user", "content": self._prompt(30)}]
        body = {"messages": messages, "max_tokens": 20, "stop": [" the"]}
        assert self._post("/v1/chat/completions", body) == 200

    def structured(self) -> None:
        schema = {
            "name": "person",
            "schema": {**PERSON, "title": f"Person {self.random.randrange(40)}"},
        }
        response_format = {"type": "json_schema", "json_schema": schema}
        messages = [{"role": "user", "content": self._prompt(10)}]
        body = {"messages": messages, "max_tokens": 40}
        assert (
            self._post("/v1/chat/completions", {**body, "response_format": response_format}) == 200
        )

    def others(self) -> None:
        assert self._post("/tokenize", {"prompt": self._prompt(400)}) == 200
        body = {"max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]}
        assert self._post("/v1/messages", body) == 200
        assert self._post("/v1/responses", {"input": "Hi", "store": False}) == 200

    def mistakes(self) -> None:
        assert self._post("/v1/completions", {"prompt": "a", "temperature": -1}) == 400
        assert self._post("/v1/completions", b'{"prompt": ') == 400
        assert self._post("/v1/chat/completions", {"model": "other", "messages": []}) in (400, 404)

    def cut(self) -> None:
        """Leaves a stream after its first bytes."""
        body = {"prompt": self._prompt(), "max_tokens": 100, "stream": True}
        data = json.dumps(body).encode()
        fields = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
        head = f"POST /v1/completions HTTP/1.1\r\n{fields}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE_S) as sock:
            sock.sendall(head.encode() + data)
            sock.recv(self.random.choice([1, 400]))

    def run(self, until: float) -> None:
        kinds: list[Callable[[], None]] = [
            *[self.completion] * 5,
            *[self.chat] * 3,
            self.structured,
            self.others,
            self.mistakes,
            self.cut,
        ]
        while time.monotonic() < until:
            self.random.choice(kinds)()
            self.num_done += 1
            time.sleep(PAUSE_S)


@pytest.fixture
def server() -> Iterator[tuple[psutil.Process, int]]:
    process, port = start_command(
        *("--model", str(demo_model_path()), "--kv-cache-memory-bytes", str(2**24)),
        *(
            "--speculative-config",
            '{"method": "suffix", "suffix_decoding_max_cached_requests": 64}',
        ),
    )
    yield psutil.Process(process.pid), port
    process.terminate()
    assert process.wait(DEADLINE_S) == 0


def slope(points: list[tuple[float, float]]) -> float:
    """Theil and Sen's: the median of the slopes between points, which single peaks do not move."""
    slopes = sorted(
        (later - earlier) / (end - begin)
        for idx, (begin, earlier) in enumerate(points)
        for end, later in points[idx + 1 :]
    )
    return slopes[len(slopes) // 2]


@pytest.mark.long
def test_memory_descriptors_and_threads_stay_what_they_are(
    server: tuple[psutil.Process, int], record_property: Callable[[str, object], None]
) -> None:
    process, port = server
    begin = time.monotonic()
    clients = [Client(port, seed) for seed in range(NUM_CLIENTS)]
    failures: list[BaseException] = []

    def run(client: Client) -> None:
        try:
            client.run(begin + SOAK_S)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    readings = []
    while any(thread.is_alive() for thread in threads):
        moment = time.monotonic() - begin
        readings.append(
            (moment, process.memory_info().rss, process.num_fds(), process.num_threads())
        )
        time.sleep(SOAK_S / 600)
    for thread in threads:
        thread.join()
    assert not failures, failures

    warm = [reading for reading in readings if reading[0] > SOAK_S * WARM_UP]
    bytes_an_hour = slope([(moment, rss) for moment, rss, _, _ in warm]) * 3600
    num_requests = sum(client.num_done for client in clients)
    figures = {
        "requests": num_requests,
        "rss_mb": [round(warm[idx][1] / 1e6, 1) for idx in (0, len(warm) // 2, -1)],
        "mb_an_hour": round(bytes_an_hour / 1e6, 2),
        "descriptors": max(fds for _, _, fds, _ in warm),
        "threads": sorted({count for _, _, _, count in warm}),
    }
    record_property("figures", figures)
    print(figures)
    assert bytes_an_hour < MAX_BYTES_AN_HOUR, figures
    last_fds = max(fds for _, _, fds, _ in warm[-len(warm) // 4 :])
    first_fds = max(fds for _, _, fds, _ in warm[: len(warm) // 4])
    assert last_fds <= first_fds + NUM_CLIENTS, figures
    assert warm[-1][3] <= warm[0][3], figures
    time.sleep(2)
    assert process.num_fds() <= readings[0][2] + 2
    assert Path(f"/proc/{process.pid}").exists()
