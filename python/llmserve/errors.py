"""The errors that llmserve raises, each a subclass of the natural built-in.

Messages say what was expected, what came, and what to do about it.
"""


class LLMServeError(Exception):
    """Base of all errors of llmserve."""


class InvalidArgument(LLMServeError, ValueError):
    """The caller's mistake: a bad parameter, prompt or setting (HTTP 400)."""


class PromptTooLong(InvalidArgument):
    """A prompt that the model's context does not hold (HTTP 400)."""


class NotSupported(LLMServeError, NotImplementedError):
    """A model, format, device or feature that this build does not handle."""


class ResourceExhausted(LLMServeError, RuntimeError):
    """A queue or memory that is full (HTTP 429 or 503)."""


class QueueFull(ResourceExhausted):
    """Too many requests wait already; the same call may succeed later (HTTP 429)."""


class HubError(LLMServeError, OSError):
    """A model that the Hugging Face Hub does not give: not there, gated, or out of reach."""


class CorruptFile(LLMServeError, OSError):
    """A file whose bytes are not what its format promises: path, offset, reason."""


class DeviceError(LLMServeError, RuntimeError):
    """A device call that failed: call, code, name."""


class InternalError(LLMServeError, RuntimeError):
    """A bug in llmserve; please report it."""
