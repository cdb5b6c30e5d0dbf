"""GET /debug/requests/{id}, for admins: what a request did at every moment, and why it waited."""

from functools import partial
from itertools import count, takewhile
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmserve.errors import InvalidArgument
from llmserve.insight.trace import Trace
from llmserve.server.context import context
from llmserve.server.http.errors import ApiError, JsonResponse
from llmserve.server.models import ServedModel
from llmserve.server.routes.operators_thread import on_operators_thread


async def debug_request(request: Request) -> Response:
    """The life of one of the last few thousand requests, by the id that its answer has; of several
    prompts, whose ids are that and a number, the life of each."""
    request_id = request.path_params["request_id"]
    for model in context(request).models:
        if lives := await on_operators_thread(partial(_lives, model, request_id)):
            return JsonResponse(lives)
    raise ApiError(404, f"no trace has a request {request_id[:80]!r}", code="request_not_found")


def _lives(model: ServedModel, request_id: str) -> dict[str, Any] | None:
    trace = model.llm.trace()
    if life := _life(model, trace, request_id):
        return life
    each = (_life(model, trace, f"{request_id}-{idx}") for idx in count())
    prompts = list(takewhile(bool, each))
    return {"id": request_id, "model": model.name, "prompts": prompts} if prompts else None


def _life(model: ServedModel, trace: Trace, request_id: str) -> dict[str, Any] | None:
    try:
        spans = trace.timeline(request_id)
    except InvalidArgument:
        return None
    start_us = spans[0].start_us if spans else 0
    several = model.llm.num_replicas > 1
    return {
        "id": request_id,
        "model": model.name,
        **({"replica": trace.replica(request_id)} if several else {}),
        "explanation": trace.explain(request_id).splitlines(),
        "spans": [
            {
                "activity": span.activity,
                "reason": span.reason,
                "start_ms": (span.start_us - start_us) / 1e3,
                "duration_ms": span.duration_us / 1e3,
                "steps": list(span.steps),
            }
            for span in spans
        ],
    }
