"""What the process may take of the machine: control groups, read from a tree made for the test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from llmserve import _core_testing as testing

GIB = 2**30


def machine(root: Path, *, available: int = 16 * GIB, groups: str = "0::/\n") -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: {32 * GIB // 1024} kB\nMemFree: 1024 kB\n"
        f"MemAvailable: {available // 1024} kB\nSwapFree: {64 * GIB // 1024} kB\n"
    )
    (root / "proc/self/cgroup").write_text(groups)
    return root


def group(root: Path, folder: str, **files: object) -> None:
    path = root / "sys/fs/cgroup" / folder
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (path / name.replace("__", ".")).write_text(f"{content}\n")


def test_without_groups_it_is_what_the_system_has_without_swap(tmp_path: Path) -> None:
    limits = testing.read_memory_limits(machine(tmp_path))
    assert (limits.total_bytes, limits.available_bytes) == (32 * GIB, 16 * GIB)
    assert limits.bounded_by == ""


def test_a_v2_group_leaves_its_limit_less_what_it_uses(tmp_path: Path) -> None:
    machine(tmp_path)
    group(tmp_path, "", memory__max=4 * GIB, memory__current=GIB)
    limits = testing.read_memory_limits(tmp_path)
    assert (limits.total_bytes, limits.available_bytes) == (4 * GIB, 3 * GIB)
    assert limits.bounded_by.endswith("sys/fs/cgroup/memory.max")


def test_page_cache_counts_as_available(tmp_path: Path) -> None:
    machine(tmp_path)
    stat = f"anon {GIB}\nactive_file {GIB // 2}\ninactive_file {GIB}\nslab_reclaimable {GIB // 4}\n"
    group(tmp_path, "", memory__max=4 * GIB, memory__current=3 * GIB, memory__stat=stat)
    assert testing.read_memory_limits(tmp_path).available_bytes == GIB + 7 * GIB // 4


def test_memory_high_is_a_limit_too(tmp_path: Path) -> None:
    machine(tmp_path)
    group(tmp_path, "", memory__max="max", memory__high=2 * GIB, memory__current=GIB)
    limits = testing.read_memory_limits(tmp_path)
    assert limits.available_bytes == GIB
    assert limits.bounded_by.endswith("memory.high")


def test_the_tightest_of_the_enclosing_groups_counts(tmp_path: Path) -> None:
    machine(tmp_path, groups="0::/pods/one\n")
    group(tmp_path, "pods", memory__max=3 * GIB, memory__current=2 * GIB)
    group(tmp_path, "pods/one", memory__max=2 * GIB, memory__current=GIB // 4)
    limits = testing.read_memory_limits(tmp_path)
    assert limits.available_bytes == GIB
    assert limits.total_bytes == 2 * GIB
    assert limits.bounded_by.endswith("pods/memory.max")


def test_a_v1_group_is_read_by_its_controller(tmp_path: Path) -> None:
    machine(tmp_path, groups="5:cpuset,memory:/docker/abc\n0::/\n")
    files = {
        "memory__limit_in_bytes": 4 * GIB,
        "memory__usage_in_bytes": 2 * GIB,
        "memory__stat": f"total_inactive_file {GIB}\ninactive_file 5",
    }
    # In a container the group's own folder is mounted as the controller's top.
    group(tmp_path, "memory", **files)
    limits = testing.read_memory_limits(tmp_path)
    assert limits.available_bytes == 3 * GIB
    assert limits.bounded_by.endswith("memory/memory.limit_in_bytes")


def test_a_v1_limit_of_an_enclosing_group_that_is_not_shown_counts(tmp_path: Path) -> None:
    machine(tmp_path, groups="5:memory:/\n")
    group(
        tmp_path,
        "memory",
        memory__limit_in_bytes=9223372036854771712,
        memory__usage_in_bytes=GIB,
        memory__stat=f"hierarchical_memory_limit {3 * GIB}",
    )
    assert testing.read_memory_limits(tmp_path).available_bytes == 2 * GIB


@pytest.mark.parametrize("limit", [9223372036854771712, 4 * GIB])
def test_statistics_that_lag_behind_the_usage_add_nothing(tmp_path: Path, limit: int) -> None:
    machine(tmp_path, groups="5:memory:/\n")
    group(
        tmp_path,
        "memory",
        memory__limit_in_bytes=limit,
        memory__usage_in_bytes=GIB,
        memory__stat=f"total_inactive_file {GIB}\ntotal_active_file {1 << 20}",
    )
    limits = testing.read_memory_limits(tmp_path)
    assert limits.available_bytes == min(limit, 16 * GIB)


@pytest.mark.parametrize("limit", ["max", "9223372036854771712"])
def test_no_limit_is_no_limit(tmp_path: Path, limit: str) -> None:
    machine(tmp_path)
    group(tmp_path, "", memory__max=limit, memory__high="max", memory__current=GIB)
    limits = testing.read_memory_limits(tmp_path)
    assert (limits.total_bytes, limits.available_bytes) == (32 * GIB, 16 * GIB)


def test_a_group_above_its_limit_leaves_nothing(tmp_path: Path) -> None:
    machine(tmp_path)
    group(tmp_path, "", memory__max=GIB, memory__current=2 * GIB)
    assert testing.read_memory_limits(tmp_path).available_bytes == 0


@pytest.mark.parametrize("path", ["/../sibling", "/gone/away", "/", ""])
def test_groups_that_cannot_be_seen_are_no_trouble(tmp_path: Path, path: str) -> None:
    machine(tmp_path, groups=f"garbage\n0::{path}\n7:cpuset:/x\n")
    group(tmp_path, "", memory__max=4 * GIB, memory__current=GIB)
    group(tmp_path.parent, "sibling", memory__max=1, memory__current=0)
    assert testing.read_memory_limits(tmp_path).available_bytes == 3 * GIB


def test_this_machine_has_memory() -> None:
    limits = testing.read_memory_limits("/")
    assert 0 < limits.available_bytes <= limits.total_bytes


# What is printed of the error, and of doing with less.
IN_LITTLE_MEMORY = """
import resource, sys

import numpy as np
from llmserve import BlockAllocator, ops
from llmserve.errors import ResourceExhausted

used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
unlimited = resource.getrlimit(resource.RLIMIT_AS)
x, weight = np.ones((2, 4), np.float32), np.ones(4, np.float32)
resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20), unlimited[1]))
try:
    if sys.argv[1] == "threads":
        ops.rms_norm(x, weight, num_threads=1000)
    else:
        BlockAllocator(num_blocks=100_000_000, block_size=16)
except ResourceExhausted as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, unlimited)
print(ops.rms_norm(x, weight, num_threads=2).shape)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer ends it")
@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("threads", "a thread could not be started (Resource temporarily unavailable); lower"),
        ("memory", "the system gives this process no more memory; ask for a smaller model"),
    ],
)
def test_what_the_system_refuses_is_an_error_and_no_crash(wanted: str, message: str) -> None:
    command = [sys.executable, "-c", IN_LITTLE_MEMORY, wanted]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    refusal, result = done.stdout.splitlines()
    assert refusal.startswith(message)
    assert result == "(2, 4)"
