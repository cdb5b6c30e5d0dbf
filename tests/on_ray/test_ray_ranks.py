"""A model whose ranks are on several nodes of a Ray cluster, of which one dies."""

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
from ray_calls import DEADLINE_S, ENGINE, MODEL, PATIENCE, config, counter, request, stream, text_of

pytest.importorskip("ray", reason="Ray is not installed: pip install 'llmserve[ray]'")
psutil = pytest.importorskip("psutil")

pytestmark = pytest.mark.long

BODY = {"prompt": "Once upon a time", "max_tokens": 1500, "seed": 3, "ignore_eos": True}


@pytest.fixture
def cluster() -> Iterator[tuple[Any, int]]:
    """A head and three nodes, of which an application's replica has two."""
    os.environ.update(PATIENCE)
    import ray
    from llmserve.ray import build_app
    from ray import serve
    from ray.cluster_utils import Cluster

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    small = {"object_store_memory": 80 * 2**20}
    # The front stays where no machine dies.
    head = {"num_cpus": 1, "resources": {"head": 1}, "include_dashboard": False, **small}
    front = {**config()["front"], "ray_actor_options": {"num_cpus": 0.1, "resources": {"head": 1}}}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(3):
        nodes.add_node(num_cpus=1, resources={"worker": 1}, **small)
    ray.init(address=nodes.address)
    serve.start(http_options={"host": "127.0.0.1", "port": port, "location": "HeadOnly"})
    replicas = {
        **config()["replicas"],
        "num_replicas": 1,
        "ray_actor_options": {"num_cpus": 0.5, "resources": {"worker": 1}},
    }
    engine = {**ENGINE, "nnodes": 2, "tensor_parallel_size": 2, "max_model_len": 2048}
    serve.run(build_app(config(replicas=replicas, engine=engine, front=front)), name="demo")
    yield nodes, port
    serve.shutdown()
    ray.shutdown()
    nodes.shutdown()


def followers() -> list[Any]:
    """Processes of nodes other than the first."""
    return [
        one
        for one in psutil.process_iter(["cmdline"])
        if "ray::Node" in " ".join(one.info["cmdline"] or ())
    ]


def test_a_node_that_dies_is_replaced_and_changes_no_token(cluster: tuple[Any, int]) -> None:
    """Ray's table says of a placement group that it is whole after a machine of it has died."""
    nodes, port = cluster
    with LLM(MODEL, **{**ENGINE, "max_model_len": 2048}) as llm:
        own = llm.get_default_sampling_params()
        params = replace(own, max_tokens=BODY["max_tokens"], seed=BODY["seed"], ignore_eos=True)
        (output,) = llm.generate([BODY["prompt"]], params, use_tqdm=False)
        expected = output.outputs[0].text
    status, answer = request(port, "/v1/completions", BODY)
    assert (status, answer["choices"][0]["text"]) == (200, expected)
    for harms_machine in (False, True):
        (follower,) = followers()
        chunks: list[Any] = []
        thread = threading.Thread(target=stream, args=(port, chunks, BODY))
        thread.start()
        until = time.monotonic() + DEADLINE_S
        while len(chunks) < 3:
            assert time.monotonic() < until
            time.sleep(0.002)
        if harms_machine:  # its raylet, and all that it has started
            raylet = next(
                psutil.Process(node.all_processes["raylet"][0].process.pid)
                for node in nodes.worker_nodes
                if follower.ppid() == node.all_processes["raylet"][0].process.pid
            )
            for process in (raylet, *raylet.children(recursive=True)):
                process.send_signal(signal.SIGKILL)
        else:
            follower.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        thread.join(DEADLINE_S)
        assert text_of(chunks) == expected
        assert chunks[-1] is None
        print(f"{'a machine' if harms_machine else 'a node'}: {time.monotonic() - killed:.1f} s")
        while [one.pid for one in followers()] in ([], [follower.pid]):
            assert time.monotonic() < until
            time.sleep(0.1)
    assert counter(port, "cut_streams") == 0
