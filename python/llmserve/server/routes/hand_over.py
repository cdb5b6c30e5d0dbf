"""POST /hand_over/tickets: for who routes a prompt to this server and its answer to another one."""

from starlette.requests import Request
from starlette.responses import Response

from llmserve.server.context import context
from llmserve.server.http.errors import ApiError, JsonResponse


async def draw_ticket(request: Request) -> Response:
    """A ticket of ?model=: with it a request's blocks are kept here, and another one fetches them.
    A ticket that is not used costs nothing."""
    server = context(request)
    hand_over = server.models.get(request.query_params.get("model")).llm.hand_over
    if hand_over is None or server.settings.role == "decode":
        raise ApiError(
            400,
            "this server keeps no blocks for others: start it with --hand-over-key and --role "
            "prefill or both",
            code="no_hand_over",
        )
    return JsonResponse({"ticket": hand_over.ticket()})
