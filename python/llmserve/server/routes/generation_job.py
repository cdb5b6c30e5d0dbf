"""From a body to the job that the engine is given."""

from collections.abc import Sequence

from llmserve.errors import InvalidArgument
from llmserve.prompts import SinglePrompt
from llmserve.requests.state import RequestState
from llmserve.sampling_params import SamplingParams
from llmserve.server.http.errors import ApiError
from llmserve.server.models import ServedModel
from llmserve.server.routes.beams import beam_params
from llmserve.server.routes.bodies import GenerationBody, StreamOptions
from llmserve.server.routes.constraints import constraint_name, named_error
from llmserve.server.routes.llama_fields import FIELDS as LLAMA_FIELDS
from llmserve.server.routes.neutral_fields import check_neutral
from llmserve.server.routes.sampling import timeout_s
from llmserve.server.routes.vllm_fields import FIELDS
from llmserve.server.running.job import Job, new_id
from llmserve.server.settings import ServerSettings
from llmserve.server.tiers import read_tier, read_tiers


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


async def generation_job(
    kind: str,
    body: GenerationBody,
    model: ServedModel,
    prompts: list[SinglePrompt],
    params: SamplingParams,
    settings: ServerSettings,
    given_id: str = "",
) -> Job:
    """The job of a body, its prompts checked and tokenized. kind: what its id begins with.
    given_id: what it ends with; empty for one that nobody can guess. Raises ApiError,
    InvalidArgument, ResourceExhausted."""
    check_neutral(body, FIELDS)
    check_neutral(body, LLAMA_FIELDS)
    if params.thinking_token_budget is not None and not model.llm.can_bound_thinking:
        raise ApiError(
            400,
            "thinking_token_budget needs a model whose tokenizer has <think> and </think>, between "
            "which tokens are counted; leave it out",
            param="thinking_token_budget",
            code="unsupported_parameter",
        )
    if body.stream and body.stream_options is None and settings.is_lenient("stream_usage"):
        body.stream_options = StreamOptions(include_usage=True)
    if body.return_tokens_as_token_ids is None and settings.is_lenient("token_ids"):
        body.return_tokens_as_token_ids = True
    tier = read_tier(body.service_tier, read_tiers(settings.pace))
    try:
        beams = beam_params(body, params, model)
        resumed = body.resume_token_ids or ()
        if resumed and params.has_logprobs and not body.stream:
            raise ApiError(
                400,
                "resume_token_ids have no logprobs here: who has them streams the rest",
                param="resume_token_ids",
            )
        if resumed and (beams is not None or params.seed is None):
            raise ApiError(
                400,
                "resume_token_ids go on with a sequence that was drawn with a seed; give seed, and "
                "leave use_beam_search out",
                param="resume_token_ids",
            )
        if beams is not None and body.hand_over_ticket:
            raise ApiError(400, "use_beam_search hands nothing over", param="hand_over_ticket")
        states: Sequence[RequestState]
        if beams is not None:
            states = await model.llm.admit_beam_search(prompts, beams, params.skip_special_tokens)
        else:
            states = await model.llm.admit(
                prompts,
                params,
                priority=body.priority or 0,
                resumed_token_ids=resumed,
                hand_over_ticket=body.hand_over_ticket or "",
            )
    except InvalidArgument as error:
        raise named_error(error, body) from None
    return Job(
        f"{kind}-{given_id}" if given_id else new_id(kind),
        model,
        states,
        bool(body.stream),
        timeout_s(body.timeout, settings),
        tier,
        constraint_name(body),
    )
