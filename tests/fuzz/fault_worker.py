"""Loads a model while its files, or the memory, fail at one step after the other. Prints a line of
JSON a try: the step, what came of it, and the tokens.

disk_faults.c is preloaded for "disk"; "memory" lowers the limit on address space step by step.
"""

from __future__ import annotations

import ctypes
import errno
import json
import resource
import sys
import traceback
from pathlib import Path

_ERRNOS = {"EIO": errno.EIO, "ENOMEM": errno.ENOMEM, "short": 0}
_STEP_BYTES = 256 * 1024


def tokens_of(path: Path) -> list[int]:
    """Loads, and answers."""
    from llmserve import LLM, SamplingParams

    options = dict(num_threads=1, max_model_len=32, num_gpu_blocks_override=8)
    with LLM(path, dtype="float32", **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=3)
        (output,) = llm.generate("hello", params, use_tqdm=False)
        completion = output.outputs[0]
        if completion.error is not None:
            raise OSError(completion.error)
        return list(completion.token_ids)


def outcome(path: Path) -> dict[str, object]:
    """The tokens, a refusal, or what is a finding."""
    from llmserve.errors import InternalError, LLMServeError

    try:
        return {"tokens": tokens_of(path)}
    except (LLMServeError, OSError, MemoryError) as error:
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, InternalError):
            return {"finding": text}
        return {"refused": text}
    except BaseException:
        return {"finding": traceback.format_exc()[-1500:]}


def main() -> None:
    """Tries until nothing fails any more."""
    what, path = sys.argv[1], Path(sys.argv[2])
    print(json.dumps({"step": -1, **outcome(path)}), flush=True)
    if what == "memory":
        _fail_memory(path)
    else:
        _fail_disk(path, _ERRNOS[what])


def _fail_disk(path: Path, error: int) -> None:
    shim = ctypes.CDLL(None)
    for step in range(10_000):
        shim.disk_faults_arm(str(path).encode(), step, error)
        result = outcome(path)
        num_faults = shim.disk_faults_count()
        shim.disk_faults_arm(b"", -1, 0)
        print(json.dumps({"step": step, "faults": num_faults, **result}), flush=True)
        if num_faults == 0:
            return


def _fail_memory(path: Path) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    used = pages * resource.getpagesize()
    no_limit = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    for step in range(10_000):
        resource.setrlimit(resource.RLIMIT_AS, (used + step * _STEP_BYTES, no_limit[1]))
        result = outcome(path)
        resource.setrlimit(resource.RLIMIT_AS, no_limit)
        print(json.dumps({"step": step, **result}), flush=True)
        if "tokens" in result:
            return


if __name__ == "__main__":
    main()
