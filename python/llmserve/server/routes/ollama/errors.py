"""Errors as Ollama's API words them."""

from llmserve.server.http.errors import ApiError


def ollama_error(error: ApiError) -> dict[str, object]:
    """{"error": message}."""
    return {"error": error.message}
