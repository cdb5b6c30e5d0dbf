"""POST /api/embed and /api/embeddings: vectors of texts, in Ollama's words."""

import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmserve.pooling_params import PoolingParams
from llmserve.requests.state import RequestState
from llmserve.server.context import context
from llmserve.server.http.auth import tenant
from llmserve.server.http.errors import JsonResponse
from llmserve.server.routes.embeddings import MAX_NUM_INPUTS, vector
from llmserve.server.routes.ollama.bodies import OllamaEmbedBody, OllamaEmbeddingsBody
from llmserve.server.routes.ollama.models import served_name
from llmserve.server.routes.ollama.options import body_fields
from llmserve.server.routes.prompts import prompts
from llmserve.server.routes.request_body import arrived_at, read_json
from llmserve.server.running.answer import WholeAnswer
from llmserve.server.running.generation import GenerationResponse
from llmserve.server.running.job import Job, new_id

_AS_MANY_AS_FIT = -1


async def ollama_embed(request: Request) -> Response:
    """A vector a text. Of a text that is too long the end counts, unless `truncate` is false."""
    settings = context(request).settings
    body = await read_json(request, OllamaEmbedBody, settings, any_media_type=True)
    texts = [body.input] if isinstance(body.input, str) else body.input
    if not texts:
        models = context(request).models
        model = models.get(served_name(models, body.model))
        return JsonResponse({"model": model.name, "embeddings": []})
    return await _embed(request, body, "input", texts, is_single=False)


async def ollama_embeddings(request: Request) -> Response:
    """One vector of one text, as it was asked for once."""
    settings = context(request).settings
    body = await read_json(request, OllamaEmbeddingsBody, settings, any_media_type=True)
    return await _embed(request, body, "prompt", [body.prompt], is_single=True)


async def _embed(
    request: Request,
    body: OllamaEmbedBody | OllamaEmbeddingsBody,
    field: str,
    texts: Sequence[str],
    is_single: bool,
) -> Response:
    server = context(request)
    model = server.models.get(served_name(server.models, body.model))
    body_fields(body.options, server.settings)  # none has an effect, and a wrong one is refused
    dimensions = None if isinstance(body, OllamaEmbeddingsBody) else body.dimensions
    truncates = isinstance(body, OllamaEmbeddingsBody) or body.truncate is not False
    params = PoolingParams(
        task="embed",
        dimensions=dimensions,
        truncate_prompt_tokens=_AS_MANY_AS_FIT if truncates else None,
    )
    limit_s = server.settings.request_timeout
    arrived = arrived_at(request.scope)
    with server.activity.preparing(model, arrived, limit_s, tenant(request.scope)):
        given = await prompts(field, list(texts), model, MAX_NUM_INPUTS, is_truncated=truncates)
        states = await model.llm.admit_pooling(given, params, "embed")
    job = Job(new_id("embd"), model, states, False, limit_s)
    return GenerationResponse(server.activity, job, _Answer(job, is_single), arrived)


class _Answer(WholeAnswer):
    def __init__(self, job: Job, is_single: bool) -> None:
        self._job = job
        self._is_single = is_single
        self._began_ns = time.monotonic_ns()

    def document(self, states: Sequence[RequestState], cause: str) -> object:
        """See Answer."""
        vectors: list[Any] = [vector(state).tolist() for state in states]
        if self._is_single:
            return {"embedding": vectors[0]}
        return {
            "model": self._job.model.name,
            "embeddings": vectors,
            "total_duration": time.monotonic_ns() - self._began_ns,
            "load_duration": 0,
            "prompt_eval_count": sum(len(state.prompt.token_ids) for state in states),
        }
