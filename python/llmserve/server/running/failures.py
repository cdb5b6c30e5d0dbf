"""Why the engine gave up on a request: for what the request itself asks, or for something that is
wrong with the engine, from which others suffer, too."""

from llmserve.server.http.errors import ApiError
from llmserve.server.running.job import Job

# Beginnings of the engine's messages (csrc/sampling/sampler.cpp, csrc/text/llguidance.cpp) that no
# other request can have a part in. All others count as failures of the engine.
_NO_TOKEN = "no token is left to draw"
_NO_MASK = "the grammar cannot be followed"
# What rules out tokens, alone or together.
_RULES = (
    *("structured_outputs", "allowed_token_ids", "bad_words", "min_tokens"),
    *("logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty"),
)


# And of those that say something of the request; of others a client is not told what they are.
_TOLD = ("the sequence needs", "the logits of position")


def generation_error(message: str, job: Job) -> ApiError:
    """What a client is told of an engine's error: 400 that names the parameters that brought it
    about, or 500, whose reason is in the log unless it is the request's own."""
    names = [job.constraint] if message.startswith(_NO_MASK) else []
    if message.startswith(_NO_TOKEN):
        names = _rules(job)
        message = f"{message.partition(':')[0]}; allow more"
    if not names:
        told = f"the engine failed at this request; the server's log has {job.request_id}"
        told = message if message.startswith(_TOLD) else told
        return ApiError(500, told, code="generation_failed")
    return ApiError(400, f"{' and '.join(names)}: {message}", param=names[0])


def _rules(job: Job) -> list[str]:
    """Those that the request sets, by the names that its body gives them; not the model's own."""
    params, own = job.states[0].params, job.model.default_params
    names = [name for name in _RULES if getattr(params, name) != getattr(own, name)]
    return [job.constraint if name == "structured_outputs" else name for name in names]
