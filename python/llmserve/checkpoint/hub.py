"""Models by their name on the Hugging Face Hub, or a server that speaks like it (HF_ENDPOINT).

The files come from huggingface-hub, with its cache, login, progress bar and environment variables.
Only what llmserve reads is downloaded: never code, and a pickle only where it may be a head that
drafts, which is read without running what it says.
"""

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from llmserve.checkpoint.model_name import ModelName
from llmserve.checkpoint.repository import model_files, tokenizer_repository_files
from llmserve.checkpoint.resume import RemoteFile, fetch_large_files, missing_files
from llmserve.errors import HubError, InvalidArgument, LLMServeError, NotSupported

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

_SERVER_ERROR = 500  # HTTP: this and above
_NO_FILE = "*/none/*"  # a pattern that no file's name matches
# The names of the files to download, of those that are there.
_Choose = Callable[[Collection[str]], list[str]]


def download_model(
    name: ModelName,
    revision: str | None,
    download_dir: Path | None,
    check_config: Callable[[Path], None],
    *,
    may_be_pickled_head: bool = False,
) -> Path:
    """The folder of a model's files, or its GGUF file, downloaded unless the cache has them.

    revision: a branch, tag or commit, by default the main one. download_dir: the cache's folder, by
    default HF_HUB_CACHE. With HF_HUB_OFFLINE=1 only the cache is looked at. check_config: is given
    the folder of config.json before weights are downloaded, and what it raises ends it. Raises
    HubError that says what to do, InvalidArgument for a GGUF file that is not there, and
    NotSupported without huggingface-hub or for what is no model that llmserve reads.
    """

    def choose(files: Collection[str]) -> list[str]:
        return model_files(files, name.file, str(name), may_be_pickled_head=may_be_pickled_head)

    folder, files = _download(
        name.model_id, revision or name.revision, download_dir, choose, check_config
    )
    return folder / files[0] if files[0].endswith(".gguf") else folder


def download_tokenizer(name: ModelName, revision: str | None, download_dir: Path | None) -> Path:
    """The folder of the files of a model's tokenizer alone. Raises as `download_model`."""

    def choose(files: Collection[str]) -> list[str]:
        return tokenizer_repository_files(files, str(name))

    revision = revision or name.revision
    return _download(name.model_id, revision, download_dir, choose, check_config=None)[0]


def _download(
    model_id: str,
    revision: str | None,
    download_dir: Path | None,
    choose: _Choose,
    check_config: Callable[[Path], None] | None,
) -> tuple[Path, list[str]]:
    """The folder that holds a repository's files, and the names of those that were chosen."""
    if find_spec("huggingface_hub") is None:
        raise NotSupported(
            f"there is no folder {model_id!r} here, and as the id of a model on a Hub it "
            f"needs huggingface-hub: pip install 'llmserve[hub]'"
        )
    fetch = partial(_snapshot, model_id, revision, download_dir)
    with _told(model_id, revision):
        files = _listed(model_id, revision)
        if isinstance(files, dict):
            wanted = choose(files)
            weights = {n: files[n] for n in wanted if n.endswith((".gguf", ".safetensors"))}
            weights = missing_files(model_id, download_dir, weights)
            if weights and check_config is not None and "config.json" in wanted:
                check_config(fetch(False, ["config.json"]))
            fetch_large_files(model_id, revision, download_dir, weights)
            return fetch(False, wanted), wanted
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            folder = fetch(True, [_NO_FILE])
            paths = (path for path in folder.rglob("*") if path.is_file())
            wanted = choose([path.relative_to(folder).as_posix() for path in paths])
            # Nor may one of several files of weights be missing.
            is_of_shards = wanted[0].endswith(".json")
            fetch(True, [*wanted, "model*.safetensors"] if is_of_shards else wanted)
            return folder, wanted
        except LocalEntryNotFoundError as error:
            raise HubError(_not_cached(model_id, revision, files)) from error


def _snapshot(
    model_id: str, revision: str | None, cache: Path | None, is_local: bool, files: list[str]
) -> Path:
    from huggingface_hub import snapshot_download

    endpoint = os.environ.get("HF_ENDPOINT") or None
    return Path(
        snapshot_download(
            model_id,
            revision=revision,
            cache_dir=cache,
            endpoint=endpoint,
            local_files_only=is_local,
            allow_patterns=files,
        )
    )


def _listed(model_id: str, revision: str | None) -> dict[str, RemoteFile] | Exception | None:
    """A repository's files by their names; None offline, and the error of a server that does not
    answer: the cache may have the model."""
    if _is_offline():
        return None
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
    try:
        # One request, which is not repeated where there is no network.
        info = api.model_info(model_id, revision=revision or "main", files_metadata=True)
        return {file.rfilename: _remote(file) for file in info.siblings or []}
    except HFValidationError:
        raise
    except HfHubHTTPError as error:
        if error.response.status_code < _SERVER_ERROR:
            raise
        return error
    except Exception as error:
        return error


def _remote(file: "RepoSibling") -> RemoteFile:
    blob = file.blob_id if file.lfs is None else file.lfs.sha256
    return RemoteFile(file.size or 0, blob or "")


@contextmanager
def _told(model_id: str, revision: str | None) -> Iterator[None]:
    """What huggingface-hub raises, as errors that say what to do."""
    from huggingface_hub import errors

    name = _named(model_id, revision)
    try:
        yield
    except LLMServeError:
        raise
    except errors.HFValidationError as error:
        raise InvalidArgument(f"model: {error}") from error
    except errors.GatedRepoError as error:
        raise HubError(
            f"{name} is gated: accept its terms at {_endpoint()}/{model_id}, then log in with "
            f"`hf auth login` or set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(
            f"{model_id} has no revision {revision!r} at {_endpoint()}; give a branch, tag or "
            f"commit"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"there is no folder {model_id!r} here and no model of that name at {_endpoint()}; "
            f"check the spelling, or, for a private model, log in with `hf auth login` or set "
            f"HF_TOKEN"
        ) from error
    except Exception as error:  # of the connection, the disk, the server
        raise HubError(
            f"{name} cannot be downloaded from {_endpoint()}: {type(error).__name__}: {error}"
        ) from error


def _not_cached(model_id: str, revision: str | None, cause: object) -> str:
    begin = (
        f"there is no folder {model_id!r} here, and as the id of a model "
        f"{_named(model_id, revision)} is not in the cache, or not all of it, and"
    )
    if cause is None:
        return (
            f"{begin} HF_HUB_OFFLINE is set; unset it to download the model, or copy the cache "
            f"from a machine that has it"
        )
    return (
        f"{begin} {_endpoint()} cannot be reached: {type(cause).__name__}: {cause}; check the "
        f"network, HF_ENDPOINT and the proxy"
    )


def _named(model_id: str, revision: str | None) -> str:
    return model_id if revision is None else f"{model_id} at revision {revision!r}"


def _is_offline() -> bool:
    """As huggingface-hub reads it when it is imported; here, when a model is asked for."""
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in ("1", "ON", "YES", "TRUE")


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
