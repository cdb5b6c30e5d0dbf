"""Where packed weights are kept from one start to the next: LLM(packed_cache_bytes=...)."""

import os
from pathlib import Path


def packed_cache_folder() -> Path:
    """`llmserve/packed` in the user's cache folder: XDG_CACHE_HOME, or ~/.cache.

    >>> packed_cache_folder().parts[-2:]
    ('llmserve', 'packed')
    """
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # The specification ignores paths that are not absolute.
    base = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    return base / "llmserve" / "packed"
