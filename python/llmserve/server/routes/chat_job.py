"""From the body of a conversation to the job that the engine is given, and how its answer is read:
what every protocol that speaks of conversations does, whatever its own words for it."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from starlette.requests import Request

from llmserve.common.text_threads import on_text_thread
from llmserve.parsers.reasoning import ReasoningStyle
from llmserve.prompts import TokensPrompt
from llmserve.requests.generation_config import own_max_tokens
from llmserve.sampling_params import SamplingParams
from llmserve.server.context import ServerContext, context
from llmserve.server.http.auth import tenant
from llmserve.server.http.errors import ApiError
from llmserve.server.models import ServedModel
from llmserve.server.routes.bodies import ChatBody
from llmserve.server.routes.chat_parser import (
    ChatFormat,
    chat_format,
    served_reasoning_style,
    served_tool_style,
)
from llmserve.server.routes.constraints import (
    special_token_id,
    tool_names,
    with_calls,
    with_reasoning,
)
from llmserve.server.routes.generation_job import check_stream_options, generation_job
from llmserve.server.routes.prompts import chat_prompt
from llmserve.server.routes.relay import Relay, relay_of
from llmserve.server.routes.request_body import arrived_at, num_body_bytes
from llmserve.server.routes.sampling import (
    given_max_tokens,
    refuse_given,
    sampling_params,
    timeout_s,
)
from llmserve.server.running.answer import Answer
from llmserve.server.running.generation import GenerationResponse
from llmserve.server.running.job import Job
from llmserve.server.settings import ServerSettings

# A conversation of so many bytes is a prompt in about a millisecond, for which other streams may
# wait; handing it to a thread and back costs more processor time than most of them.
_MAX_BYTES_IN_LOOP = 4096


@dataclass(frozen=True, slots=True)
class ChatJob:
    """A conversation that goes on."""

    server: ServerContext
    body: ChatBody
    job: Job
    form: ChatFormat
    arrived: float  # when its request had come, by the loop's clock
    relay: Relay | None  # None: its client asked by itself

    def response(self, answer: Answer) -> GenerationResponse:
        """Runs it, and answers in these words. Raises ApiError."""
        if self.relay is not None:
            answer = self.relay.answer(answer, self.job)
        return GenerationResponse(self.server.activity, self.job, answer, self.arrived)


async def chat_job(request: Request, body: ChatBody, kind: str, given_id: str = "") -> ChatJob:
    """The job of a conversation whose request's body has been read. kind and given_id: as in
    `generation_job`. Raises ApiError, InvalidArgument, ResourceExhausted."""
    server = context(request)
    model = server.models.get(body.model)
    relay = relay_of(request)
    if relay is not None:
        body = relay.applied(body)
    _check(body)
    defaults = model.default_params
    params = sampling_params(
        body,
        defaults,
        server.settings,
        given_max_tokens(
            body.max_completion_tokens, body.max_tokens, body.n_predict, own_max_tokens(defaults)
        ),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    names = tool_names(body)
    params = _with_tools(body, params, model, server.settings, bool(names))
    limit_s = timeout_s(body.timeout, server.settings)
    arrived = arrived_at(request.scope)
    with server.activity.preparing(model, arrived, limit_s, tenant(request.scope)):
        prompt = await _prompt(body, params, model, num_body_bytes(request))
        text = prompt.get("prompt") or ""
        params, reasoning = _with_reasoning(body, params, model, server.settings, text)
        has_grammar = params.structured_outputs is not None
        form = chat_format(body, model, server.settings, names, text, reasoning, has_grammar)
        job = await generation_job(kind, body, model, [prompt], params, server.settings, given_id)
    if relay is not None:
        job = relay.named(job, kind)
    return ChatJob(server, body, job, form, arrived, relay)


def _check(body: ChatBody) -> None:
    refuse_given(body, ("functions", "function_call"), "use tools and tool_choice")
    refuse_given(body, ("audio", "web_search_options"), "the model reads and writes text")
    if body.modalities not in (None, ["text"]):
        raise ApiError(400, "modalities must be ['text']", param="modalities")
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    if body.top_logprobs is not None and body.top_logprobs < 0:
        raise ApiError(400, "top_logprobs must be at least 0", param="top_logprobs")
    if body.logprob_token_ids and not body.logprobs:
        raise ApiError(400, "logprob_token_ids needs logprobs: true", param="logprob_token_ids")
    if body.echo and not body.continue_final_message:
        raise ApiError(
            400,
            "echo gives back the message that is continued; set continue_final_message, or leave "
            "echo out",
            param="echo",
        )
    if body.add_special_tokens:
        raise ApiError(
            400,
            "add_special_tokens: the chat template writes them; leave it out",
            param="add_special_tokens",
        )
    check_stream_options(body)
    for name in ("max_tokens", "max_completion_tokens", "n_predict"):
        if getattr(body, name) == 0:
            raise ApiError(400, f"{name} must be at least 1", param=name)


def _with_tools(
    body: ChatBody,
    params: SamplingParams,
    model: ServedModel,
    settings: ServerSettings,
    has_tools: bool,
) -> SamplingParams:
    """A call that has to be made is a grammar, and what shows calls has to be in the text."""
    if not has_tools:
        return params
    style = served_tool_style(model, settings)
    given = params.structured_outputs
    constraint = with_calls(body, given, style, model.tokenizer(), settings)
    if constraint is not given:
        params = dataclasses.replace(params, structured_outputs=constraint)
    return _showing_special_tokens(body, params, model, style.signs)


def _with_reasoning(
    body: ChatBody,
    params: SamplingParams,
    model: ServedModel,
    settings: ServerSettings,
    prompt: str,
) -> tuple[SamplingParams, ReasoningStyle | None]:
    """What the model may think first is held to nothing, and what parts it from the answer has to
    be in the text; with its style, None where none is to be looked for."""
    style = served_reasoning_style(model, settings)
    given, tokenizer = params.structured_outputs, model.tokenizer()
    constraint, may_think = with_reasoning(body, given, style, prompt, tokenizer)
    if constraint is not given:
        params = dataclasses.replace(params, structured_outputs=constraint)
    if style is None or not may_think:
        return params, None
    return _showing_special_tokens(body, params, model, style.signs), style


def _showing_special_tokens(
    body: ChatBody, params: SamplingParams, model: ServedModel, signs: Iterable[str]
) -> SamplingParams:
    """Parts of the answer are told by signs: those that are special tokens have to be in the text.
    A body that says otherwise is obeyed."""
    tokenizer = model.tokenizer()
    if all(special_token_id(tokenizer, sign) is None for sign in signs):
        return params
    if body.skip_special_tokens is not None:
        return params
    return dataclasses.replace(params, skip_special_tokens=False)


async def _prompt(
    body: ChatBody, params: SamplingParams, model: ServedModel, num_bytes: int
) -> TokensPrompt:
    """By the model's template, which may take long on what is not short: there on a thread.
    num_bytes: of the body as it came."""
    check_text = model.llm.check_text if params.truncate_prompt_tokens is None else None
    make = partial(chat_prompt, body, model.tokenizer(), check_text)
    if num_bytes <= _MAX_BYTES_IN_LOOP:
        text, token_ids = make()
    else:
        text, token_ids = await on_text_thread(num_bytes, make)
    return TokensPrompt(prompt=text, prompt_token_ids=token_ids, cache_salt=body.cache_salt or "")
