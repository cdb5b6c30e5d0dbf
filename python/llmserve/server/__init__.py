"""The OpenAI-compatible server, in one process with the engine. Needs the extra `serve`."""

import importlib.util

from llmserve.errors import NotSupported

_PACKAGES = ("httptools", "msgspec", "prometheus_client", "starlette", "uvicorn", "yaml")


def check_extra() -> None:
    """Raises NotSupported that names the extra if what the server needs is not installed."""
    for name in _PACKAGES:
        if importlib.util.find_spec(name) is None:
            raise NotSupported(f"the server needs {name}; pip install 'llmserve[serve]'")
