"""What one HTTP request asks of the engine."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from llmserve.errors import InvalidArgument
from llmserve.prompts import SinglePrompt
from llmserve.requests.state import RequestState
from llmserve.sampling_params import SamplingParams
from llmserve.server.bodies import GenerationBody
from llmserve.server.constraints import constraint_name, named_error
from llmserve.server.errors import ApiError
from llmserve.server.models import ServedModel
from llmserve.server.pacing import DEFAULT_TIER, read_tier, read_tiers
from llmserve.server.sampling import timeout_s
from llmserve.server.settings import ServerSettings


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


def check_stream_options(body: GenerationBody) -> None:
    """Raises ApiError."""
    if body.stream_options is None:
        return
    if not body.stream:
        raise ApiError(400, "stream_options needs stream", param="stream_options")
    if body.stream_options.include_obfuscation:
        raise ApiError(
            400,
            "stream_options.include_obfuscation is not supported: chunks are not padded; leave it "
            "out, and where the sizes of packets must tell nothing, do not stream",
            param="stream_options",
            code="unsupported_parameter",
        )


def new_id(prefix: str) -> str:
    """A request id that nobody can guess."""
    return f"{prefix}-{os.urandom(16).hex()}"


async def generation_job(
    kind: str,
    body: GenerationBody,
    model: ServedModel,
    prompts: list[SinglePrompt],
    params: SamplingParams,
    settings: ServerSettings,
) -> Job:
    """The job of a body, its prompts checked and tokenized. kind: what its id begins with. Raises
    ApiError, InvalidArgument, ResourceExhausted."""
    tier = read_tier(body.service_tier, read_tiers(settings.pace))
    try:
        states = await model.llm.admit(prompts, params, priority=body.priority or 0)
    except InvalidArgument as error:
        raise named_error(error, body) from None
    return Job(
        new_id(kind),
        model,
        states,
        bool(body.stream),
        timeout_s(body.timeout, settings),
        tier,
        constraint_name(body),
    )
