"""The progress bar of `LLM.generate`."""

import time
from collections.abc import Callable
from typing import Any

from llmserve.common.arguments import boolean
from llmserve.requests.state import RequestState

# Whether a bar is shown; or what makes one, called as tqdm.tqdm is.
UseTqdm = bool | Callable[..., Any]


def check_use_tqdm(use_tqdm: object) -> None:
    """Raises InvalidArgument."""
    if not callable(use_tqdm):
        boolean("use_tqdm", use_tqdm)


class Progress:
    """A tqdm bar that counts finished requests and shows tokens per second."""

    def __init__(self, num_requests: int, use_tqdm: UseTqdm) -> None:
        self._bar: Any = None  # tqdm has no types
        self._start = time.monotonic()
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        if use_tqdm:
            self._bar = _maker(use_tqdm)(
                total=num_requests, desc="Processed prompts", unit="req", dynamic_ncols=True
            )

    def finish(self, state: RequestState) -> None:
        """One more request is done."""
        if self._bar is None:
            return
        self._num_prompt_tokens += len(state.prompt.token_ids)
        self._num_generation_tokens += state.num_generation_tokens
        elapsed_s = max(time.monotonic() - self._start, 1e-9)
        self._bar.set_postfix_str(
            f"input {self._num_prompt_tokens / elapsed_s:.1f} tok/s, "
            f"output {self._num_generation_tokens / elapsed_s:.1f} tok/s",
            refresh=False,
        )
        self._bar.update(1)

    def close(self) -> None:
        """Leaves the bar as it is."""
        if self._bar is not None:
            self._bar.close()


def _maker(use_tqdm: UseTqdm) -> Callable[..., Any]:
    if callable(use_tqdm):
        return use_tqdm
    from tqdm.auto import tqdm

    bar: Callable[..., Any] = tqdm
    return bar
