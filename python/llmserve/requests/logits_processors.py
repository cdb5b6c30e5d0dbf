"""Runs the Python logits processors of one engine, off its thread.

The engine's thread hands each row to a queue and waits without the GIL. A worker here takes it and
calls the functions. Before it does, it sees to it that another worker waits, so that a function
that never comes back holds up its own request only, until that is aborted.
"""

import itertools
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmserve import _core
from llmserve.errors import InvalidArgument
from llmserve.sampling_params import PythonLogitsProcessor

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# How long close() waits for a function to come back. A thread that is still in one then is left to
# it, and ends with the process.
_JOIN_S = 1.0


class LogitsProcessorRunner:
    """One engine's. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._workers = _Workers()
        # Without it a worker that waits when the interpreter ends would be torn down in C++.
        self._finalizer = weakref.finalize(self, self._workers.close)

    def attach(self, functions: Sequence[PythonLogitsProcessor]) -> _core.LogitsProcessor:
        """What stands for the functions in one request; they are let go of with it."""
        return self._workers.attach(tuple(functions))

    def check_may_wait(self) -> None:
        """Raises InvalidArgument in a function that has been called here: the engine waits for it,
        and neither would ever go on."""
        if threading.get_ident() in self._workers.in_functions:
            raise InvalidArgument(
                "a logits processor cannot wait for its own LLM, whose engine waits for it; "
                "generate before, or with another LLM"
            )

    def close(self) -> None:
        """Ends the workers; rows that wait fail."""
        self._finalizer()


class _Workers:
    def __init__(self) -> None:
        self._queue = _core.ProcessorQueue()
        self._functions: dict[int, tuple[PythonLogitsProcessor, ...]] = {}
        self._keys = itertools.count()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()  # guards _threads
        self.in_functions: set[int] = set()  # the threads that are

    def attach(self, functions: tuple[PythonLogitsProcessor, ...]) -> _core.LogitsProcessor:
        key = next(self._keys)
        self._functions[key] = functions
        processor = self._queue.make_processor(key)
        self._see_to_worker()
        return processor

    def close(self) -> None:
        self._queue.close()
        with self._lock:
            threads = [t for t in self._threads if t is not threading.current_thread()]
        for thread in threads:
            thread.join(_JOIN_S)

    def _see_to_worker(self) -> None:
        """A worker that waits, or is about to."""
        with self._lock:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            if len(self._threads) > self._queue.num_taken:
                return
            thread = threading.Thread(
                target=self._work, name="llmserve-logits-processors", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        while (job := self._queue.take()) is not None:
            if job.is_release:
                self._functions.pop(job.key, None)
                continue
            self._see_to_worker()
            self.in_functions.add(threading.get_ident())
            error = _process(job, self._functions.get(job.key, ()))
            self.in_functions.discard(threading.get_ident())
            if not self._queue.finish(job, error):
                break  # nobody waited any more, and another has taken this one's place


def _process(job: _core.ProcessorJob, functions: Sequence[PythonLogitsProcessor]) -> str:
    """Why it failed; empty if it did not."""
    for idx, function in enumerate(functions):
        name = getattr(function, "__name__", type(function).__name__)
        try:
            logits = job.logits
            result = function(job.token_ids, logits)
            if result is not None and result is not logits:
                _copy(result, logits)
        except BaseException as error:  # SystemExit too: the thread is not the function's to end
            return f"logits_processors[{idx}] ({name}) raised {type(error).__name__}: {error}"
    return ""


def _copy(result: object, logits: "npt.NDArray[np.float32]") -> None:
    import numpy as np  # here, so that importing llmserve stays quick

    array = np.asarray(result)
    if array.shape != logits.shape:
        raise ValueError(
            f"it returned an array of shape {array.shape}; expected {logits.shape}, or None after "
            f"changing the logits in place"
        )
    logits[:] = array
