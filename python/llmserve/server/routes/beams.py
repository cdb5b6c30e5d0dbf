"""vLLM's use_beam_search: a body that asks for the most likely continuations."""

from llmserve.beam_search_params import BeamSearchParams
from llmserve.errors import InvalidArgument
from llmserve.sampling_params import SamplingParams
from llmserve.server.http.errors import ApiError
from llmserve.server.models import ServedModel
from llmserve.server.routes.bodies import GenerationBody

# What a search knows nothing of. It needs nothing of what shapes a draw (temperature, seed …).
_NOT_OF_A_SEARCH = (
    *("stop", "stop_token_ids", "min_tokens", "best_of", "prompt_logprobs", "logprob_token_ids"),
    *("logit_bias", "allowed_token_ids", "bad_words", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "thinking_token_budget", "repetition_detection", "stream"),
    *("truncate_prompt_tokens", "priority", "cache_salt"),
)


def beam_params(
    body: GenerationBody, params: SamplingParams, model: ServedModel
) -> BeamSearchParams | None:
    """The search that a body asks for; None: it asks for none. Raises ApiError."""
    if not body.use_beam_search:
        if body.length_penalty not in (None, 1.0):
            raise ApiError(
                400, "length_penalty needs use_beam_search: true", param="length_penalty"
            )
        return None
    for name in _NOT_OF_A_SEARCH:
        if getattr(body, name, None):
            raise _refused(name)
    if params.structured_outputs is not None:
        raise _refused("structured output")
    max_tokens = params.max_tokens or model.llm.max_model_len
    try:
        return BeamSearchParams(
            beam_width=params.n,
            max_tokens=max_tokens,
            ignore_eos=params.ignore_eos,
            length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
            include_stop_str_in_output=params.include_stop_str_in_output,
        )
    except InvalidArgument as error:
        raise ApiError(400, f"use_beam_search: {error}", param="use_beam_search") from None


def _refused(name: str) -> ApiError:
    return ApiError(
        400,
        f"{name} is not supported with use_beam_search: the search gives the n most likely "
        f"continuations as a whole; leave one of them out",
        param=name if name in _NOT_OF_A_SEARCH else "use_beam_search",
        code="unsupported_parameter",
    )
