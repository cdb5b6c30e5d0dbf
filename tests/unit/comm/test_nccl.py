"""The NCCL communicator against a stand-in of the library: what works, fails, hangs, is missing."""

import ctypes
import gc
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
from llmserve import _core_testing as testing
from llmserve.errors import DeviceError, InvalidArgument, NotSupported

SOURCE = Path(__file__).parents[2] / "fake_nccl.c"
REMOTE_ERROR = 6


def build(folder: Path, *flags: str) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libnccl.so.2"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", *flags, "-o", library, SOURCE], check=True)
    return library


class Fake:
    """A library of its own for each test, so that no test sees another's faults."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self._library = ctypes.CDLL(str(build(folder)))

    def __getitem__(self, name: str) -> int:
        return ctypes.c_int.in_dll(self._library, f"fake_{name}").value

    def __setitem__(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self._library, f"fake_{name}").value = value

    def alone(self, kind: str):
        """One rank of a kind of the registry."""
        group = testing.communicator_group(kind, folder=self.folder)
        return group.join(0, testing.make_backend("ref"))

    def log(self) -> list[str]:
        """What the library was asked to exchange since the last look."""
        log = (ctypes.c_char * 4096).in_dll(self._library, "fake_log")
        calls = log.value.decode().split(";")[:-1]
        log.value = b""
        return calls

    def connect(self, **options):
        return testing.nccl_communicator(testing.make_backend("ref"), folder=self.folder, **options)


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return Fake(tmp_path / "nccl")


def test_the_library_is_found_and_says_what_it_is(fake):
    path, version, description = testing.nccl_library(fake.folder)
    assert path == f"{fake.folder}/libnccl.so.2"
    assert (version, description) == (22703, "NCCL 2.27.3")
    assert fake.connect().description == "NCCL 2.27.3, rank 0 of 1"


@pytest.mark.parametrize("make", ["single", "shm", "nccl"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16])
def test_one_rank_gets_what_it_gave(fake, make, dtype):
    ranks = fake.alone(make)
    assert (ranks.rank, ranks.world_size) == (0, 1)
    x = np.arange(12).reshape(3, 4).astype(dtype)
    data, gathered, part = x.copy(), np.zeros((3, 4), dtype), np.zeros((3, 4), dtype)
    ranks.all_reduce(data)
    ranks.all_reduce(data, "max")
    ranks.broadcast(data)
    ranks.all_gather(x, gathered)
    ranks.reduce_scatter(x, part)
    ranks.barrier()
    exchanged, scattered = np.zeros_like(x), np.zeros_like(x)
    ranks.all_to_all(x, exchanged)
    ranks.all_to_all(exchanged, scattered, [12], [12])
    for got in (data, gathered, part, exchanged, scattered):
        np.testing.assert_array_equal(got, x)


@pytest.mark.parametrize("make", ["single", "shm", "nccl"])
def test_bad_tensors_are_named_and_change_nothing(fake, make):
    ranks = fake.alone(make)
    x = np.zeros((4, 4), np.float32)
    with pytest.raises(InvalidArgument, match="all_reduce: expected a contiguous tensor"):
        ranks.all_reduce(x[:, ::2])
    with pytest.raises(InvalidArgument, match=r"all_gather: expected 1 times .*\[4, 4\], got"):
        ranks.all_gather(x, np.zeros((4, 5), np.float32))
    with pytest.raises(InvalidArgument, match="reduce_scatter: expected"):
        ranks.reduce_scatter(x, np.zeros((4, 4), np.float16))
    with pytest.raises(InvalidArgument, match="broadcast: expected root"):
        ranks.broadcast(x, 1)
    ranks.barrier()
    with pytest.raises(InvalidArgument, match="expected a rank in"):
        fake.connect(rank=2, world_size=2)


def test_rank_and_size_are_the_librarys_and_calls_are_polled_until_taken_in(fake):
    fake["in_progress"] = 5
    ranks = fake.connect(rank=1, world_size=3)
    assert (fake["rank"], fake["world_size"], fake["in_progress"]) == (1, 3, 0)
    fake["call_result"], fake["in_progress"] = 7, 4  # in progress
    ranks.all_reduce(np.zeros(4, np.float32))
    assert (fake["calls"], fake["in_progress"], fake["aborted"]) == (1, 0, 0)


def test_uneven_parts_are_calls_of_one_group(fake):
    """NCCL has no collectives of uneven parts; a part of no elements makes no call."""
    ranks = fake.connect(rank=1, world_size=4)
    fake.log()
    part, whole = np.zeros(5, np.float32), np.zeros(9, np.float32)
    ranks.all_gather(part, whole, [3, 5, 0, 1])
    assert fake.log() == [
        "group",
        "broadcast 3 type 7 root 0",
        "broadcast 5 type 7 root 1",
        "broadcast 1 type 7 root 3",
        "end",
    ]
    ranks.reduce_scatter(whole, part, "max", [3, 5, 0, 1])
    assert fake.log() == [
        "group",
        "reduce 3 type 7 op 2 root 0",
        "reduce 5 type 7 op 2 root 1",
        "reduce 1 type 7 op 2 root 3",
        "end",
    ]
    ranks.all_to_all(whole, np.zeros(7, np.float32), [0, 4, 2, 3], [1, 4, 0, 2])
    assert fake.log() == [
        "group",
        *("recv 1 type 7 from 0", "send 4 type 7 to 1", "recv 4 type 7 from 1"),
        *("send 2 type 7 to 2", "send 3 type 7 to 3", "recv 2 type 7 from 3"),
        "end",
    ]


def test_columns_are_gathered_by_what_moves_the_least(fake):
    """A row goes to its place; of several each rank's columns go together, through a buffer."""
    ranks = fake.connect(rank=1, world_size=3)
    fake.log()
    for rows in (1, 4):
        own, even, uneven = (np.zeros((rows, n), np.float32) for n in (2, 6, 7))
        ranks.gather_columns(own, even, [2, 2, 2])
        ranks.gather_columns(own, uneven, [1, 2, 4])
        ranks.gather_columns(own, None, [1, 2, 4], 0)
        ranks.gather_columns(own, uneven, [5, 2, 0], 1)
        assert fake.log() == [
            f"all_gather {2 * rows} type 7",
            "group",
            *(f"broadcast {n * rows} type 7 root {i}" for i, n in enumerate((1, 2, 4))),
            "end",
            *("group", f"send {2 * rows} type 7 to 0", "end"),
            *("group", f"recv {5 * rows} type 7 from 0", "end"),
        ]
    ranks.gather_columns(np.zeros((0, 2), np.float32), np.zeros((0, 6), np.float32), [2, 2, 2])
    assert fake.log() == []


@pytest.mark.parametrize(
    ("dtype", "count", "type_"),
    [
        (np.float32, 6, 7),
        (np.float16, 6, 6),
        (np.uint16, 6, 9),
        (np.int32, 24, 0),
        (np.int64, 48, 0),
    ],
)
def test_what_is_only_moved_may_be_of_any_dtype(fake, dtype, count, type_):
    ranks = fake.connect(rank=0, world_size=2)
    fake.log()
    x = np.zeros((2, 3), dtype)
    ranks.send(x, 1)
    ranks.recv(x, 1)
    ranks.broadcast(x, 1)
    ranks.all_gather(x, np.zeros((4, 3), dtype))
    assert fake.log() == [
        f"send {count} type {type_} to 1",
        f"recv {count} type {type_} from 1",
        f"broadcast {count} type {type_} root 1",
        f"all_gather {count} type {type_}",
    ]


def test_a_call_that_fails_within_a_group_ends_the_group_and_aborts(fake):
    ranks = fake.connect()
    fake["call_result"] = 1
    fake.log()
    with pytest.raises(DeviceError, match="ncclSend and ncclRecv: unhandled cuda error"):
        ranks.all_to_all(np.zeros(4, np.float32), np.zeros(4, np.float32))
    assert fake.log()[-1] == "end"
    assert fake["aborted"] == 1


def test_a_communicator_that_goes_says_goodbye_and_one_that_was_aborted_does_not(fake):
    ranks = fake.connect()
    del ranks
    gc.collect()
    assert (fake["finalized"], fake["destroyed"], fake["aborted"]) == (1, 1, 0)
    ranks = fake.connect()
    ranks.abort()
    ranks.abort()
    with pytest.raises(DeviceError, match="has ended: it was aborted"):
        ranks.barrier()
    del ranks
    gc.collect()
    assert (fake["finalized"], fake["destroyed"], fake["aborted"]) == (1, 1, 1)


def test_an_error_that_comes_later_aborts_with_its_text(fake):
    ranks = fake.connect()
    data = np.zeros(4, np.float32)
    ranks.all_reduce(data)
    ranks.check()
    fake["async_error"] = REMOTE_ERROR
    with pytest.raises(
        DeviceError, match=r"rank 0 of 1: an exchange: remote process exited; socket 3 closed"
    ):
        ranks.check()
    assert fake["aborted"] == 1
    for call in (ranks.check, ranks.wait, ranks.barrier, lambda: ranks.all_reduce(data)):
        with pytest.raises(DeviceError, match=r"has ended: .*remote process exited"):
            call()
    assert (fake["aborted"], fake["calls"]) == (1, 1)


@pytest.mark.parametrize(
    ("fault", "value", "message"),
    [
        ("id_result", 1, "ncclGetUniqueId failed: unhandled cuda error"),
        ("init_result", 1, "ncclCommInitRankConfig: unhandled cuda error"),
        ("async_error", REMOTE_ERROR, "ncclCommInitRankConfig: remote process exited"),
    ],
)
def test_ranks_that_do_not_meet_are_an_error(fake, fault, value, message):
    fake[fault] = value
    with pytest.raises(DeviceError, match=message):
        fake.connect()
    assert fake["aborted"] == (0 if fault == "id_result" else 1)


def test_a_call_that_fails_at_once_aborts(fake):
    ranks = fake.connect()
    fake["call_result"] = 1
    with pytest.raises(DeviceError, match="ncclAllReduce: unhandled cuda error"):
        ranks.all_reduce(np.zeros(4, np.float32))
    assert fake["aborted"] == 1


def test_ranks_that_never_come_are_waited_for_no_longer_than_the_limit(fake):
    fake["in_progress"] = -1
    with pytest.raises(DeviceError, match="ncclCommInitRankConfig has not ended within 30 ms"):
        fake.connect(timeout_s=0.03)
    assert fake["aborted"] == 1


def test_an_exchange_that_hangs_is_aborted_at_the_limit(fake):
    ranks = fake.connect(timeout_s=0.03, is_done=lambda: False)
    with pytest.raises(DeviceError, match=r"not done within 30 ms; a rank may be gone"):
        ranks.barrier()
    assert fake["aborted"] == 1


def test_a_wait_ends_when_another_thread_aborts(fake):
    waiting = threading.Event()

    def is_done() -> bool:
        waiting.set()
        return False

    ranks = fake.connect(timeout_s=3600, is_done=is_done)
    errors: list[Exception] = []

    def run() -> None:
        try:
            ranks.barrier()
        except DeviceError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert waiting.wait(600)
    ranks.abort()
    thread.join(600)
    assert "it was aborted" in str(errors[0])
    assert fake["aborted"] == 1


def test_a_missing_library_names_the_extra(tmp_path):
    # Of another process: here another test, or torch, may have loaded one.
    text = (
        "from llmserve import _core_testing as testing\n"
        "try: print('found', testing.nccl_library())\n"
        "except NotImplementedError as error: print(error)"
    )
    import sys

    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    if done.stdout.startswith("found"):
        pytest.skip("NCCL is installed here")
    assert "libnccl.so.2" in done.stdout
    assert "pip install 'llmserve[cuda]'" in done.stdout
    assert "nvidia-nccl-cu13" in done.stdout


def test_a_library_that_lacks_a_function_or_is_too_old_is_refused_by_name(tmp_path):
    build(tmp_path / "less", "-DFAKE_WITHOUT_LAST_ERROR")
    with pytest.raises(NotSupported, match=r"libnccl\.so\.2 has no ncclGetLastError"):
        testing.nccl_library(str(tmp_path / "less"))
    old = Fake(tmp_path / "old")
    old["version"] = 21403
    with pytest.raises(NotSupported, match=r"version code 21403, and 21800 \(2\.18\) or later"):
        testing.nccl_library(old.folder)
