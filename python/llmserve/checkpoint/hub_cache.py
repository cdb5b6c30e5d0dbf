"""What the cache of the Hugging Face Hub holds on this machine."""

import difflib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llmserve.checkpoint.model_name import parse_model_name
from llmserve.checkpoint.repository import is_gguf_model, is_weights
from llmserve.errors import InvalidArgument, LLMServeError, NotSupported


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in the cache."""

    model_id: str
    num_bytes: int  # of all its files and revisions
    last_used_s: float  # since the epoch
    revisions: tuple[str, ...]  # branches and tags, or the commit of one without
    kinds: tuple[str, ...]  # what of it can be run: "safetensors", or names of GGUF files
    path: Path


def cached_models() -> tuple[Path, list[CachedModel]]:
    """The cache's folder, and its models by name. Raises NotSupported without huggingface-hub."""
    folder, found = _scan()
    models = [_cached(repo) for repo in ([] if found is None else found.repos)]
    return folder, sorted((m for m in models if m is not None), key=lambda m: m.model_id)


def remove_model(name: str) -> int:
    """Takes a model out of the cache; the bytes that this frees. Raises InvalidArgument for one
    that is not there, and LLMServeError for one that cannot be removed."""
    parsed = parse_model_name(name)
    folder, found = _scan()
    repos = (
        {repo.repo_id: repo for repo in found.repos if repo.repo_type == "model"} if found else {}
    )
    repo = repos.get(parsed.model_id) if parsed is not None else None
    if repo is None or parsed is None:
        near = difflib.get_close_matches(name, repos, n=1)
        hint = f"did you mean {near[0]}?" if near else "llmserve list shows what there is"
        raise InvalidArgument(f"{folder} has no model {name!r}; {hint}")
    if parsed.file is not None:
        raise InvalidArgument(f"rm removes a whole repository: {parsed.model_id}")
    strategy = found.delete_revisions(*(revision.commit_hash for revision in repo.revisions))
    strategy.execute()
    if repo.repo_path.exists():
        raise LLMServeError(f"{repo.repo_path} cannot be removed; have you the right to do it?")
    return int(strategy.expected_freed_size)


def _scan() -> tuple[Path, Any]:
    """The folder, and what huggingface-hub finds in it; None if it is not there."""
    if find_spec("huggingface_hub") is None:
        raise NotSupported("models of the Hub need huggingface-hub: pip install 'llmserve[hub]'")
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    folder = Path(constants.HF_HUB_CACHE)
    try:
        return folder, scan_cache_dir(folder)
    except CacheNotFound:
        return folder, None


def _cached(repo: Any) -> CachedModel | None:
    if repo.repo_type != "model":
        return None
    names = {
        file.file_path.relative_to(revision.snapshot_path).as_posix()
        for revision in repo.revisions
        for file in revision.files
    }
    ggufs = sorted(name for name in names if is_gguf_model(name))
    kinds = [*(["safetensors"] if any(map(is_weights, names)) else []), *ggufs]
    refs = [sorted(revision.refs) or [revision.commit_hash] for revision in repo.revisions]
    return CachedModel(
        repo.repo_id,
        repo.size_on_disk,
        repo.last_accessed,
        tuple(sorted(name for names_of_one in refs for name in names_of_one)),
        tuple(kinds),
        repo.repo_path,
    )
