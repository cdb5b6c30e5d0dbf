"""POST /v1/responses, and what was stored of them."""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from llmserve.server.context import context
from llmserve.server.http.auth import tenant
from llmserve.server.http.errors import ApiError, JsonResponse
from llmserve.server.routes.chat_job import chat_job
from llmserve.server.routes.prompts import chat_prompt
from llmserve.server.routes.relay import relay_of
from llmserve.server.routes.request_body import add_body_bytes, off_the_loop, read_json
from llmserve.server.routes.responses.answer import Document, ResponseAnswer
from llmserve.server.routes.responses.bodies import ResponsesBody
from llmserve.server.routes.responses.conversation import (
    Item,
    Message,
    chat_body,
    read_input,
)
from llmserve.server.routes.tokens import counted_on_thread
from llmserve.server.running.background import RUNNING
from llmserve.server.stored_responses import StoredResponse

# Of a response that cannot be kept with its output.
_LOST: Document = {
    "status": "failed",
    "output": [],
    "instructions": None,
    "tools": [],
    "metadata": {},
}


async def create_response(request: Request) -> Response:
    """Answers an input."""
    server = context(request)
    body = await read_json(request, ResponsesBody, server.settings)
    if relay_of(request) is not None and body.store is not False:
        # Its id is the router's, and no server knows whose it is.
        raise ApiError(400, "store must be false for who sends it on", param="store")
    items, messages = await _conversation(request, body)
    found = await chat_job(request, chat_body(body, messages), "resp_")
    keep = partial(_keep, request, items, messages)
    answer = ResponseAnswer(found.job, body, found.form, _forget if body.store is False else keep)
    if not body.background:
        return found.response(answer)
    document = answer.queued()
    keep(document)
    server.background.start(request, found.response(answer), document, keep)
    return JsonResponse(document)


async def cancel_response(request: Request) -> Response:
    """POST /v1/responses/{response_id}/cancel: of one that runs in the background; what has ended
    stays as it is."""
    response_id = request.path_params["response_id"]
    if not _stored(request, response_id).document["background"]:
        raise ApiError(
            400,
            "Cannot cancel a synchronous response: it has ended, or ends when its client leaves",
            param="response_id",
        )
    await context(request).background.cancel(response_id)
    return JsonResponse(_stored(request, response_id).document)


async def input_tokens(request: Request) -> Response:
    """How many tokens the prompt of a response has."""
    server = context(request)
    body = await read_json(request, ResponsesBody, server.settings)
    model = server.models.get(body.model)
    chat = chat_body(body, (await _conversation(request, body))[1])
    make = partial(chat_prompt, chat, model.tokenizer())
    _, token_ids = await counted_on_thread(request, model, make)
    return JsonResponse({"object": "response.input_tokens", "input_tokens": len(token_ids)})


async def response(request: Request) -> Response:
    """GET and DELETE /v1/responses/{response_id}."""
    response_id = request.path_params["response_id"]
    if request.method == "DELETE":
        if _stored(request, response_id).document["status"] in RUNNING:
            await context(request).background.cancel(response_id)
        if not context(request).responses.delete(tenant(request.scope), response_id):
            raise _unknown(response_id)
        return JsonResponse({"id": response_id, "object": "response", "deleted": True})
    if request.query_params.get("stream", "false").lower() not in ("false", "0"):
        raise ApiError(400, "stream: what is stored is given as a whole", param="stream")
    return JsonResponse(_stored(request, response_id).document)


async def response_input_items(request: Request) -> Response:
    """GET /v1/responses/{response_id}/input_items: the last first, unless `order` is asc."""
    items = _stored(request, request.path_params["response_id"]).input_items
    if request.query_params.get("order") != "asc":
        items = items[::-1]
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    document = {"object": "list", "data": items, "first_id": first, "last_id": last}
    return JsonResponse({**document, "has_more": False})


async def _conversation(request: Request, body: ResponsesBody) -> tuple[list[Item], list[Message]]:
    """The body's items, and all messages. Raises ApiError."""
    items, messages = await off_the_loop(request, partial(read_input, body.input))
    if body.previous_response_id is None:
        return items, messages
    before = context(request).responses.get(tenant(request.scope), body.previous_response_id)
    if before is None:
        raise _unknown(body.previous_response_id, "previous_response_id")
    if before.document["status"] in RUNNING:
        raise ApiError(
            400,
            f"response {body.previous_response_id!r} has not ended; wait until its status is "
            f"completed",
            param="previous_response_id",
        )
    add_body_bytes(request, sum(len(str(message)) for message in before.messages))
    return items, [*before.messages, *messages]


def _keep(request: Request, items: list[Item], messages: list[Message], document: Document) -> None:
    answered = read_input(document["output"])[1] if document["output"] else []
    stored = StoredResponse(document, items, [*messages, *answered])
    responses, key = context(request).responses, tenant(request.scope)
    if not responses.put(key, stored) and document["background"]:
        error = {"code": "server_error", "message": "the response is too large to be kept"}
        responses.put(key, StoredResponse({**document, **_LOST, "error": error}, [], []))


def _forget(_: Document) -> None:
    pass


def _stored(request: Request, response_id: str) -> StoredResponse:
    found = context(request).responses.get(tenant(request.scope), response_id)
    if found is None:
        raise _unknown(response_id)
    return found


def _unknown(response_id: str, param: str | None = None) -> ApiError:
    return ApiError(
        404,
        f"no response {response_id[:80]!r} is stored; the server keeps the last ones of each key, "
        f"in memory, unless store is false",
        param=param,
        code="previous_response_not_found" if param else "response_not_found",
    )
