"""POST /invocations, by which SageMaker asks for whatever the body is for."""

from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from llmserve.server.context import context
from llmserve.server.http.errors import ApiError
from llmserve.server.routes.chat import chat_completions
from llmserve.server.routes.completions import completions
from llmserve.server.routes.embeddings import embeddings
from llmserve.server.routes.request_body import give_back, read_body

# By the field that only its bodies have.
_ROUTES: dict[str, Callable[[Request], Awaitable[Response]]] = {
    "messages": chat_completions,
    "prompt": completions,
    "input": embeddings,
}


async def invocations(request: Request) -> Response:
    """As the route whose body it is. Raises ApiError."""
    data = await read_body(request, context(request).settings)
    try:
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is no JSON object: {error}", code="invalid_json") from None
    for name, route in _ROUTES.items():
        if name in fields:
            give_back(request, data)
            return await route(request)
    raise ApiError(
        400,
        "the body must have messages (a chat), prompt (a completion) or input (embeddings)",
        code="missing_required_parameter",
    )
