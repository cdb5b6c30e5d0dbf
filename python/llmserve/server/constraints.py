"""How a request's output is constrained: the seam to structured output and tool calls. Whoever
adds them returns what SamplingParams.structured_outputs takes."""

from llmserve.server.bodies import ChatBody, GenerationBody
from llmserve.server.errors import ApiError
from llmserve.structured_outputs import StructuredOutputsParams


def structured_outputs(body: GenerationBody) -> StructuredOutputsParams | None:
    """What SamplingParams.structured_outputs is to be. Raises ApiError where it would have to be
    anything."""
    kind = (body.response_format or {"type": "text"}).get("type")
    if kind != "text":
        raise _not_yet("response_format", f"type {kind!r}; use {{'type': 'text'}}")
    if body.structured_outputs is not None:
        raise _not_yet("structured_outputs", "anything; leave it out")
    if isinstance(body, ChatBody) and body.tool_choice not in (None, "auto", "none"):
        raise _not_yet("tool_choice", f"{str(body.tool_choice)[:80]!r}; use 'auto' or 'none'")
    return None


def _not_yet(param: str, what: str) -> ApiError:
    return ApiError(
        400,
        f"{param} does not support {what}: this server does not constrain what a model writes",
        param=param,
        code="unsupported_value",
    )
