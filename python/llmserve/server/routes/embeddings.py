"""POST /v1/embeddings."""

import base64
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
from starlette.requests import Request
from starlette.responses import Response

from llmserve.common.text_threads import on_text_thread
from llmserve.pooling_params import PoolingParams
from llmserve.prompts import SinglePrompt, TokensPrompt
from llmserve.requests.pooling_state import PoolingState
from llmserve.requests.state import RequestState
from llmserve.server.context import context
from llmserve.server.http.auth import tenant
from llmserve.server.http.errors import ApiError
from llmserve.server.models import ServedModel
from llmserve.server.routes.bodies import EmbeddingBody, TokenizeBody
from llmserve.server.routes.prompts import chat_prompt, prompts
from llmserve.server.routes.request_body import arrived_at, num_body_bytes, read_json
from llmserve.server.routes.sampling import timeout_s
from llmserve.server.running.answer import WholeAnswer
from llmserve.server.running.generation import GenerationResponse
from llmserve.server.running.job import Job, new_id

# OpenAI's own bound on the texts of a request.
MAX_NUM_INPUTS = 2048


async def embeddings(request: Request) -> Response:
    """A vector a text."""
    server = context(request)
    body = await read_json(request, EmbeddingBody, server.settings)
    model = server.models.get(body.model)
    if body.encoding_format not in (None, "float", "base64"):
        raise ApiError(
            400,
            f"encoding_format must be 'float' or 'base64', got {body.encoding_format[:80]!r}",
            param="encoding_format",
        )
    params = PoolingParams(
        task="embed",
        dimensions=body.dimensions,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
    )
    limit_s = timeout_s(body.timeout, server.settings)
    arrived = arrived_at(request.scope)
    with server.activity.preparing(model, arrived, limit_s, tenant(request.scope)):
        given = await _prompts(request, body, model)
        states = await model.llm.admit_pooling(given, params, "embed")
    job = Job(new_id("embd"), model, states, False, limit_s)
    answer = _Answer(job, body.encoding_format == "base64")
    return GenerationResponse(server.activity, job, answer, arrived)


async def _prompts(
    request: Request, body: EmbeddingBody, model: ServedModel
) -> Sequence[SinglePrompt]:
    if body.input is not None and body.messages is None:
        return await prompts(
            "input",
            body.input,
            model,
            MAX_NUM_INPUTS,
            is_truncated=body.truncate_prompt_tokens is not None,
        )
    if body.input is not None or body.messages is None:
        raise ApiError(
            400,
            "give input or messages, one of them",
            param="input",
            code="missing_required_parameter",
        )
    conversation = TokenizeBody(
        messages=body.messages,
        add_generation_prompt=body.add_generation_prompt is True,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    check_text = model.llm.check_text if body.truncate_prompt_tokens is None else None
    make = partial(chat_prompt, conversation, model.tokenizer(), check_text)
    text, token_ids = await on_text_thread(num_body_bytes(request), make)
    return [TokensPrompt(prompt=text, prompt_token_ids=token_ids)]


def vector(state: RequestState) -> npt.NDArray[np.float32]:
    """Of a request for an embedding that has ended."""
    assert isinstance(state, PoolingState)
    return np.asarray(state.embedding_output().outputs.data, dtype=np.float32)


class _Answer(WholeAnswer):
    def __init__(self, job: Job, is_base64: bool) -> None:
        self._job = job
        self._is_base64 = is_base64

    def document(self, states: Sequence[RequestState], cause: str) -> object:
        """See Answer."""
        data = [
            {"object": "embedding", "index": idx, "embedding": self._vector(state)}
            for idx, state in enumerate(states)
        ]
        num_tokens = sum(len(state.prompt.token_ids) for state in states)
        return {
            "object": "list",
            "data": data,
            "model": self._job.model.name,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }

    def _vector(self, state: RequestState) -> str | list[float]:
        found = vector(state)
        if self._is_base64:  # little-endian float32, as OpenAI's
            return base64.b64encode(found.astype("<f4").tobytes()).decode("ascii")
        values: list[float] = found.tolist()
        return values
