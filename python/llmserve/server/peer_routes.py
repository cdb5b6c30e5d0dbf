"""Routes of other servers that are not here: why, and what to use."""

from collections.abc import Mapping

_PAIRS = "models that score pairs of texts are not served; compare vectors of /v1/embeddings"
_ADAPTERS = "adapters are not applied; merge them into the checkpoint"
_MEDIA = "the model reads and writes text"
_WHOLE = "models are loaded at the start and stay; stop the server to give their memory back"
_CACHE = "cached blocks make room by themselves; skip_reading_prefix_cache leaves them out"
_ABOUT = "/v1/models, /props, /version and /load say it"
_GENERATE = "use /v1/completions, which every server has, or llama.cpp's /completion"

_BY_REASON: Mapping[str, str] = {
    _PAIRS: "/score /rerank /classify /reranking /v2/rerank",
    "use /v1/embeddings": "/pooling /embedding /encode",
    _ADAPTERS: "/load_lora_adapter /unload_lora_adapter /lora-adapters",
    _MEDIA: "/audio/transcriptions /audio/translations /audio/speech /images/generations /realtime",
    _WHOLE: "/sleep /wake_up /is_sleeping /models/load /models/unload",
    _CACHE: "/reset_prefix_cache /flush_cache /reset_mm_cache",
    _ABOUT: "/info /get_model_info /model_info /get_server_info /server_info /engines",
    _GENERATE: "/generate /generate_stream",
    "send requests side by side; the engine batches them": "/batches /files",
    "models that fill in the middle are not served": "/infill",
    "/debug/requests shows what a request does, /metrics what runs": "/slots",
    "`llmserve serve --trace FILE` writes what the engine did": "/start_profile /stop_profile",
    "texts are not judged here": "/moderations",
    "a conversation is kept by /v1/responses": "/assistants /threads /conversations",
    "weights are trained elsewhere": "/fine_tuning/jobs /update_weights_from_disk",
}
PEER_ROUTES: Mapping[str, str] = {
    path: why for why, paths in _BY_REASON.items() for path in paths.split()
}


def why_not_here(path: str) -> str | None:
    """Of a path, with or without /v1; None where no server has it."""
    path = path.removeprefix("/v1").rstrip("/")
    if path in PEER_ROUTES:
        return PEER_ROUTES[path]
    return next((why for name, why in PEER_ROUTES.items() if path.startswith(name + "/")), None)
