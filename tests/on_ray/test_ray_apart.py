"""On Ray: prompts that replicas of their own compute, and replicas that stand by."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from llmserve import LLM
from ray_calls import (
    DEADLINE_S,
    ENGINE,
    MODEL,
    PATIENCE,
    config,
    counter,
    replica_processes,
    request,
    stream,
    text_of,
)

pytest.importorskip("ray", reason="Ray is not installed: pip install 'llmserve[ray]'")
pytest.importorskip("psutil")

pytestmark = pytest.mark.long

PROMPT = "The fox ran to the moon, and the moon said to the fox: come in. " * 4


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Where applications are to be found."""
    os.environ.update(PATIENCE)
    import ray
    from ray import serve

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        number = sock.getsockname()[1]
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 * 2**20)
    serve.start(http_options={"host": "127.0.0.1", "port": number})
    yield number
    serve.shutdown()
    ray.shutdown()


@pytest.fixture
def run(port: int) -> Iterator[Any]:
    """Runs an application, which ends with the test."""
    from llmserve.ray import build_app
    from ray import serve

    yield lambda **more: serve.run(build_app(config(**more)), name="demo")
    serve.delete("demo")


def replicas(number: int) -> dict[str, Any]:
    return {**config()["replicas"], "num_replicas": number}


def expected(bodies: list[dict[str, Any]]) -> list[str]:
    with LLM(MODEL, **ENGINE) as llm:
        own = llm.get_default_sampling_params()  # what a request leaves out
        params = [
            replace(own, max_tokens=b["max_tokens"], seed=b["seed"], ignore_eos=True)
            for b in bodies
        ]
        outputs = llm.generate([b["prompt"] for b in bodies], params, use_tqdm=False)
        return [output.outputs[0].text for output in outputs]


def test_prompts_are_computed_apart_and_a_prefill_replica_may_die(port: int, run: Any) -> None:
    route = {"tokenizer": MODEL, "hand_over_min_tokens": 16}
    run(replicas=replicas(1), prefill=replicas(1), route=route)
    bodies = [
        {"prompt": f"{i} {PROMPT}", "max_tokens": 24, "seed": i, "ignore_eos": True}
        for i in range(4)
    ]
    wanted = expected(bodies)
    for body, text in zip(bodies[:3], wanted, strict=False):
        status, answer = request(port, "/v1/completions", body)
        assert (status, answer["choices"][0]["text"]) == (200, text)
    # The decode replica is thought to have what it was sent: nothing is computed twice.
    assert request(port, "/v1/completions", bodies[0])[0] == 200
    assert counter(port, "handed_over") == 3
    assert counter(port, "not_handed_over") == 0
    chunks: list[Any] = []
    stream(port, chunks, bodies[2])
    assert text_of(chunks) == wanted[2]
    said = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4, "model": "demo"}
    assert request(port, "/v1/messages", said)[0] == 200
    assert counter(port, "handed_over") == 4
    (prefill,) = replica_processes("LLMPrefill")
    prefill.send_signal(signal.SIGKILL)
    status, answer = request(port, "/v1/completions", bodies[3])
    assert (status, answer["choices"][0]["text"]) == (200, wanted[3])


def test_a_standby_has_no_requests_until_one_dies(port: int, run: Any) -> None:
    run(replicas=replicas(1), standby_replicas=1)
    bodies = [
        {"prompt": f"Story {i}: once upon a time", "max_tokens": 900, "seed": i, "ignore_eos": True}
        for i in range(4)
    ]
    wanted = expected(bodies)
    both = replica_processes()
    assert len(both) == 2
    before = {one.pid: sum(one.cpu_times()[:2]) for one in both}
    for body in bodies:
        assert request(port, "/v1/completions", body)[0] == 200
    spent = {one.pid: sum(one.cpu_times()[:2]) - before[one.pid] for one in both}
    serving, standing = sorted(both, key=lambda one: -spent[one.pid])
    assert spent[serving.pid] > 3 * spent[standing.pid]
    chunks: list[list[Any]] = [[] for _ in bodies]
    times: list[float] = []

    def read(into: list[Any], body: dict[str, Any]) -> None:
        stream(port, into, body)
        times.append(time.monotonic())

    threads = [
        threading.Thread(target=read, args=(into, body))
        for into, body in zip(chunks, bodies, strict=True)
    ]
    for thread in threads:
        thread.start()
    until = time.monotonic() + DEADLINE_S
    while not all(chunks):
        assert time.monotonic() < until
        time.sleep(0.002)
    serving.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    counts = [len(into) for into in chunks]
    while not any(len(into) > count + 20 for into, count in zip(chunks, counts, strict=True)):
        assert time.monotonic() < until
        time.sleep(0.002)
    print(f"streams go on {time.monotonic() - killed:.3f} s after the kill")
    for thread in threads:
        thread.join(DEADLINE_S)
    assert [text_of(into) for into in chunks] == wanted
    assert counter(port, "replays") > 0
    assert counter(port, "cut_streams") == 0
    # Ray starts another one, which stands by.
    while len(replica_processes()) < 2:
        assert time.monotonic() < until
        time.sleep(0.1)
