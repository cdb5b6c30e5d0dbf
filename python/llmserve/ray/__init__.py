"""llmserve on Ray (`pip install 'llmserve[ray]'`): `build_app` for Ray Serve, `batch` for Ray
Data, `scale` and `desired_replicas` for the autoscaler."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from llmserve.errors import NotSupported

if TYPE_CHECKING:
    from llmserve.ray.app import build_app
    from llmserve.ray.autoscaling import desired_replicas, scale
    from llmserve.ray.batches import Generate, batch

__all__ = ["Generate", "batch", "build_app", "desired_replicas", "scale"]

_MODULES = {
    "build_app": "app",
    "desired_replicas": "autoscaling",
    "scale": "autoscaling",
    "Generate": "batches",
    "batch": "batches",
}


def __getattr__(name: str) -> Any:
    """Raises NotSupported without Ray."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if find_spec("ray") is None:
        raise NotSupported(f"llmserve.ray.{name} needs Ray; pip install 'llmserve[ray]'")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
