"""llmserve on Ray: `build_app` for Ray Serve, `batch` for Ray Data. `pip install 'llmserve[ray]'`."""

from importlib.util import find_spec

from llmserve.errors import NotSupported

if find_spec("ray") is None:
    raise NotSupported("llmserve.ray needs Ray; pip install 'llmserve[ray]'")

from llmserve.ray.app import build_app
from llmserve.ray.autoscaling import desired_replicas, scale
from llmserve.ray.batches import Generate, batch

__all__ = ["Generate", "batch", "build_app", "desired_replicas", "scale"]
