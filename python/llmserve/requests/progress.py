"""The progress bar of `LLM.generate`."""

import time
from typing import Any

from llmserve.requests.state import RequestState


class Progress:
    """A tqdm bar that counts finished requests and shows tokens per second."""

    def __init__(self, num_requests: int, is_shown: bool) -> None:
        self._bar: Any = None  # tqdm has no types
        self._start = time.monotonic()
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        if is_shown:
            from tqdm.auto import tqdm

            self._bar = tqdm(
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
