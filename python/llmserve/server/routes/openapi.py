"""The OpenAPI document, made from the records that bodies are decoded to, and a page of it."""

import html
import re
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from llmserve._version import __version__
from llmserve.server.http.errors import JsonResponse
from llmserve.server.routes.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    TokenizeBody,
)

_POST: dict[str, tuple[type[msgspec.Struct], str]] = {
    "/v1/completions": (CompletionBody, "Continue prompts"),
    "/v1/chat/completions": (ChatBody, "Answer a conversation"),
    "/v1/embeddings": (EmbeddingBody, "A vector a text"),
    "/tokenize": (TokenizeBody, "The token ids of a text or conversation"),
    "/detokenize": (DetokenizeBody, "The text of token ids"),
}
_GET = {
    "/v1/models": "The models that are served",
    "/v1/models/{model}": "One of them",
    "/health": "Are the engines alive",
    "/ready": "Are new requests taken",
    "/version": "llmserve's version",
    "/load": "What runs and waits",
    "/metrics": "Counters and distributions for Prometheus",
    "/debug/requests/{request_id}": "What a request did at every moment; for admins",
}
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
_PREFIX = "#/components/schemas/{name}"


def document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    kinds = [kind for kind, _ in _POST.values()]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_PREFIX)
    components["Error"] = _error_schema()
    paths: dict[str, Any] = {path: _get(path, text) for path, text in _GET.items()}
    for (path, (_, text)), schema in zip(_POST.items(), schemas, strict=True):
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths[path] = {"post": {**_operation(text), "requestBody": body}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "llmserve", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _get(path: str, text: str) -> dict[str, Any]:
    names = re.findall(r"{(\w+)}", path)
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in names
    ]
    return {"get": _operation(text) | ({"parameters": parameters} if parameters else {})}


def _operation(text: str) -> dict[str, Any]:
    error = {"schema": {"$ref": _PREFIX.format(name="Error")}}
    responses: dict[str, Any] = {"200": {"description": "done"}}
    for status, description in _ERRORS.items():
        responses[status] = {
            "description": description,
            "content": {"application/json": error},
        }
    return {"summary": text, "responses": responses}


def _error_schema() -> dict[str, Any]:
    text = {"type": "string"}
    maybe = {"type": ["string", "null"]}
    properties = {"message": text, "type": text, "param": maybe, "code": maybe}
    error = {"type": "object", "required": list(properties), "properties": properties}
    return {"type": "object", "required": ["error"], "properties": {"error": error}}


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
                name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                properties = described["components"]["schemas"][name]["properties"]
                fields = "<br>fields: " + ", ".join(
                    f"<code>{html.escape(field)}</code>" for field in properties
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
