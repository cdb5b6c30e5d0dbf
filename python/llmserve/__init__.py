"""llmserve: a fast, deterministic LLM serving engine."""

from llmserve._version import __version__

__all__ = ["__version__"]
