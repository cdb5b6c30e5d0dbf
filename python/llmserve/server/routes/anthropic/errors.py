"""Errors as Anthropic's API words them."""

from llmserve.server.http.errors import ApiError

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(error: ApiError) -> dict[str, object]:
    """{"type": "error", "error": {"type", "message"}}."""
    other = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _KINDS.get(error.status, other)
    return {"type": "error", "error": {"type": kind, "message": error.message}}
