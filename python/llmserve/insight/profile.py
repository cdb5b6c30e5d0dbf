"""start_profile and stop_profile: the engine's trace between them, as a file."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from llmserve.common.arguments import describe, refuse_unknown
from llmserve.errors import InvalidArgument

if TYPE_CHECKING:  # what a trace needs is imported where there is one
    from llmserve.insight.trace import Trace

_FOLDER = "torch_profiler_dir"  # as vLLM calls it
# What vLLM's profiler takes besides, which changes nothing in a trace of steps.
_OTHERS = (
    *("profiler", "torch_profiler_with_stack", "torch_profiler_with_flops"),
    *("torch_profiler_use_gzip", "torch_profiler_dump_cuda_time_total"),
    *("torch_profiler_record_shapes", "torch_profiler_with_memory", "ignore_frontend"),
    *("delay_iterations", "max_iterations", "warmup_iterations", "active_iterations"),
)


class Profile:
    """One engine's. config: {"torch_profiler_dir": a folder}; vLLM's variable of the environment,
    VLLM_TORCH_PROFILER_DIR, says the same."""

    def __init__(self, config: object) -> None:
        if config is None:
            config = {}
        if not isinstance(config, Mapping):
            raise InvalidArgument(
                f"profiler_config must be a dict with {_FOLDER!r}, got {describe(config)}"
            )
        refuse_unknown("profiler_config", map(str, config), (_FOLDER, *_OTHERS))
        folder = config.get(_FOLDER) or os.environ.get("VLLM_TORCH_PROFILER_DIR")
        self._folder = None if folder is None else Path(os.path.expanduser(str(folder)))
        self._start_us: int | None = None

    def start(self) -> None:
        """Notes the time. Raises InvalidArgument without a folder."""
        if self._folder is None:
            raise InvalidArgument(
                f"start_profile needs a folder for its file: LLM(profiler_config="
                f"{{{_FOLDER!r}: ...}}); LLM.trace().to_perfetto(path) writes what the engine did "
                f"of late at any time"
            )
        self._start_us = time.monotonic_ns() // 1000

    def stop(self, trace: "Trace") -> Path:
        """Writes the steps since then, for https://ui.perfetto.dev, and gives the file. Raises
        InvalidArgument where nothing was started or the file cannot be written."""
        if self._start_us is None or self._folder is None:
            raise InvalidArgument("stop_profile: no profile was started; call start_profile first")
        path = self._folder / f"llmserve-{os.getpid()}-{time.time_ns() // 10**6}.json"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            trace.since(self._start_us).to_perfetto(path)
        except OSError as error:
            raise InvalidArgument(
                f"profiler_config: {path} cannot be written: {error.strerror}"
            ) from None
        self._start_us = None
        return path
