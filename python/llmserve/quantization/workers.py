"""Threads for NumPy's work. Its BLAS has threads of its own, which wait by spinning: beside other
work on the same cores a product takes many times as long. So each call runs on one thread, and
several calls at once."""

import contextlib
import ctypes
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
# OpenBLAS's functions, as distributions and NumPy's wheels name them.
_PREFIXES = ("", "scipy_")
_SUFFIXES = ("", "64_", "_64")


class Workers:
    """Runs tasks on num_threads threads. To be closed."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads) if num_threads > 1 else None

    def map(self, task: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
        """Results in the order of the items; all are done once the iterator is."""
        return map(task, items) if self._pool is None else self._pool.map(task, items)

    def close(self) -> None:
        """Ends the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def single_threaded_blas() -> Iterator[None]:
    """OpenBLAS, where NumPy runs on it, uses one thread a call; another BLAS stays as it is."""
    functions = _thread_functions()
    if functions is None:
        yield
        return
    get, set_to = functions
    before = get()
    set_to(1)
    try:
        yield
    finally:
        set_to(before)


def _thread_functions() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        return None
    for path in sorted(set(re.findall(r"(/\S*openblas\S*\.so\S*)", maps))):
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        for prefix in _PREFIXES:
            for suffix in _SUFFIXES:
                name = f"{prefix}openblas_{{}}_num_threads{suffix}"
                get = getattr(library, name.format("get"), None)
                set_to = getattr(library, name.format("set"), None)
                if get is not None and set_to is not None:
                    return get, set_to
    return None
