"""GET /api/tags, /api/ps, /api/version and POST /api/show: what is served, in Ollama's words."""

import hashlib
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmserve._version import __version__
from llmserve.server.context import context
from llmserve.server.http.errors import ApiError, JsonResponse
from llmserve.server.models import Models, ServedModel
from llmserve.server.routes.chat_parser import served_reasoning_style
from llmserve.server.routes.ollama.answer import timestamp
from llmserve.server.routes.ollama.bodies import OllamaPullBody, OllamaShowBody
from llmserve.server.routes.request_body import read_json

_TAG = ":latest"
# Models stay as long as the server does.
_FOREVER = "9999-12-31T23:59:59Z"


def served_name(models: Models, name: str) -> str:
    """Programs of Ollama's add a tag to names that have none."""
    if name not in models.by_name and name.endswith(_TAG):
        return name.removesuffix(_TAG)
    return name


async def ollama_tags(request: Request) -> Response:
    """The models."""
    served = context(request).models
    data = [
        {**_described(name, model), "modified_at": timestamp(model.created)}
        for name, model in served.by_name.items()
    ]
    return JsonResponse({"models": data})


async def ollama_ps(request: Request) -> Response:
    """The models that are loaded: all of them."""
    data = []
    for name, model in context(request).models.by_name.items():
        described = _described(name, model)
        is_on_gpu = model.llm.device == "cuda"
        more = {
            "expires_at": _FOREVER,
            "size_vram": described["size"] if is_on_gpu else 0,
            "context_length": model.llm.max_model_len,
        }
        data.append(described | more)
    return JsonResponse({"models": data})


async def ollama_version(request: Request) -> Response:
    """llmserve's version."""
    return JsonResponse({"version": __version__})


async def ollama_show(request: Request) -> Response:
    """One model. Raises ApiError."""
    server = context(request)
    body = await read_json(request, OllamaShowBody, server.settings, any_media_type=True)
    name = body.model or body.name
    if name is None:
        raise ApiError(400, "model is missing", param="model", code="missing_required_parameter")
    model = server.models.get(served_name(server.models, name))
    details = _details(model)
    template = model.tokenizer().chat_template_source if model.llm.has_tokenizer else ""
    capabilities = ["completion"]
    if "tools" in template:
        capabilities.append("tools")
    if template and served_reasoning_style(model, server.settings) is not None:
        capabilities.append("thinking")
    family = details["family"]
    return JsonResponse(
        {
            "modelfile": f"FROM {model.name}",
            "parameters": _parameters(model),
            "template": template,
            "details": details,
            "model_info": {
                "general.architecture": family,
                f"{family}.context_length": model.llm.max_model_len,
            },
            "capabilities": capabilities,
            "modified_at": timestamp(model.created),
        }
    )


async def ollama_pull(request: Request) -> Response:
    """What programs ask for before they use a model: one that is served is there. Raises
    ApiError."""
    server = context(request)
    body = await read_json(request, OllamaPullBody, server.settings, any_media_type=True)
    name = body.model or body.name
    if name is None:
        raise ApiError(400, "model is missing", param="model", code="missing_required_parameter")
    server.models.get(served_name(server.models, name))
    return JsonResponse({"status": "success"})


async def ollama_change(request: Request) -> Response:
    """Of the routes that change what there is: raises ApiError."""
    raise ApiError(
        400,
        f"{request.url.path} is not supported: the models of a server are those that it was "
        f"started with; `llmserve pull`, `list` and `rm` say which are on this machine",
        code="not_supported",
    )


def _described(name: str, model: ServedModel) -> dict[str, Any]:
    """digest: of the name, since a model is known by nothing else here."""
    return {
        "name": name,
        "model": name,
        "size": model.llm.get_memory_use().weight_bytes,
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": _details(model),
    }


def _details(model: ServedModel) -> dict[str, Any]:
    architecture, number_format, *_ = model.llm.description.split()
    family = architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel").lower()
    return {
        "parent_model": "",
        "format": "",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": number_format,
    }


def _parameters(model: ServedModel) -> str:
    """The model's own sampling parameters, a line each."""
    own = model.default_params
    names = {"temperature": own.temperature, "top_p": own.top_p, "top_k": own.top_k}
    return "\n".join(f"{name} {value}" for name, value in names.items())
