"""POST /replica/run: the requests of clients, as a router before this server sends them on."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from llmserve.server.context import context
from llmserve.server.http.errors import ApiError
from llmserve.server.routes.anthropic.messages import messages
from llmserve.server.routes.chat import chat_completions
from llmserve.server.routes.completions import completions
from llmserve.server.routes.llama_cpp.completion import llama_completion
from llmserve.server.routes.ollama.generate import ollama_chat, ollama_generate
from llmserve.server.routes.relay import Relay, put_relay
from llmserve.server.routes.request_body import give_back, read_json
from llmserve.server.routes.responses.routes import create_response

_ROUTES: dict[str, Callable[[Request], Awaitable[Response]]] = {
    "/v1/completions": completions,
    "/v1/chat/completions": chat_completions,
    "/v1/messages": messages,
    "/v1/responses": create_response,
    "/completion": llama_completion,
    "/api/chat": ollama_chat,
    "/api/generate": ollama_generate,
}
RELAYED_PATHS = tuple(_ROUTES)


async def relayed(request: Request) -> Response:
    """As the route that it names, in whose words errors are, too. Raises ApiError."""
    relay = await read_json(request, Relay, context(request).settings)
    if (route := _ROUTES.get(relay.path)) is None:
        raise ApiError(400, f"path must be one of {', '.join(_ROUTES)}", param="path")
    request.scope["path"] = relay.path
    put_relay(request, relay)
    give_back(request, bytes(relay.body))
    return await route(request)
