"""llmserve on a Ray cluster of three nodes, of which one dies."""

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
from llmserve import LLM, demo_model_path
from ray_calls import DEADLINE_S, ENGINE, PATIENCE, config, counter, request, stream, text_of

pytest.importorskip("ray", reason="Ray is not installed: pip install 'llmserve[ray]'")
psutil = pytest.importorskip("psutil")

pytestmark = pytest.mark.long

NUM_STREAMS = 200
NUM_TOKENS = 200


@pytest.fixture
def cluster() -> Iterator[tuple[Any, int]]:
    """Three nodes, and the port of an application whose two replicas have a node each."""
    os.environ.update(PATIENCE)
    import ray
    from llmserve.ray import build_app
    from ray import serve
    from ray.cluster_utils import Cluster

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    small = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **small})
    for _ in range(2):
        nodes.add_node(num_cpus=1, resources={"worker": 1}, object_store_memory=80 * 2**20)
    ray.init(address=nodes.address)
    serve.start(http_options={"host": "127.0.0.1", "port": port, "location": "HeadOnly"})
    replicas = {
        **config()["replicas"],
        "ray_actor_options": {"num_cpus": 0.2, "resources": {"worker": 1}},
    }
    serve.run(build_app(config(replicas=replicas)), name="demo")
    yield nodes, port
    serve.shutdown()
    ray.shutdown()
    nodes.shutdown()


def test_a_node_that_dies_loses_no_stream_and_changes_no_token(cluster: tuple[Any, int]) -> None:
    nodes, port = cluster
    prompts = [f"Story {i}: once upon a time" for i in range(NUM_STREAMS)]
    with LLM(str(demo_model_path()), **ENGINE) as llm:
        own = llm.get_default_sampling_params()
        params = [
            replace(own, max_tokens=NUM_TOKENS, seed=i, ignore_eos=True) for i in range(NUM_STREAMS)
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        expected = [output.outputs[0].text for output in outputs]
    chunks: list[list[Any]] = [[] for _ in prompts]
    threads = []
    for i, prompt in enumerate(prompts):
        body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "seed": i, "ignore_eos": True}
        threads.append(threading.Thread(target=stream, args=(port, chunks[i], body)))
    for thread in threads:
        thread.start()
    until = time.monotonic() + DEADLINE_S
    while sum(map(bool, chunks)) < NUM_STREAMS // 4:
        assert time.monotonic() < until
        time.sleep(0.01)
    victim = next(iter(nodes.worker_nodes))
    raylet = psutil.Process(victim.all_processes["raylet"][0].process.pid)
    for process in (raylet, *raylet.children(recursive=True)):  # as when the power fails
        process.send_signal(signal.SIGKILL)
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert [text_of(into) for into in chunks] == expected
    assert all(into[-1] is None for into in chunks)
    assert counter(port, "replays") + counter(port, "retries") > 0
    assert counter(port, "cut_streams") == 0
    assert request(port, "/v1/models")[0] == 200
