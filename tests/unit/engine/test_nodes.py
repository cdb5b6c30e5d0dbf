"""Ranks in several processes: nodes that find each other, differ, die, hang and come back."""

from __future__ import annotations

import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from checkpoints import checkpoint
from far_link import NEAR, SPACE, far_link, ip
from llmserve import LLM, DeviceError, InvalidArgument, NotSupported, SamplingParams, _core
from llmserve import _core_testing as testing
from llmserve.cli.follow import make_node
from llmserve.options.engine_options import read_options
from llmserve.outputs import RequestOutput
from nodes import PATIENCE_S, Node, NodeProcess, free_port, nodes, wait_until

NOTICED_WITHIN_S = 5  # on a machine that is not busy; the suite allows three times as much
KEY = "a key of this test"
PROMPTS = [[5, 6, 7], list(range(3, 43)), [9] * 17, list(range(3, 60))]
PARAMS = [
    SamplingParams(max_tokens=24, ignore_eos=True, temperature=0, logprobs=2),
    SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.9, seed=3, n=2, logprobs=1),
    SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, repetition_penalty=1.3),
    SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.7, top_p=0.9, prompt_logprobs=1),
]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "num_gpu_blocks_override": 64,
    "max_num_batched_tokens": 50,
    "max_num_seqs": 8,
    "num_threads": 1,
    "cluster_key": KEY,
    "distributed_timeout_seconds": 60,
}


def run(llm: LLM, repeat: int = 1) -> list[RequestOutput]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS * repeat]
    return llm.generate(prompts, PARAMS * repeat, use_tqdm=False)


def words(outputs: list[RequestOutput]) -> list[object]:
    return [
        (sample.token_ids, sample.finish_reason, sample.logprobs, output.prompt_logprobs)
        for output in outputs
        for sample in output.outputs
    ]


def alone(repeat: int = 1, **options: Any) -> list[object]:
    with LLM(checkpoint("llama"), **{**OPTIONS, **options}) as llm:
        return words(run(llm, repeat))


def test_a_model_on_two_nodes_sleeps_and_wakes_and_gives_the_tokens_of_one() -> None:
    path = checkpoint("llama")
    with LLM(path, **OPTIONS) as llm:
        expected = [words(run(llm)) for _ in range(2)]
    with nodes(path, 2, tensor_parallel_size=2, **OPTIONS) as shared, LLM(path, **shared) as llm:
        assert "rank 0 of 2" in llm.description
        assert words(run(llm)) == expected[0]
        llm.sleep(level=2)
        llm.wake_up()
        assert words(run(llm)) == expected[1]
        assert llm.get_metrics().num_rank_failures == 0


def test_a_node_of_another_class_is_refused_by_what_differs() -> None:
    path = checkpoint("llama")
    shared = {**OPTIONS, "nnodes": 2, "tensor_parallel_size": 2, "master_port": free_port()}
    for different, told in (
        ({"dtype": "bfloat16"}, "dtype is bfloat16 there and float32 here"),
        ({"max_num_batched_tokens": 49}, "max_num_batched_tokens is 49 there and 50 here"),
        ({"tensor_parallel_cut": "rows"}, "tensor_parallel_cut is rows there and columns here"),
        ({"cluster_key": "another key of it"}, "give all nodes the same cluster_key"),
    ):
        other = Node(path, {**shared, **different, "node_rank": 1})
        given = {**shared, "distributed_timeout_seconds": 1}
        with pytest.raises(DeviceError, match=r"node 1 has not come to tcp:127\.0\.0\.1") as error:
            LLM(path, **given)
        assert told in str(error.value)
        other.stop()
        if "cluster_key" not in different:  # whose node is told nothing
            assert isinstance(other.failure, InvalidArgument)
            assert told in str(other.failure)


def test_other_weights_are_refused(tmp_path: Path) -> None:
    path = checkpoint("llama")
    for file in path.iterdir():
        content = bytearray(file.read_bytes())
        if file.suffix == ".safetensors":
            content[-1] ^= 1
        (tmp_path / file.name).write_bytes(content)
    shared = {**OPTIONS, "nnodes": 2, "tensor_parallel_size": 2, "master_port": free_port()}
    other = Node(tmp_path, {**shared, "node_rank": 1})
    with pytest.raises(DeviceError, match="would compute something else: weights is "):
        LLM(path, **{**shared, "distributed_timeout_seconds": 1})
    other.stop()


def test_a_node_finds_nobody_or_a_port_is_taken() -> None:
    path = checkpoint("llama")
    shared = {**OPTIONS, "nnodes": 2, "tensor_parallel_size": 2, "master_port": free_port()}
    other = Node(path, {**shared, "node_rank": 1, "distributed_timeout_seconds": 1})
    other.end()
    assert isinstance(other.failure, DeviceError)
    assert "node 0 is not found at 127.0.0.1:" in str(other.failure)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", shared["master_port"]))
        taken.listen()
        with pytest.raises(InvalidArgument, match=r"cannot listen on tcp:127\.0\.0\.1"):
            LLM(path, **shared)


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"node_rank": 1}, InvalidArgument, "node_rank=1 takes no requests: run `llmserve serve`"),
        ({"tensor_parallel_size": 1}, InvalidArgument, "nnodes=2 with 1 ranks: each node has at"),
        ({"data_parallel_size": 2}, NotSupported, "nnodes=2 with data_parallel_size=2: replicas"),
        ({"cluster_key": "short"}, InvalidArgument, "cluster_key needs at least 16 characters"),
        (
            {"master_addr": "192.0.2.1", "cluster_key": None},
            InvalidArgument,
            r"nnodes=2 at master_addr=192\.0\.2\.1 needs a cluster_key",
        ),
        ({"master_addr": "no such host"}, InvalidArgument, "master_addr: 'no such host' has no"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(
    options: dict[str, Any], error: type[Exception], told: str
) -> None:
    given = {**OPTIONS, "nnodes": 2, "tensor_parallel_size": 2, **options}
    with pytest.raises(error, match=told):
        LLM(checkpoint("llama"), **given)


def test_node_0_follows_nobody_and_others_need_a_length() -> None:
    given = {**OPTIONS, "nnodes": 2, "tensor_parallel_size": 2}
    with pytest.raises(InvalidArgument, match="node_rank=0 has rank 0 and takes requests"):
        make_node(str(checkpoint("llama")), given)
    with pytest.raises(InvalidArgument, match="max_model_len must be a number on node_rank 1"):
        make_node(str(checkpoint("llama")), {**given, "node_rank": 1, "max_model_len": "auto"})


def test_waiting_for_nodes_can_be_given_up() -> None:
    path = checkpoint("llama")
    shared = {**OPTIONS, "nnodes": 2, "tensor_parallel_size": 2, "master_port": free_port()}
    opened = _core.Checkpoint(str(path), "")
    request = read_options("LLM", path, shared).to_request(path)
    begin = time.monotonic()
    with _core.LoadingModel(_core.resolve_config(request, opened), opened):
        pass
    assert time.monotonic() - begin < shared["distributed_timeout_seconds"]


def test_garbage_ends_its_connection_and_nothing_else() -> None:
    path = checkpoint("llama")
    expected = alone()
    with nodes(path, 2, tensor_parallel_size=2, **OPTIONS) as shared, LLM(path, **shared) as llm:
        frame = testing.rank_frame_samples()[0]
        for sent in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 4096, frame, frame + b"\1" * 16):
            with socket.create_connection(("127.0.0.1", shared["master_port"])) as sock:
                sock.sendall(sent)
                sock.shutdown(socket.SHUT_WR)
                sock.settimeout(10)
                assert sock.recv(1) == b""
        assert words(run(llm)) == expected
        assert llm.get_metrics().num_rank_failures == 0


class Wire:
    """Somebody between two nodes, who once changes what the second one sends."""

    def __init__(self, port: int, change: Any) -> None:
        self._to = port
        self._change = change
        self._num_bytes = 0
        self.was_changed = False
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._to))
                except OSError:  # node 0 does not listen yet
                    near.close()
                    continue
                for one, other, is_out in ((near, far, True), (far, near, False)):
                    threading.Thread(
                        target=self._copy, args=(one, other, is_out), daemon=True
                    ).start()

    def _copy(self, one: socket.socket, other: socket.socket, is_out: bool) -> None:
        with suppress(OSError):
            while data := one.recv(4096):
                if is_out:
                    data = self._changed(data)
                other.sendall(data)
        for sock in (one, other):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _changed(self, data: bytes) -> bytes:
        with self._lock:
            self._num_bytes += len(data)
            if self.was_changed or self._num_bytes < 30_000 or len(data) < 100:
                return data
            self.was_changed = True
            return bytes(self._change(data))

    def close(self) -> None:
        self._listener.close()


def cut(_data: bytes) -> bytes:
    raise OSError


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:70] + bytes([data[70] ^ 1]) + data[71:],
        lambda data: data * 2,
        lambda data: data[1:],
        cut,
    ],
    ids=["changed", "repeated", "shorter", "cut"],
)
def test_what_happens_on_the_wire_changes_no_token(change: Any) -> None:
    path = checkpoint("llama")
    expected = alone(2)
    shared = {**OPTIONS, "nnodes": 2, "tensor_parallel_size": 2, "master_port": free_port()}
    wire = Wire(shared["master_port"], change)
    other = Node(path, {**shared, "node_rank": 1, "master_port": wire.port})
    try:
        with LLM(path, **shared) as llm:
            assert words(run(llm, 2)) == expected
            assert wire.was_changed
            assert llm.get_metrics().num_rank_failures == 1
    finally:
        other.stop()
        wire.close()


@pytest.fixture
def processes() -> Iterator[tuple[LLM, NodeProcess]]:
    path = checkpoint("llama")
    shared = {**OPTIONS, "nnodes": 2, "tensor_parallel_size": 2, "master_port": free_port()}
    other = NodeProcess(path, {**shared, "node_rank": 1})
    try:
        with LLM(path, **shared) as llm:
            yield llm, other
    finally:
        other.stop()


class Running:
    """Requests on a thread, long enough that something happens meanwhile."""

    def __init__(self, llm: LLM, repeat: int) -> None:
        self.outputs: list[RequestOutput] = []
        self._llm = llm
        self._thread = threading.Thread(target=self._run, args=(repeat,))
        self._thread.start()
        begun = llm.get_metrics().num_generation_tokens
        wait_until(
            lambda: llm.get_metrics().num_generation_tokens > begun + 8, "nothing is generated"
        )

    def _run(self, repeat: int) -> None:
        self.outputs = run(self._llm, repeat)

    def words(self) -> list[object]:
        self._thread.join(120)
        assert not self._thread.is_alive(), "requests hang"
        return words(self.outputs)


def test_a_node_that_is_killed_and_comes_back_changes_no_token(
    processes: tuple[LLM, NodeProcess],
) -> None:
    llm, other = processes
    expected = alone(8)
    running = Running(llm, 8)
    other.kill()
    begin = time.monotonic()
    wait_until(lambda: llm.get_metrics().num_rank_failures == 1, "nobody notices")
    assert time.monotonic() - begin < 3 * NOTICED_WITHIN_S
    other.start()
    assert running.words() == expected
    assert llm.get_metrics().num_rank_failures == 1


def test_a_node_that_stands_still_is_given_up_and_taken_back(
    processes: tuple[LLM, NodeProcess],
) -> None:
    llm, other = processes
    expected = alone(8)
    running = Running(llm, 8)
    other.signal(signal.SIGSTOP)
    begin = time.monotonic()
    wait_until(lambda: llm.get_metrics().num_rank_failures == 1, "nobody notices")
    assert time.monotonic() - begin < 3 * NOTICED_WITHIN_S
    other.signal(signal.SIGCONT)
    assert running.words() == expected


@pytest.mark.long
def test_a_link_that_is_down_is_noticed_and_costs_no_token_once_it_is_back() -> None:
    path = checkpoint("llama")
    expected = alone(8)
    shared = {**OPTIONS, "nnodes": 2, "tensor_parallel_size": 2, "master_port": free_port()}
    with far_link() as link:
        shared["master_addr"] = NEAR
        inside = ("ip", "netns", "exec", SPACE)
        other = NodeProcess(path, {**shared, "node_rank": 1}, inside)
        try:
            with LLM(path, **shared) as llm:
                running = Running(llm, 8)
                ip("link", "set", link, "down")
                begin = time.monotonic()
                wait_until(lambda: llm.get_metrics().num_rank_failures == 1, "nobody notices")
                assert time.monotonic() - begin < NOTICED_WITHIN_S
                time.sleep(2)  # nothing is given up meanwhile
                ip("link", "set", link, "up")
                assert running.words() == expected
                assert llm.get_metrics().num_rank_failures == 1
        finally:
            other.stop()


@pytest.fixture
def expected() -> list[object]:
    """Of one rank; asked for before `beside_faulty` changes what an LLM is made of."""
    return alone()


@pytest.fixture
def beside_faulty(expected: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    """LLMs take nodes of the module that has the faults: its build is another one."""

    class Loading:
        def __init__(self, config: _core.EngineConfig, _: _core.Checkpoint) -> None:
            self.config = config

        def __enter__(self) -> Loading:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    def engine(loading: Loading, vocabulary: _core.Vocabulary | None = None) -> _core.Engine:
        return testing.faulty_engine(loading.config, vocabulary=vocabulary)

    monkeypatch.setattr(_core, "LoadingModel", Loading)
    monkeypatch.setattr(_core, "Engine", engine)


class FaultyNode:
    """A node one of whose ranks fails in an exchange; its threads may be left where they hang."""

    def __init__(self, options: dict[str, Any], **faults: Any) -> None:
        path = str(checkpoint("llama"))
        given = read_options("serve", path, options)
        opened = _core.Checkpoint(path)
        self.node = testing.FaultyNode(
            given.to_request(opened.path), opened, testing.RankFaultOptions(**faults)
        )
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.node.run()
        except BaseException as error:
            self.failure = error.with_traceback(None)


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.usefixtures("beside_faulty")
def test_a_thread_of_a_living_node_that_hangs_is_noticed_and_costs_no_token(
    expected: list[object], rank: int
) -> None:
    """The first rank of a node computes on the thread that has called run()."""
    given = {**OPTIONS, "nnodes": 2, "tensor_parallel_size": 3, "master_port": free_port()}
    faults = {"rank": rank, "fault": "hang", "fail_at_exchange": 30, "still_s": 0.75}
    other = FaultyNode({**given, "node_rank": 1}, **faults)
    with LLM(checkpoint("llama"), **given) as llm:
        begin = time.monotonic()
        assert words(run(llm)) == expected
        assert 0.75 <= time.monotonic() - begin < 3 * NOTICED_WITHIN_S
        assert llm.get_metrics().num_rank_failures == 1
    other.thread.join(PATIENCE_S)
    assert (other.failure, other.node.left) == (None, "")


def assert_a_node_is_left_and_replaced(
    expected: list[object], given: dict[str, Any], **faults: Any
) -> FaultyNode:
    """The node, whose thread stays where it hangs; another one takes its place."""
    given = {**OPTIONS, **given, "nnodes": 2, "tensor_parallel_size": 3, "master_port": free_port()}
    broken = FaultyNode({**given, "node_rank": 1}, fault="stuck", **faults)
    found: list[list[object]] = []
    with LLM(checkpoint("llama"), **given) as llm:
        call = threading.Thread(target=lambda: found.append(words(run(llm))))
        call.start()
        wait_until(lambda: broken.node.left, "the node says that it has left a thread")
        assert re.search(r"rank \d of 2 has stood still.*restart the process", broken.node.left)
        other = FaultyNode({**given, "node_rank": 1})
        call.join()
        assert found == [expected]
        assert llm.get_metrics().num_rank_failures >= 1
    other.thread.join(PATIENCE_S)
    assert (other.failure, other.node.left) == (None, "")
    return broken


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.usefixtures("beside_faulty")
def test_a_thread_of_a_living_node_that_never_comes_back_ends_the_node(
    expected: list[object], rank: int
) -> None:
    broken = assert_a_node_is_left_and_replaced(
        expected, {}, rank=rank, fail_at_exchange=30, still_s=0.5, left_s=0.5
    )
    if rank == 2:
        wait_until(lambda: broken.failure, "run() has thrown")
        assert isinstance(broken.failure, DeviceError)


HALVES = {"enable_dbo": True, "dbo_prefill_token_threshold": 2}


@pytest.mark.usefixtures("beside_faulty")
def test_a_second_half_that_hangs_is_noticed_and_costs_no_token(expected: list[object]) -> None:
    given = {**OPTIONS, **HALVES, "nnodes": 2, "tensor_parallel_size": 2}
    given["master_port"] = free_port()
    faults = {"rank": 1, "fault": "hang", "fail_at_exchange": 5, "in_second_half": True}
    other = FaultyNode({**given, "node_rank": 1}, **faults)
    with LLM(checkpoint("llama"), **given) as llm:
        begin = time.monotonic()
        assert words(run(llm)) == expected
        assert 4 <= time.monotonic() - begin < 5 * NOTICED_WITHIN_S
        assert llm.get_metrics().num_rank_failures == 1
    other.thread.join(PATIENCE_S)
    assert (other.failure, other.node.left) == (None, "")


@pytest.mark.long
@pytest.mark.parametrize("second", [False, True])
@pytest.mark.usefixtures("beside_faulty")
def test_a_half_that_never_comes_back_ends_the_node(expected: list[object], second: bool) -> None:
    assert_a_node_is_left_and_replaced(
        expected, HALVES, rank=2, fail_at_exchange=5, in_second_half=second
    )


@pytest.mark.parametrize("second", [False, True])
def test_a_half_that_hangs_while_it_computes_leaves_its_rank(second: bool) -> None:
    """Though the other one waits for its turn."""
    reason = testing.hang_in_half(second)
    assert re.search(r"rank \d of 2 has stood still .* while others wait.*restart", reason)


def test_a_node_that_does_not_come_back_fails_the_requests_and_says_which() -> None:
    path = checkpoint("llama")
    shared = {**OPTIONS, "nnodes": 2, "tensor_parallel_size": 2, "master_port": free_port()}
    other = Node(path, {**shared, "node_rank": 1})
    with LLM(path, **{**shared, "distributed_timeout_seconds": 1}) as llm:
        running = Running(llm, 8)
        other.stop()
        running.words()
        ends = {sample.finish_reason for o in running.outputs for sample in o.outputs}
        assert "error" in ends
        errors = [sample.error for o in running.outputs for sample in o.outputs]
        assert any("node 1 has not come to tcp:127.0.0.1" in str(error) for error in errors)


def test_only_the_configured_port_is_listened_on() -> None:
    """Of three nodes the second has a port of its own, which the third goes to."""
    path = checkpoint("llama")
    before = listening()
    with (
        nodes(path, 3, tensor_parallel_size=3, **OPTIONS) as shared,
        LLM(path, **shared),
    ):
        now = listening() - before
        assert shared["master_port"] in {port for _, port in now}
        assert len(now) == 2
        assert {address for address, _ in now} == {"127.0.0.1"}
    with nodes(path, 2, tensor_parallel_size=2, **OPTIONS) as shared, LLM(path, **shared):
        assert {port for _, port in listening() - before} == {shared["master_port"]}


def listening() -> set[tuple[str, int]]:
    """Address and port of every socket on which this process or one that it started listens."""
    own = psutil.Process()
    found = set()
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add((connection.laddr.ip, connection.laddr.port))
    return found
