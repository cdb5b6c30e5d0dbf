"""llmserve on a Ray cluster of three nodes, of which one dies or is cut off."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
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
SMALL = {"object_store_memory": 80 * 2**20}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def run_application(host: str) -> int:
    """Two replicas, on a worker node each; the port of it."""
    from llmserve.ray import build_app
    from ray import serve

    port = free_port()
    serve.start(http_options={"host": host, "port": port, "location": "HeadOnly"})
    replicas = {
        **config()["replicas"],
        "ray_actor_options": {"num_cpus": 0.2, "resources": {"worker": 1}},
    }
    # The front stays where no node dies.
    front = {**config()["front"], "ray_actor_options": {"num_cpus": 0.1, "resources": {"head": 1}}}
    serve.run(build_app(config(replicas=replicas, front=front)), name="demo")
    return port


@pytest.fixture
def cluster() -> Iterator[tuple[Any, int]]:
    """Three nodes of one address, and the application's port."""
    os.environ.update(PATIENCE)
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "resources": {"head": 1}, "include_dashboard": False, **SMALL}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        nodes.add_node(num_cpus=1, resources={"worker": 1}, **SMALL)
    ray.init(address=nodes.address)
    yield nodes, run_application("127.0.0.1")
    serve.shutdown()
    ray.shutdown()
    nodes.shutdown()


HEAD = "10.231.80.1"
BRIDGE = "lls-ray"
# Within 2 s and a tick of it a node is known to be gone.
IMPATIENCE = {
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "500",
    "RAY_health_check_failure_threshold": "4",
}


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class RayNode:
    """A node as a process, in a network namespace or in that of the tests."""

    def __init__(self, space: str, *arguments: str) -> None:
        inside = ("ip", "netns", "exec", space) if space else ()
        python = (sys.executable, "-c", "from ray.scripts.scripts import main; main()")
        small = ("--num-cpus=1", f"--object-store-memory={SMALL['object_store_memory']}")
        self.process = subprocess.Popen(
            [*inside, *python, "start", "--block", "--disable-usage-stats", *small, *arguments],
            stdout=subprocess.DEVNULL,
            env={**os.environ, **PATIENCE, **IMPATIENCE},
        )

    def kill(self) -> None:
        own = psutil.Process(self.process.pid)
        for one in (*own.children(recursive=True), own):
            with suppress(psutil.NoSuchProcess):
                one.kill()
        self.process.wait(DEADLINE_S)


@pytest.fixture
def spaces() -> Iterator[tuple[list[str], int]]:
    """Three nodes of which two are in namespaces: their links, and the application's port."""
    if shutil.which("ip") is None:
        pytest.skip("needs ip")
    os.environ.update(PATIENCE)
    import ray
    from ray import serve

    names = ["lls-ray-a", "lls-ray-b"]
    try:
        ip("netns", "add", names[0])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr!r}")
    nodes: list[RayNode] = []
    folder = tempfile.mkdtemp(prefix="lls-ray-")  # with a path that is short enough for sockets
    try:
        ip("netns", "add", names[1])
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("addr", "add", f"{HEAD}/24", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        gcs = free_port()
        address = f"{HEAD}:{gcs}"
        head = ("--head", f"--port={gcs}", "--include-dashboard=false", f"--temp-dir={folder}")
        only = f"--resources={json.dumps({'head': 1})}"
        nodes.append(RayNode("", *head, f"--node-ip-address={HEAD}", only))
        until = time.monotonic() + DEADLINE_S
        while socket.socket().connect_ex((HEAD, gcs)) != 0:
            assert nodes[0].process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.2)
        ray.init(address=address, _node_ip_address=HEAD)
        for number, name in enumerate(names):
            own = f"10.231.80.{number + 2}"
            ip("link", "add", f"{name}-0", "type", "veth", "peer", "name", f"{name}-1")
            ip("link", "set", f"{name}-0", "master", BRIDGE, "up")
            ip("link", "set", f"{name}-1", "netns", name)
            inside = ("netns", "exec", name, "ip")
            ip(*inside, "addr", "add", f"{own}/24", "dev", f"{name}-1")
            ip(*inside, "link", "set", f"{name}-1", "up")
            ip(*inside, "link", "set", "lo", "up")
            worker = f"--resources={json.dumps({'worker': 1})}"
            nodes.append(RayNode(name, f"--address={address}", f"--node-ip-address={own}", worker))
            while sum(node["Alive"] for node in ray.nodes()) < len(nodes):  # one after the other
                assert nodes[-1].process.poll() is None
                assert time.monotonic() < until
                time.sleep(0.2)
        yield [f"{name}-0" for name in names], run_application("127.0.0.1")
        serve.shutdown()
        ray.shutdown()
    finally:
        for node in nodes:
            node.kill()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", BRIDGE], check=False, capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)


def check_streams(port: int, harm: Callable[[], None]) -> float:
    """Runs streams, does the harm in their midst, and compares all with what one engine gives.
    Returns the longest time between two pieces of a stream, in seconds."""
    prompts = [f"Story {i}: once upon a time" for i in range(NUM_STREAMS)]
    with LLM(str(demo_model_path()), **ENGINE) as llm:
        own = llm.get_default_sampling_params()
        params = [
            replace(own, max_tokens=NUM_TOKENS, seed=i, ignore_eos=True) for i in range(NUM_STREAMS)
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        expected = [output.outputs[0].text for output in outputs]
    chunks: list[Chunks] = [Chunks() for _ in prompts]
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
    harm()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert [text_of(into) for into in chunks] == expected
    assert all(into[-1] is None for into in chunks)
    assert counter(port, "replays") + counter(port, "retries") > 0
    assert counter(port, "cut_streams") == 0
    assert request(port, "/v1/models")[0] == 200
    return max(into.longest_s for into in chunks)


class Chunks(list[Any]):
    """Of a stream, with the longest time that it stood still."""

    def __init__(self) -> None:
        super().__init__()
        self.longest_s = 0.0
        self._at = 0.0

    def append(self, chunk: Any) -> None:
        now = time.monotonic()
        if self:
            self.longest_s = max(self.longest_s, now - self._at)
        self._at = now
        super().append(chunk)


def test_a_node_that_dies_loses_no_stream_and_changes_no_token(cluster: tuple[Any, int]) -> None:
    nodes, port = cluster

    def kill() -> None:
        victim = next(iter(nodes.worker_nodes))
        raylet = psutil.Process(victim.all_processes["raylet"][0].process.pid)
        for process in (raylet, *raylet.children(recursive=True)):  # as when the power fails
            process.send_signal(signal.SIGKILL)

    print(f"a node was killed: {check_streams(port, kill):.1f} s without a piece")


def test_a_link_that_is_cut_loses_no_stream_and_changes_no_token(
    spaces: tuple[list[str], int],
) -> None:
    links, port = spaces
    took = check_streams(port, lambda: ip("link", "set", links[0], "down"))
    print(f"a link was cut: {took:.1f} s without a piece")
