"""POST /tokenize and /detokenize."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from llmserve.chat.chat_template import chat_request
from llmserve.server.bodies import DetokenizeBody, TokenizeBody
from llmserve.server.body import read_json
from llmserve.server.context import context
from llmserve.server.errors import ApiError, JsonResponse
from llmserve.tokenization.tokenizer import Tokenizer


async def tokenize(request: Request) -> Response:
    """The token ids of a text, or of a conversation as its template writes it."""
    server = context(request)
    body = await read_json(request, TokenizeBody, server.settings)
    model = server.models.get(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give prompt or messages, one of them", param="prompt")
    tokens = await asyncio.to_thread(_token_ids, body, model.tokenizer())
    document = {"count": len(tokens), "max_model_len": model.llm.max_model_len, "tokens": tokens}
    if body.return_token_strs:
        document["token_strs"] = [model.tokenizer().token_text(token) for token in tokens]
    return JsonResponse(document)


def _token_ids(body: TokenizeBody, tokenizer: Tokenizer) -> list[int]:
    if body.prompt is not None:
        return tokenizer.encode(body.prompt, body.add_special_tokens is not False)
    if not body.messages:
        raise ApiError(400, "messages is empty; give at least one", param="messages")
    continues = bool(body.continue_final_message)
    generation_prompt = body.add_generation_prompt
    request = chat_request(
        not continues if generation_prompt is None else generation_prompt,
        continues,
        body.tools,
        body.chat_template_kwargs,
    )
    texts, _ = tokenizer.render_chat(body.messages, None, request)
    return tokenizer.encode_chat(texts)[0]


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
