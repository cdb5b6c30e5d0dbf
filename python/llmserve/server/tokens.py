"""POST /tokenize and /detokenize."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from llmserve.server.bodies import DetokenizeBody, TokenizeBody
from llmserve.server.body import read_json
from llmserve.server.context import context
from llmserve.server.errors import ApiError, JsonResponse
from llmserve.server.models import ServedModel
from llmserve.server.prompts import chat_prompt
from llmserve.tokenization.tokenizer import Tokenizer


async def tokenize(request: Request) -> Response:
    """The token ids of a text, or of a conversation as its template writes it."""
    server = context(request)
    body = await read_json(request, TokenizeBody, server.settings)
    model = server.models.get(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give prompt or messages, one of them", param="prompt")
    return JsonResponse(await asyncio.to_thread(_document, body, model))


def _document(body: TokenizeBody, model: ServedModel) -> dict[str, object]:
    """On a thread: a long text takes seconds."""
    tokenizer = model.tokenizer()
    tokens = _token_ids(body, tokenizer)
    document: dict[str, object] = {
        "count": len(tokens),
        "max_model_len": model.llm.max_model_len,
        "tokens": tokens,
    }
    if body.return_token_strs:
        document["token_strs"] = list(map(tokenizer.token_text, tokens))
    return document


def _token_ids(body: TokenizeBody, tokenizer: Tokenizer) -> list[int]:
    if body.prompt is not None:
        return tokenizer.encode(body.prompt, body.add_special_tokens is not False)
    return chat_prompt(body, tokenizer)[1]


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    server = context(request)
    body = await read_json(request, DetokenizeBody, server.settings)
    model = server.models.get(body.model)
    try:
        text = await asyncio.to_thread(
            model.tokenizer().decode, body.tokens, skip_special_tokens=False
        )
    except ValueError as error:
        raise ApiError(400, f"tokens: {error}", param="tokens") from None
    return JsonResponse({"prompt": text})
