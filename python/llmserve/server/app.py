"""The application: routes, and what stands before them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from llmserve.insight.gpu_telemetry import watch_gpu
from llmserve.server.access import Access, answer_error
from llmserve.server.context import ServerContext
from llmserve.server.gpu_metrics import GpuCollector
from llmserve.server.http.auth import Authentication
from llmserve.server.metrics import ServerMetrics
from llmserve.server.models import Models, ServedModel
from llmserve.server.routes import operations, tokens
from llmserve.server.routes.chat import chat_completions
from llmserve.server.routes.completions import completions
from llmserve.server.routes.debug import debug_request
from llmserve.server.routes.embeddings import embeddings
from llmserve.server.routes.openapi import docs, openapi
from llmserve.server.running.activity import Activity
from llmserve.server.settings import ServerSettings
from llmserve.server.shortcut import Shortcut
from llmserve.server.tracing import Tracing, open_tracing

ROUTES = (
    Route("/v1/models", operations.models, methods=["GET"]),
    Route("/v1/models/{model:path}", operations.model, methods=["GET"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/embeddings", embeddings, methods=["POST"]),
    Route("/tokenize", tokens.tokenize, methods=["POST"]),
    Route("/detokenize", tokens.detokenize, methods=["POST"]),
    Route("/health", operations.health, methods=["GET"]),
    Route("/ready", operations.ready, methods=["GET"]),
    Route("/version", operations.version, methods=["GET"]),
    Route("/load", operations.load, methods=["GET"]),
    Route("/metrics", operations.metrics, methods=["GET"]),
    Route("/debug/requests/{request_id}", debug_request, methods=["GET"]),
    Route("/openapi.json", openapi, methods=["GET"]),
    Route("/docs", docs, methods=["GET"]),
)


def create_app(
    models: Sequence[ServedModel],
    settings: ServerSettings | None = None,
    tracing: Tracing | None = None,
) -> Starlette:
    """The server of these models as an ASGI application. Whoever runs it closes the models.
    tracing: None takes what the settings say."""
    settings = settings or ServerSettings()
    tracing = tracing or open_tracing(settings)
    served = Models(models)
    activity = Activity(models, settings)
    metrics = ServerMetrics(served, activity, settings.vllm_metrics)
    server = ServerContext(settings, served, activity, metrics, tracing)
    middleware = [
        Middleware(Access),
        Middleware(Authentication, settings=settings),
        Middleware(Shortcut, routes=ROUTES),
    ]
    if settings.origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=settings.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # OpenAI's client for browsers has a dozen of its own
            expose_headers=["x-request-id", "retry-after"],
        )
        middleware.insert(0, cors)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        has_gpu = any(model.llm.device == "cuda" for model in models)
        watch = await asyncio.to_thread(watch_gpu) if has_gpu else None
        if watch is not None:
            metrics.registry.register(GpuCollector(watch))
        try:
            with ExitStack() as watching:
                for model in models:
                    watching.enter_context(model.llm.watched())
                yield
        finally:
            activity.watchdog.close()
            if watch is not None:
                await asyncio.to_thread(watch.close)
            if tracing is not None:
                await asyncio.to_thread(tracing.close)

    app = Starlette(
        routes=list(ROUTES),
        middleware=middleware,
        lifespan=lifespan,
        exception_handlers={HTTPException: answer_error},
    )
    app.state.server = server
    return app
