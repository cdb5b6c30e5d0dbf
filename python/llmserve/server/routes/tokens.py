"""POST /tokenize, /detokenize, and the tokens of a chat's prompt."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from llmserve.common.text_threads import on_text_thread
from llmserve.server.context import context
from llmserve.server.http.auth import tenant
from llmserve.server.http.errors import ApiError, JsonResponse
from llmserve.server.models import ServedModel
from llmserve.server.routes.bodies import ChatBody, DetokenizeBody, TokenizeBody
from llmserve.server.routes.prompts import chat_prompt
from llmserve.server.routes.request_body import arrived_at, num_body_bytes, read_json
from llmserve.tokenization.tokenizer import Tokenizer

_Result = TypeVar("_Result")


async def tokenize(request: Request) -> Response:
    """The token ids of a text, or of a conversation as its template writes it."""
    server = context(request)
    body = await read_json(request, TokenizeBody, server.settings)
    model = server.models.get(body.model)
    texts = [text for text in (body.prompt, body.content) if text is not None]
    if len(texts) + (body.messages is not None) != 1:
        raise ApiError(400, "give prompt or messages, one of them", param="prompt")
    document = await counted_on_thread(request, model, partial(_document, body, model))
    return JsonResponse(document)


async def counted_on_thread(
    request: Request, model: ServedModel, call: Callable[[], _Result]
) -> _Result:
    """What `call` makes of the body's texts. Like any other request it counts for the key's quota,
    and has its time."""
    server = context(request)
    key_name = tenant(request.scope)
    server.activity.quotas.check(key_name, 0)
    server.activity.quotas.take(key_name, 0)
    limit_s = server.settings.request_timeout
    with server.activity.in_time(model, arrived_at(request.scope), limit_s):
        return await on_text_thread(num_body_bytes(request), call)


def _document(body: TokenizeBody, model: ServedModel) -> dict[str, object]:
    """On a thread: a long text takes seconds."""
    tokenizer = model.tokenizer()
    tokens = _token_ids(body, tokenizer)
    document: dict[str, object] = {
        "count": len(tokens),
        "max_model_len": model.llm.max_model_len,
        "tokens": tokens,
        "token_strs": None,
    }
    if body.return_token_strs:
        document["token_strs"] = list(map(tokenizer.token_text, tokens))
    if body.with_pieces:
        pieces = [{"id": token_id, "piece": tokenizer.token_text(token_id)} for token_id in tokens]
        document["tokens"] = pieces
    return document


def _token_ids(body: TokenizeBody, tokenizer: Tokenizer) -> list[int]:
    if body.content is not None:  # llama.cpp's, which adds nothing unless it is asked to
        return tokenizer.encode(body.content, body.add_special is True)
    if body.prompt is not None:
        return tokenizer.encode(body.prompt, body.add_special_tokens is not False)
    return chat_prompt(body, tokenizer)[1]


async def chat_input_tokens(request: Request) -> Response:
    """POST /v1/chat/completions/input_tokens: how many tokens the prompt of a conversation has."""
    server = context(request)
    body = await read_json(request, ChatBody, server.settings)
    model = server.models.get(body.model)
    make = partial(chat_prompt, body, model.tokenizer())
    _, token_ids = await counted_on_thread(request, model, make)
    return JsonResponse({"object": "response.input_tokens", "input_tokens": len(token_ids)})


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    server = context(request)
    body = await read_json(request, DetokenizeBody, server.settings)
    model = server.models.get(body.model)
    try:
        decode = partial(model.tokenizer().decode, body.tokens, skip_special_tokens=False)
        text = await counted_on_thread(request, model, decode)
    except ValueError as error:
        raise ApiError(400, f"tokens: {error}", param="tokens") from None
    return JsonResponse({"prompt": text, "content": text})  # vLLM's name, and llama.cpp's
