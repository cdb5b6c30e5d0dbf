"""/hand_over: for who routes a prompt to this server and its answer to another one."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from llmserve.requests.hand_over import HandOver
from llmserve.server.context import context
from llmserve.server.http.errors import ApiError, JsonResponse
from llmserve.server.routes.bodies import HandOverBody
from llmserve.server.routes.request_body import read_json

_MAX_WAIT_S = 30.0
# A prompt that pays is computed for longer; who waits for one of a few milliseconds loses little.
_POLLS_S = (0.001, 0.002, 0.005, 0.01)


async def draw_ticket(request: Request) -> Response:
    """POST /hand_over/tickets: a ticket of ?model=, with which a request's blocks are kept here and
    another one fetches them. A ticket that is not used costs nothing."""
    return JsonResponse({"ticket": _hand_over(request, request.query_params.get("model")).ticket()})


async def wait_for_begin(request: Request) -> Response:
    """POST /hand_over/begun: answers once the first blocks of a ticket can be fetched, for who
    sends the request to the other server then: it fetches the rest as it is computed."""
    server = context(request)
    body = await read_json(request, HandOverBody, server.settings)
    hand_over = _hand_over(request, body.model)
    until = asyncio.get_running_loop().time() + _MAX_WAIT_S
    num_polls = 0
    while not (has_begun := hand_over.has_begun(body.hand_over_ticket)):
        if asyncio.get_running_loop().time() >= until or server.activity.is_draining:
            break
        await asyncio.sleep(_POLLS_S[min(num_polls, len(_POLLS_S) - 1)])
        num_polls += 1
    return JsonResponse({"has_begun": has_begun})


def _hand_over(request: Request, model: str | None) -> HandOver:
    server = context(request)
    hand_over = server.models.get(model).llm.hand_over
    if hand_over is None or server.settings.role == "decode":
        raise ApiError(
            400,
            "this server keeps no blocks for others: start it with --hand-over-key and --role "
            "prefill or both",
            code="no_hand_over",
        )
    return hand_over
