"""The OpenAPI document, made from the records that bodies are decoded to, and a page of it."""

import html
import re
from itertools import chain
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from llmserve._version import __version__
from llmserve.server.answer_schemas import ANSWERS, STREAMS, answer_components
from llmserve.server.http.errors import JsonResponse
from llmserve.server.relayed import RELAYED_PATHS
from llmserve.server.routes.anthropic.bodies import CountTokensBody, MessagesBody
from llmserve.server.routes.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    HandOverBody,
    TokenizeBody,
)
from llmserve.server.routes.llama_cpp.bodies import LlamaCompletionBody
from llmserve.server.routes.ollama.bodies import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaPullBody,
    OllamaShowBody,
)
from llmserve.server.routes.relay import Relay
from llmserve.server.routes.responses.bodies import ResponsesBody

_POST: dict[str, tuple[type[msgspec.Struct], str]] = {
    "/v1/completions": (CompletionBody, "Continue prompts"),
    "/v1/chat/completions": (ChatBody, "Answer a conversation"),
    "/v1/chat/completions/input_tokens": (ChatBody, "The tokens of a conversation's prompt"),
    "/v1/embeddings": (EmbeddingBody, "A vector a text"),
    "/v1/responses": (ResponsesBody, "Answer an input, perhaps going on from an earlier answer"),
    "/v1/responses/input_tokens": (ResponsesBody, "The tokens of such an input"),
    "/v1/messages": (MessagesBody, "Answer a conversation, in Anthropic's words"),
    "/v1/messages/count_tokens": (CountTokensBody, "The tokens of such a conversation"),
    "/completion": (LlamaCompletionBody, "Continue prompts, in llama.cpp's words"),
    "/api/chat": (OllamaChatBody, "Answer a conversation, in Ollama's words"),
    "/api/generate": (OllamaGenerateBody, "Continue a prompt, in Ollama's words"),
    "/api/embed": (OllamaEmbedBody, "A vector a text, in Ollama's words"),
    "/api/embeddings": (OllamaEmbeddingsBody, "A vector of a text, in Ollama's older words"),
    "/api/pull": (OllamaPullBody, "Whether a model is served, in Ollama's words"),
    "/api/show": (OllamaShowBody, "What a model is, in Ollama's words"),
    "/tokenize": (TokenizeBody, "The token ids of a text or conversation"),
    "/apply-template": (ChatBody, "The prompt of a conversation, as text"),
    "/detokenize": (DetokenizeBody, "The text of token ids"),
    "/replica/run": (Relay, "Another route's request, as a router sends it"),
    "/hand_over/begun": (HandOverBody, "Waits until a ticket's first KV blocks can be fetched"),
}
# By the fields of its body it is one of these.
_INVOCATIONS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
_GET = {
    "/v1/responses/{response_id}": "A response that was stored",
    "/v1/responses/{response_id}/input_items": "What its input was",
    "/v1/models": "The models that are served",
    "/v1/models/{model}": "One of them",
    "/api/tags": "The models that are served, in Ollama's words",
    "/api/ps": "Those that are loaded: the same",
    "/api/version": "llmserve's version",
    "/tokenizer_info": "The tokenizer and chat template of the first model",
    "/props": "The same in llama.cpp's words, and the model's own sampling parameters",
    "/": "Says that somebody is there",
    "/ping": "As /health",
    "/health": "Are the engines alive",
    "/ready": "Are new requests taken",
    "/version": "llmserve's version",
    "/load": "What runs and waits",
    "/metrics": "Counters and distributions for Prometheus",
    "/replica": "What decides the models' tokens, for who routes to several servers",
    "/debug/block_events": "What the prefix cache holds, for who routes; for admins",
    "/debug/requests/{request_id}": "What a request did at every moment; for admins",
}
_BARE_POST = {
    "/v1/responses/{response_id}/cancel": "End a response that runs in the background",
    "/hand_over/tickets": "A ticket to hand a prompt's KV blocks over to another server",
}
_DELETE = {"/v1/responses/{response_id}": "Forget a response that was stored"}
_ERRORS = {
    "400": "a parameter is wrong; the error names it",
    "401": "no key, or a wrong one",
    "403": "the server was started without an admin key",
    "404": "no such model",
    "408": "the body did not come in time",
    "413": "the body is too long",
    "415": "the body is not JSON",
    "422": "the request can never run on this server",
    "429": "too much waits; Retry-After says when to come again",
    "431": "the request's head is too long",
    "500": "an error of the server",
    "503": "shutting down, asleep, stopped, or too slow",
}
_DESCRIPTION = "Routes under /v1 are there without that prefix, too."
_PREFIX = "#/components/schemas/{name}"


def document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    kinds = [kind for kind, _ in _POST.values()]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_PREFIX)
    components |= {**answer_components(), **_error_components()}
    paths: dict[str, Any] = {path: {"get": _bare("get", path, text)} for path, text in _GET.items()}
    for path, text in _DELETE.items():
        paths[path]["delete"] = _bare("delete", path, text)
    for path, text in _BARE_POST.items():
        paths[path] = {"post": _bare("post", path, text)}
    for (path, (_, text)), schema in zip(_POST.items(), schemas, strict=True):
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths[path] = {"post": {**_operation("post", path, text), "requestBody": body}}
    bodies = [paths[path]["post"]["requestBody"]["content"] for path in _INVOCATIONS]
    schema = {"anyOf": [body["application/json"]["schema"] for body in bodies]}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    text = "Answer a chat, continue prompts or embed, as the body's fields say"
    invoke = _operation("post", "/invocations", text)
    paths["/invocations"] = {"post": {**invoke, "requestBody": body}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "llmserve", "version": __version__, "description": _DESCRIPTION},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _bare(method: str, path: str, text: str) -> dict[str, Any]:
    """Of what has no body."""
    names = re.findall(r"{(\w+)}", path)
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in names
    ]
    return _operation(method, path, text) | ({"parameters": parameters} if parameters else {})


def _operation(method: str, path: str, text: str) -> dict[str, Any]:
    kind = "Error"
    if path.startswith("/v1/messages"):
        kind = "AnthropicError"
    elif path.startswith("/api/"):
        kind = "OllamaError"
    responses: dict[str, Any] = {"200": {"description": "done", "content": _content(method, path)}}
    for status, description in _ERRORS.items():
        responses[status] = {
            "description": description,
            "content": {"application/json": {"schema": _ref(kind)}},
        }
    return {"summary": text, "responses": responses}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": _PREFIX.format(name=name)}


def _content(method: str, path: str) -> dict[str, Any]:
    """Of an answer with status 200."""
    if path in ("/", "/metrics"):
        return {"text/plain": {"schema": {"type": "string"}}}
    whole = {"/invocations": _INVOCATIONS, "/replica/run": RELAYED_PATHS}
    paths = whole.get(path, (path,))
    answers = [_ref(ANSWERS[method, item]) for item in paths]
    schema = answers[0] if len(answers) == 1 else {"anyOf": answers}
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if path in STREAMS:
        media_type, text = STREAMS[path]
        content[media_type] = {"schema": {"type": "string", "description": text}}
    return content


def _error_components() -> dict[str, Any]:
    """An error in the words of each protocol."""
    text, maybe = {"type": "string"}, {"type": ["string", "null"]}

    def record(**properties: Any) -> dict[str, Any]:
        return {"type": "object", "required": list(properties), "properties": properties}

    return {
        "Error": record(error=record(message=text, type=text, param=maybe, code=maybe)),
        "AnthropicError": record(type=text, error=record(type=text, message=text)),
        "OllamaError": record(error=text),
    }


async def openapi(request: Request) -> Response:
    """GET /openapi.json."""
    return JsonResponse(document())


async def docs(request: Request) -> Response:
    """GET /docs: the document as a page, without a script or anything from elsewhere."""
    described = document()
    rows = []
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            body = operation.get("requestBody")
            fields = ""
            if body is not None:
                schema = body["content"]["application/json"]["schema"]
                names = [s["$ref"].rpartition("/")[2] for s in schema.get("anyOf", [schema])]
                known = [described["components"]["schemas"][n]["properties"] for n in names]
                fields = "<br>fields: " + ", ".join(
                    f"<code>{html.escape(field)}</code>" for field in dict.fromkeys(chain(*known))
                )
            rows.append(
                f"<h3><code>{method.upper()} {html.escape(path)}</code></h3>"
                f"<p>{html.escape(operation['summary'])}{fields}</p>"
            )
    page = (
        "<!doctype html><meta charset=utf-8><title>llmserve</title>"
        "<style>body{font:15px sans-serif;max-width:50em;margin:2em auto}</style>"
        f"<h1>llmserve {html.escape(__version__)}</h1>"
        "<p>The whole description is <a href=openapi.json>openapi.json</a>.</p>" + "".join(rows)
    )
    return HTMLResponse(page)
