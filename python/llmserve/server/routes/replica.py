"""What a server tells those that route to it: what it is, and what its prefix caches hold."""

import asyncio
import base64
import os
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from llmserve.async_llm import AsyncLLM
from llmserve.server.context import context
from llmserve.server.http.errors import ApiError, JsonResponse
from llmserve.server.routes.operators_thread import on_operators_thread

# Numbers of batches begin anew with the process: a listener that knows another epoch's starts over.
EPOCH = os.urandom(8).hex()
_MAX_WAIT_S = 30.0
_POLL_S = 0.02


async def replica(request: Request) -> Response:
    """GET /replica: the models, with what decides their tokens and what they hold at once."""
    server = context(request)
    models = []
    for model in server.models:
        llm = model.llm
        digest = await on_operators_thread(lambda llm=llm: llm.numerics_class)  # type: ignore[misc]
        models.append(
            {
                "names": list(model.names),
                "numerics_class": digest,
                "max_model_len": llm.max_model_len,
                "block_size": llm.block_size,
                "num_kv_tokens": llm.num_kv_tokens,
                "max_num_seqs": llm.max_num_seqs,
                "num_replicas": llm.num_replicas,
            }
        )
    settings = server.settings
    return JsonResponse(
        {
            "epoch": EPOCH,
            "is_draining": server.activity.is_draining,
            "role": settings.role,
            "hands_over": bool(settings.hand_over_key),
            "models": models,
        }
    )


async def block_events(request: Request) -> Response:
    """GET /debug/block_events?model=&replica=&epoch=&after=&wait=, for admins, since it tells who
    has sent what: the batches after that number, or a snapshot. replica: of an engine of several
    the one that is asked for; without it, what they hold together. wait: seconds for news to come.
    Hashes are in base64, 32 bytes each."""
    query = request.query_params
    llm = context(request).models.get(query.get("model")).llm
    try:
        after = int(query.get("after", "-1"))
        wait_s = min(max(float(query.get("wait", "0")), 0.0), _MAX_WAIT_S)
        which = int(query["replica"]) if "replica" in query else None
    except ValueError as error:
        text = f"after, replica and wait are numbers: {error}"
        raise ApiError(400, text, param="after") from None
    if query.get("epoch") != EPOCH or after < 0:
        return await _snapshot(llm, which)
    loop = asyncio.get_running_loop()
    until = loop.time() + wait_s
    while True:
        batches = llm.block_events(after, which)
        if batches is None:
            return await _snapshot(llm, which)
        if batches or loop.time() >= until or context(request).activity.is_draining:
            break
        await asyncio.sleep(_POLL_S)
    told = [
        {"sequence": number, "events": [[kind, _text(hashes)] for kind, hashes in events]}
        for number, events in batches
    ]
    return JsonResponse({"epoch": EPOCH, "batches": told})


async def _snapshot(llm: AsyncLLM, which: int | None) -> Response:
    sequence, hashes = await on_operators_thread(partial(llm.block_snapshot, which))
    return JsonResponse(
        {"epoch": EPOCH, "snapshot": {"sequence": sequence, "hashes": _text(hashes)}}
    )


def _text(hashes: bytes) -> str:
    return base64.b64encode(hashes).decode()
