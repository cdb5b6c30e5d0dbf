"""GET /debug/requests/{id}, for admins: what a request did at every moment, and why it waited."""

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmserve.errors import InvalidArgument
from llmserve.server.context import context
from llmserve.server.errors import ApiError, JsonResponse
from llmserve.server.models import ServedModel


async def debug_request(request: Request) -> Response:
    """The life of one of the last few thousand requests, by the id that its answer has."""
    request_id = request.path_params["request_id"]
    for model in context(request).models:
        if life := await asyncio.to_thread(_life, model, request_id):
            return JsonResponse(life)
    raise ApiError(404, f"no trace has a request {request_id[:80]!r}", code="request_not_found")


def _life(model: ServedModel, request_id: str) -> dict[str, Any] | None:
    trace = model.llm.trace()
    try:
        spans = trace.timeline(request_id)
    except InvalidArgument:
        return None
    start_us = spans[0].start_us if spans else 0
    return {
        "id": request_id,
        "model": model.name,
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
