"""Routes for whoever runs the server: what is served, is it alive, how busy is it."""

from functools import partial

from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from llmserve._version import __version__
from llmserve.server.context import context
from llmserve.server.http.errors import ApiError, JsonResponse
from llmserve.server.models import ServedModel
from llmserve.server.routes.operators_thread import on_operators_thread
from llmserve.server.running.activity import shutting_down


async def models(request: Request) -> Response:
    """GET /v1/models."""
    served = context(request).models
    data = [_described(name, model) for name, model in served.by_name.items()]
    return JsonResponse({"object": "list", "data": data})


async def model(request: Request) -> Response:
    """GET /v1/models/{model}."""
    name = request.path_params["model"]
    return JsonResponse(_described(name, context(request).models.get(name)))


def _described(name: str, model: ServedModel) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "llmserve",
        "root": model.name,
        "parent": None,
        "max_model_len": model.llm.max_model_len,
    }


async def health(request: Request) -> Response:
    """GET /health: 200 while the engines run, 503 once one has stopped or hangs in a step. Of the
    replicas of a model one may have stopped: the others go on, and the answer says so."""
    watchdog = context(request).activity.watchdog
    for served in context(request).models:
        if served.llm.failure is not None:
            raise ApiError(503, f"the engine of {served.name!r} has stopped", code="engine_stopped")
        if watchdog.is_hung(served):
            which = watchdog.hung_part(served)
            raise ApiError(503, f"a step of {served.name!r}{which} hangs", code="engine_hung")
    replicas = [
        {
            "model": served.name,
            "replica": state.replica,
            "status": "ok" if state.failure is None else "stopped",
            "reason": state.failure,
        }
        for served in context(request).models
        for state in served.llm.replicas()
    ]
    return JsonResponse({"status": "ok", **({"replicas": replicas} if replicas else {})})


async def ready(request: Request) -> Response:
    """GET /ready: 200 while new requests are taken, 503 while the server shuts down or sleeps."""
    server = context(request)
    if server.activity.is_draining:
        raise shutting_down()
    for served in server.models:
        if await served.llm.is_sleeping():
            raise ApiError(503, f"the engine of {served.name!r} is asleep", code="asleep")
    return await health(request)


async def root(request: Request) -> Response:
    """GET /, by which programs of Ollama's look whether somebody is there."""
    return PlainTextResponse("llmserve is running; /docs lists its routes\n")


async def version(request: Request) -> Response:
    """GET /version."""
    return JsonResponse({"version": __version__})


async def load(request: Request) -> Response:
    """GET /load: what runs and waits at the moment."""
    server = context(request)
    by_model: dict[str, dict[str, object]] = {}
    for served in server.models:
        metrics = served.llm.get_metrics()
        by_model[served.name] = {
            "num_running": metrics.num_requests_running,
            "num_waiting": metrics.num_requests_waiting,
            "kv_cache_usage": metrics.num_blocks_used / max(metrics.num_blocks_total, 1),
        }
        if replicas := served.llm.replicas():
            by_model[served.name]["replicas"] = [
                {
                    "num_running": state.metrics.num_requests_running,
                    "num_waiting": state.metrics.num_requests_waiting,
                    "kv_cache_usage": state.metrics.num_blocks_used
                    / max(state.metrics.num_blocks_total, 1),
                }
                for state in replicas
            ]
    admissions = server.activity.admissions.values()
    return JsonResponse(
        {
            "server_load": len(server.activity.runs),
            "num_sequences": sum(admission.num_requests for admission in admissions),
            "num_tokens": sum(admission.num_tokens for admission in admissions),
            "models": by_model,
        }
    )


async def metrics(request: Request) -> Response:
    """GET /metrics: in Prometheus' format."""
    registry = context(request).metrics.registry
    text = await on_operators_thread(partial(generate_latest, registry))
    return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})
