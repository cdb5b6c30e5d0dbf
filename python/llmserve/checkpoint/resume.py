"""Large files of the Hub, downloaded so that a start after an interruption goes on where it ended.

huggingface-hub resumes within a process alone. A file is written here beside the cache's blobs and
moved among them when it is whole; huggingface-hub then finds it there and links to it.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from llmserve.common.units import human_bytes
from llmserve.errors import HubError

MIN_BYTES = 32 * 2**20  # smaller files come again in seconds
_CHUNK_BYTES = 2**20
_SHA256 = re.compile(r"[0-9a-f]{64}")  # the ETag of a file in large-file storage
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # what the server says becomes a file's name
_PARTIAL = 206  # HTTP


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """What a repository's list says of a file."""

    num_bytes: int
    blob: str  # what the cache calls its bytes, and the ETag that comes with them


def missing_files(
    model_id: str, cache: Path | None, files: Mapping[str, RemoteFile]
) -> dict[str, RemoteFile]:
    """Those of a repository's files that the cache lacks."""
    blobs = _blobs(model_id, cache)
    return {name: file for name, file in files.items() if not (blobs / file.blob).exists()}


def fetch_large_files(
    model_id: str, revision: str | None, cache: Path | None, files: Mapping[str, RemoteFile]
) -> None:
    """Downloads those of the files that are missing, by name, that are large.

    Leaves the others to huggingface-hub: those of Xet, whose own client keeps what came, and all
    where its version resumes by itself. Raises HubError for a file whose bytes are not those that
    the Hub has, and what the library raises.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    if not hasattr(get_session(), "stream"):  # before 1.0
        return
    blobs = _blobs(model_id, cache)
    endpoint = os.environ.get("HF_ENDPOINT") or None
    for name, listed in files.items():
        if listed.num_bytes < MIN_BYTES or _BLOB.fullmatch(listed.blob) is None:
            continue
        url = hf_hub_url(model_id, name, revision=revision, endpoint=endpoint)
        file = get_hf_file_metadata(url, endpoint=endpoint)
        is_of_xet = file.xet_file_data is not None and find_spec("hf_xet") is not None
        if is_of_xet or file.etag != listed.blob or file.size != listed.num_bytes:
            continue
        blobs.mkdir(parents=True, exist_ok=True)
        is_foreign = urlsplit(file.location).netloc != urlsplit(url).netloc
        _fetch(file.location, blobs / file.etag, file.size, name, is_foreign)


def _blobs(model_id: str, cache: Path | None) -> Path:
    """Where the cache keeps the bytes of a repository's files."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(cache or constants.HF_HUB_CACHE)
    return folder / repo_folder_name(repo_id=model_id, repo_type="model") / "blobs"


def _fetch(url: str, blob: Path, size: int, name: str, is_foreign: bool) -> None:
    """One file. An address elsewhere is signed by itself, and gets no token."""
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        WeakFileLock,
        build_hf_headers,
        get_session,
    )

    partial = blob.with_name(blob.name + ".llmserve.incomplete")
    headers = {} if is_foreign else dict(build_hf_headers())
    headers["Accept-Encoding"] = "identity"
    with ExitStack() as stack:
        stack.enter_context(WeakFileLock(partial.with_suffix(".lock")))
        if blob.exists():  # another process has been quicker
            return
        begin = partial.stat().st_size if partial.exists() else 0
        if begin > size:
            begin = 0
        bar = stack.enter_context(_bar(name, size, begin))
        if begin < size:
            headers["Range"] = f"bytes={begin}-"
            answer = stack.enter_context(get_session().stream("GET", url, headers=headers))
            answer.raise_for_status()
            if begin and answer.status_code != _PARTIAL:  # the server sends all of it
                begin = 0
                bar.reset()
            with partial.open("r+b" if begin else "wb") as file:
                file.seek(begin)
                file.truncate()
                for chunk in answer.iter_raw():
                    file.write(chunk)
                    bar.update(len(chunk))
        _check(partial, blob.name, size, name)
        os.replace(partial, blob)


def _check(partial: Path, etag: str, size: int, name: str) -> None:
    found = partial.stat().st_size
    if found < size:
        raise HubError(
            f"{name}: the connection ended after {human_bytes(found)} of {human_bytes(size)}; the "
            f"next start goes on there"
        )
    if found == size and _SHA256.fullmatch(etag) is None:
        return
    digest = hashlib.sha256()
    with partial.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    if found > size or digest.hexdigest() != etag:
        partial.unlink()
        raise HubError(f"{name}: what came is not the file that the Hub has; download it again")


def _bar(name: str, size: int, begin: int) -> Any:
    # HF_HUB_DISABLE_PROGRESS_BARS turns this one off.
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    bar: Any = tqdm
    label = name if len(name) <= 40 else "…" + name[-39:]
    return bar(total=size, initial=begin, desc=label, unit="B", unit_scale=True)
