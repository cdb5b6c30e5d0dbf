"""Which engines give the same tokens, bit for bit: those of one class."""

import hashlib
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from llmserve import _core
from llmserve._version import __version__

_PAGE_BYTES = 4096
_NUM_PAGES = 64  # of a file, evenly spaced, its first and last among them
_WEIGHTS = (".safetensors", ".gguf")
_TEXTS = (
    *("config.json", "generation_config.json", "quantization_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
)
# How many threads and ranks share the work changes no bit.
_THREADS = re.compile(r", \d+ threads?\b")
_RANKS = re.compile(r", rank 0 of \d+\b")
# But for products whose algorithm is chosen by their shape, of which each rank has a part.
_CHOSEN = re.compile(r"cuBLASLt \d|gemv and ")
# Those of LLM that change tokens, or the prompts that they follow.
OPTIONS = (
    *("quantization", "hf_overrides", "generation_config", "override_generation_config"),
    *("chat_template", "default_chat_template_kwargs", "reasoning_config"),
)


def numerics_class(
    config: _core.EngineConfig, description: str, options: Mapping[str, object]
) -> str:
    """A digest in hexadecimal of what decides an engine's numbers: the build, what it runs on and
    in which type (`description`), the options that change results, and the weights.

    Of the weights it takes names, sizes and a sample of pages: two checkpoints that differ in
    training differ in every page, and reading all of them would take as long as loading. It tells
    engines apart that were set up differently, and is no proof against somebody who forges files.
    """
    digest = hashlib.sha256()
    path = Path(config.model_path)
    said = {
        **options,
        "version": __version__,
        "build": _build(),
        "runs": _runs(description),
        "dtype": config.dtype,
        "kv_cache_dtype": config.kv_cache_dtype,
        "max_model_len": config.scheduler.max_model_len,
        **_cut(config.parallel),
    }
    digest.update(json.dumps(said, sort_keys=True, default=str).encode())
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    for file in files:
        if file.name in _TEXTS:
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
        elif file.suffix in _WEIGHTS:
            digest.update(file.name.encode() + b"\0")
            _sample(digest, file)
    return digest.hexdigest()


def _cut(parallel: _core.ParallelConfig) -> dict[str, object]:
    """Of ranks that add up partial sums: in their own order it depends on how many there are."""
    cut = parallel.tensor_parallel_cut
    if cut == "rows" and parallel.tensor_parallel_size > 1:
        return {
            "tensor_parallel_cut": cut,
            "tensor_parallel_size": parallel.tensor_parallel_size,
            "enable_expert_parallel": parallel.enable_expert_parallel,
        }
    return {"tensor_parallel_cut": cut} if cut == "tree" else {}


def _runs(description: str) -> str:
    named = _THREADS.sub("", description)
    return named if _CHOSEN.search(named) else _RANKS.sub("", named)


def _sample(digest: "hashlib._Hash", file: Path) -> None:
    size = file.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with open(file, "rb") as opened:
        for idx in range(_NUM_PAGES):
            opened.seek(max(size - _PAGE_BYTES, 0) * idx // (_NUM_PAGES - 1))
            digest.update(opened.read(_PAGE_BYTES))


@lru_cache(maxsize=1)
def _build() -> str:
    """Of the compiled core: two builds of one version may differ."""
    return hashlib.sha256(Path(_core.__file__).read_bytes()).hexdigest()
