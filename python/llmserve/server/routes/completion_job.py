"""From the body of a completion to the job that the engine is given: what every protocol that goes
on from prompts does, whatever its own words for it."""

from dataclasses import dataclass

from starlette.requests import Request

from llmserve.requests.generation_config import own_max_tokens
from llmserve.server.context import ServerContext, context
from llmserve.server.http.auth import tenant
from llmserve.server.routes.bodies import CompletionBody
from llmserve.server.routes.generation_job import generation_job
from llmserve.server.routes.prompts import prompts
from llmserve.server.routes.relay import Relay, relay_of
from llmserve.server.routes.request_body import arrived_at
from llmserve.server.routes.sampling import given_max_tokens, sampling_params, timeout_s
from llmserve.server.running.answer import Answer
from llmserve.server.running.generation import GenerationResponse
from llmserve.server.running.job import Job


@dataclass(frozen=True, slots=True)
class CompletionJob:
    """Prompts that go on."""

    server: ServerContext
    job: Job
    arrived: float  # when its request had come, by the loop's clock
    relay: Relay | None  # None: its client asked by itself

    def response(self, answer: Answer) -> GenerationResponse:
        """Runs it, and answers in these words. Raises ApiError."""
        if self.relay is not None:
            answer = self.relay.answer(answer, self.job)
        return GenerationResponse(self.server.activity, self.job, answer, self.arrived)


async def completion_job(
    request: Request,
    body: CompletionBody,
    kind: str,
    default_max_tokens: int | None = None,
    given_id: str = "",
) -> CompletionJob:
    """The job of a completion whose request's body has been read. default_max_tokens: where neither
    the request nor the model says how many; None is as many as the context holds. kind and
    given_id: as in `generation_job`. Raises ApiError, InvalidArgument, ResourceExhausted."""
    server = context(request)
    model = server.models.get(body.model)
    relay = relay_of(request)
    if relay is not None:
        body = relay.applied(body)
    defaults = model.default_params
    own = own_max_tokens(defaults)
    max_tokens = given_max_tokens(body.max_tokens, body.n_predict, own, default_max_tokens)
    echoed = body.logprobs if body.echo else None
    params = sampling_params(
        body,
        defaults,
        server.settings,
        None if max_tokens is None else max(max_tokens, 1),
        logprobs=body.logprobs,
        prompt_logprobs=body.prompt_logprobs if echoed is None else echoed,
        best_of=body.best_of,
    )
    max_num = max(server.settings.max_num_samples // (params.best_of or params.n), 1)
    limit_s = timeout_s(body.timeout, server.settings)
    arrived = arrived_at(request.scope)
    with server.activity.preparing(model, arrived, limit_s, tenant(request.scope)):
        given = await prompts(
            "prompt",
            body.prompt,
            model,
            max_num,
            add_special_tokens=body.add_special_tokens is not False,
            cache_salt=body.cache_salt or "",
            is_truncated=params.truncate_prompt_tokens is not None,
        )
        job = await generation_job(kind, body, model, given, params, server.settings, given_id)
    if relay is not None:
        job = relay.named(job, kind)
    return CompletionJob(server, job, arrived, relay)
