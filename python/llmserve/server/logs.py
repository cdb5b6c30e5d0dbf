"""Logs of the server: a line an event, as text or JSON, on stderr."""

import json
import logging
import sys
from datetime import datetime, timezone

# What a record may carry besides its message, given as `extra`.
_FIELDS = (
    *("request_id", "method", "path", "status", "model", "prompt_tokens", "cached_tokens"),
    *("generated_tokens", "finish", "error", "duration_s", "client"),
)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        given = record.__dict__
        line |= {name: given[name] for name in _FIELDS if name in given}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line, given = super().format(record), record.__dict__
        fields = [f"{name}={_one_line(given[name])}" for name in _FIELDS if name in given]
        return " ".join([line, *fields])


def _one_line(value: object) -> str:
    """A path that a client sends may have line breaks in it, and write lines of its own."""
    text = str(value)
    return text if text.isprintable() else repr(text)


def configure_logs(log_format: str) -> None:
    """Sends the package's and uvicorn's logs to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _JsonFormatter()
        if log_format == "json"
        else _TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    for name in ("llmserve", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False
    # The server has a line for each request that says the same.
    logging.getLogger("llmserve.async_llm").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
