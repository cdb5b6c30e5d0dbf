"""What a client may know of a model's text: its template and tokens, by the names of vLLM's and
llama.cpp's servers."""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from llmserve._version import __version__
from llmserve.server.context import context
from llmserve.server.http.errors import JsonResponse
from llmserve.server.routes.bodies import ChatBody
from llmserve.server.routes.prompts import chat_prompt
from llmserve.server.routes.request_body import read_json
from llmserve.server.routes.tokens import counted_on_thread


async def apply_template(request: Request) -> Response:
    """POST /apply-template: the prompt of a chat, as text."""
    server = context(request)
    body = await read_json(request, ChatBody, server.settings)
    model = server.models.get(body.model)
    prompt, _ = await counted_on_thread(
        request, model, partial(chat_prompt, body, model.tokenizer())
    )
    return JsonResponse({"prompt": prompt})


async def tokenizer_info(request: Request) -> Response:
    """GET /tokenizer_info: of the first model, or of the one that `model` names in the query."""
    model = context(request).models.get(request.query_params.get("model"))
    tokenizer = model.tokenizer()
    return JsonResponse(
        {
            "tokenizer_class": tokenizer.kind,
            "chat_template": tokenizer.chat_template_source,
            "vocab_size": tokenizer.num_tokens,
            "model_max_length": model.llm.max_model_len,
            "max_model_len": model.llm.max_model_len,
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
            "pad_token": tokenizer.pad_token,
            "unk_token": tokenizer.unk_token,
            "added_tokens_decoder": {
                str(token_id): {"content": tokenizer.token_text(token_id), "special": True}
                for token_id in sorted(tokenizer.all_special_ids)
            },
        }
    )


async def props(request: Request) -> Response:
    """GET /props: likewise, as llama.cpp's server says it."""
    model = context(request).models.get(request.query_params.get("model"))
    own, llm = model.default_params, model.llm
    has_text = llm.has_tokenizer
    params = {
        "n_predict": -1 if own.max_tokens is None else own.max_tokens,
        "temperature": own.temperature,
        "top_k": own.top_k,
        "top_p": own.top_p,
        "min_p": own.min_p,
        "repeat_penalty": own.repetition_penalty,
        "presence_penalty": own.presence_penalty,
        "frequency_penalty": own.frequency_penalty,
    }
    return JsonResponse(
        {
            "default_generation_settings": {"n_ctx": llm.max_model_len, "params": params},
            "total_slots": llm.max_num_seqs,
            "model_alias": model.name,
            "model_path": model.name,  # and no more of where it lies
            "chat_template": model.tokenizer().chat_template_source if has_text else "",
            "bos_token": (model.tokenizer().bos_token or "") if has_text else "",
            "eos_token": (model.tokenizer().eos_token or "") if has_text else "",
            "modalities": {"vision": False, "audio": False},
            "build_info": f"llmserve {__version__}",
            "is_sleeping": await llm.is_sleeping(),
        }
    )
