"""What one HTTP request asks of the engine."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from llmserve.requests.state import RequestState
from llmserve.server.models import ServedModel
from llmserve.server.tiers import DEFAULT_TIER


@dataclass(frozen=True, slots=True)
class Job:
    """The work of a request, and what its answer says of itself."""

    request_id: str
    model: ServedModel
    states: Sequence[RequestState]  # one a prompt
    is_streamed: bool
    timeout_s: float  # 0: no bound
    tier: str = DEFAULT_TIER
    constraint: str = ""  # the body's field that says what the text must match, if one does
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since the epoch

    @property
    def num_tokens(self) -> int:
        """The most that it may take: prompts, and the new tokens that the context has room for."""
        return sum(map(self._num_tokens, self.states))

    def _num_tokens(self, state: RequestState) -> int:
        num_prompt = len(state.prompt.token_ids)
        if state.pooling:
            return num_prompt
        room = self.model.llm.max_model_len - num_prompt
        return num_prompt + state.params.n * min(state.core_params.max_tokens, room)


def new_id(prefix: str) -> str:
    """A request id that nobody can guess: chatcmpl-…, or resp_… of a prefix that ends with _."""
    return f"{prefix}{'' if prefix.endswith('_') else '-'}{os.urandom(16).hex()}"
