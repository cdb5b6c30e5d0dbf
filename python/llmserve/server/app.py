"""The application: routes, and what stands before them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from llmserve.errors import LLMServeError
from llmserve.insight.gpu_telemetry import BoostOff, watch_gpus
from llmserve.server.access import Access, answer_error
from llmserve.server.context import ServerContext
from llmserve.server.gpu_metrics import GpuCollector
from llmserve.server.http.auth import Authentication
from llmserve.server.metrics import ServerMetrics
from llmserve.server.models import Models, ServedModel
from llmserve.server.openapi import docs, openapi
from llmserve.server.relayed import relayed
from llmserve.server.routes import hand_over, operations, replica, templates, tokens
from llmserve.server.routes.anthropic.messages import count_tokens, messages
from llmserve.server.routes.chat import chat_completions
from llmserve.server.routes.completions import completions
from llmserve.server.routes.debug import debug_request
from llmserve.server.routes.embeddings import embeddings
from llmserve.server.routes.invocations import invocations
from llmserve.server.routes.llama_cpp.completion import llama_completion
from llmserve.server.routes.ollama.embed import ollama_embed, ollama_embeddings
from llmserve.server.routes.ollama.generate import ollama_chat, ollama_generate
from llmserve.server.routes.ollama.models import (
    ollama_change,
    ollama_ps,
    ollama_pull,
    ollama_show,
    ollama_tags,
    ollama_version,
)
from llmserve.server.routes.responses.routes import (
    cancel_response,
    create_response,
    input_tokens,
    response,
    response_input_items,
)
from llmserve.server.running.activity import Activity
from llmserve.server.running.background import BackgroundRuns
from llmserve.server.settings import ServerSettings
from llmserve.server.shortcut import Shortcut
from llmserve.server.tracing import Tracing, open_tracing

_GET, _POST = ["GET"], ["POST"]
# Those of OpenAI's and Anthropic's protocols are there without their prefix, too, for clients whose
# base URL has none.
_V1 = (
    ("/models", operations.models, _GET),
    ("/models/{model:path}", operations.model, _GET),
    ("/completions", completions, _POST),
    ("/chat/completions", chat_completions, _POST),
    ("/embeddings", embeddings, _POST),
    ("/responses", create_response, _POST),
    ("/responses/input_tokens", input_tokens, _POST),
    ("/responses/{response_id}", response, ["GET", "DELETE"]),
    ("/responses/{response_id}/input_items", response_input_items, _GET),
    ("/responses/{response_id}/cancel", cancel_response, _POST),
    ("/chat/completions/input_tokens", tokens.chat_input_tokens, _POST),
    ("/messages", messages, _POST),
    ("/messages/count_tokens", count_tokens, _POST),
)
# Those of them that LM Studio has under /api/v0.
_LM_STUDIOS = (
    "/models",
    "/models/{model:path}",
    "/completions",
    "/chat/completions",
    "/embeddings",
)
ROUTES = (
    *(Route("/v1" + path, endpoint, methods=methods) for path, endpoint, methods in _V1),
    *(Route(path, endpoint, methods=methods) for path, endpoint, methods in _V1),
    *(
        Route("/api/v0" + path, endpoint, methods=methods)
        for path, endpoint, methods in _V1
        if path in _LM_STUDIOS
    ),
    Route("/v1/tokenize", tokens.tokenize, methods=_POST),
    Route("/v1/detokenize", tokens.detokenize, methods=_POST),
    Route("/v1/health", operations.health, methods=_GET),
    Route("/health_generate", operations.health, methods=_GET),
    Route("/completion", llama_completion, methods=_POST),
    Route("/api/chat", ollama_chat, methods=_POST),
    Route("/api/generate", ollama_generate, methods=_POST),
    Route("/api/embed", ollama_embed, methods=_POST),
    Route("/api/embeddings", ollama_embeddings, methods=_POST),
    Route("/api/tags", ollama_tags, methods=_GET),
    Route("/api/show", ollama_show, methods=_POST),
    Route("/api/pull", ollama_pull, methods=_POST),
    Route("/api/create", ollama_change, methods=_POST),
    Route("/api/copy", ollama_change, methods=_POST),
    Route("/api/push", ollama_change, methods=_POST),
    Route("/api/delete", ollama_change, methods=["DELETE", "POST"]),
    Route("/api/ps", ollama_ps, methods=_GET),
    Route("/api/version", ollama_version, methods=_GET),
    Route("/invocations", invocations, methods=_POST),
    Route("/tokenize", tokens.tokenize, methods=_POST),
    Route("/detokenize", tokens.detokenize, methods=_POST),
    Route("/apply-template", templates.apply_template, methods=_POST),
    Route("/tokenizer_info", templates.tokenizer_info, methods=_GET),
    Route("/props", templates.props, methods=_GET),
    Route("/", operations.root, methods=_GET),
    Route("/health", operations.health, methods=_GET),
    Route("/ping", operations.health, methods=["GET", "POST"]),
    Route("/ready", operations.ready, methods=_GET),
    Route("/version", operations.version, methods=_GET),
    Route("/load", operations.load, methods=_GET),
    Route("/metrics", operations.metrics, methods=_GET),
    Route("/debug/requests/{request_id}", debug_request, methods=_GET),
    Route("/debug/block_events", replica.block_events, methods=_GET),
    Route("/replica", replica.replica, methods=_GET),
    Route("/replica/run", relayed, methods=_POST),
    Route("/hand_over/tickets", hand_over.draw_ticket, methods=_POST),
    Route("/hand_over/begun", hand_over.wait_for_begin, methods=_POST),
    Route("/openapi.json", openapi, methods=_GET),
    Route("/docs", docs, methods=_GET),
)


# What `localhost` among the allowed origins stands for: pages of this machine, on any port.
_OF_THIS_MACHINE = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"


def create_app(
    models: Sequence[ServedModel],
    settings: ServerSettings | None = None,
    tracing: Tracing | None = None,
) -> Starlette:
    """The server of these models as an ASGI application. Whoever runs it closes the models.
    tracing: None takes what the settings say."""
    settings = settings or ServerSettings()
    tracing = tracing or open_tracing(settings)
    served = Models(models, settings.is_lenient("any_model_name"))
    activity = Activity(models, settings)
    metrics = ServerMetrics(served, activity, settings.vllm_metrics)
    background = BackgroundRuns(Access)
    server = ServerContext(settings, served, activity, metrics, tracing, background)
    middleware = [
        Middleware(Access),
        Middleware(Authentication, settings=settings),
        Middleware(Shortcut, routes=ROUTES),
    ]
    if settings.origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=settings.origins,
            allow_origin_regex=_OF_THIS_MACHINE if "localhost" in settings.origins else None,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],  # OpenAI's client for browsers has a dozen of its own
            expose_headers=["x-request-id", "retry-after"],
        )
        middleware.insert(0, cors)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        def allow(share: float) -> None:
            for model in models:
                with suppress(LLMServeError):  # an engine that has stopped has nothing to ease
                    model.llm._ease_off(share)

        has_gpu = any(model.llm.device == "cuda" for model in models)
        boost_off = BoostOff(allow) if settings.boost_off else None
        watch = await asyncio.to_thread(watch_gpus, boost_off) if has_gpu else None
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
