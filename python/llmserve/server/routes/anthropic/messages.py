"""POST /v1/messages and /v1/messages/count_tokens."""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from llmserve.server.context import context
from llmserve.server.http.errors import JsonResponse
from llmserve.server.routes.anthropic.answer import MessageAnswer
from llmserve.server.routes.anthropic.bodies import CountTokensBody, MessagesBody
from llmserve.server.routes.anthropic.conversation import chat_body
from llmserve.server.routes.chat_job import chat_job
from llmserve.server.routes.prompts import chat_prompt
from llmserve.server.routes.request_body import off_the_loop, read_json
from llmserve.server.routes.tokens import counted_on_thread


async def messages(request: Request) -> Response:
    """Answers a conversation."""
    server = context(request)
    body = await read_json(request, MessagesBody, server.settings)
    can_bound = server.models.get(body.model).llm.can_bound_thinking
    chat = await off_the_loop(request, partial(chat_body, body, can_bound))
    found = await chat_job(request, chat, "msg_")
    return found.response(MessageAnswer(found.job, found.form, body.stop_sequences or ()))


async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt of a conversation has."""
    server = context(request)
    body = await read_json(request, CountTokensBody, server.settings)
    model = server.models.get(body.model)
    chat = await off_the_loop(request, partial(chat_body, body, False))
    make = partial(chat_prompt, chat, model.tokenizer())
    _, token_ids = await counted_on_thread(request, model, make)
    return JsonResponse({"input_tokens": len(token_ids)})
