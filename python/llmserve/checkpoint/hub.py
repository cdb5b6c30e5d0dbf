"""Models by their id on the Hugging Face Hub, or a server that speaks like it (HF_ENDPOINT).

The files come from huggingface-hub, with its cache, login, progress bar and environment variables.
Only what llmserve reads is downloaded: never a pickle, never code.
"""

import os
import re
from pathlib import Path

from llmserve.errors import HubError, InvalidArgument, NotSupported

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "modules.json",
    "*_Pooling/config.json",
    "*.safetensors",
    "model.safetensors.index.json",
)
# Weights in other layouts beside the ones that are read: folders such as original/ and onnx/.
_NOT_FILES = ("*/*.safetensors", "consolidated*.safetensors", "adapter_model.safetensors")


def is_hub_id(model: str) -> bool:
    """Whether a string has the form of an id, "organisation/name"; it may be a path too."""
    return _ID.fullmatch(model) is not None and ".." not in model


def download_model(model_id: str, revision: str | None, download_dir: Path | None) -> Path:
    """The folder of a model's files, downloaded unless the cache has them.

    revision: a branch, tag or commit, by default the main one. download_dir: the cache's folder, by
    default HF_HUB_CACHE. With HF_HUB_OFFLINE=1 only the cache is looked at. Raises HubError that
    says what to do, and NotSupported without huggingface-hub or for a model without safetensors.
    """
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError as error:
        raise NotSupported(
            f"there is no folder {model_id!r} here, and as the id of a model on a Hub it "
            f"needs huggingface-hub: pip install 'llmserve[hub]'"
        ) from error
    name = model_id if revision is None else f"{model_id} at revision {revision!r}"
    try:
        folder = snapshot_download(
            model_id,
            revision=revision,
            cache_dir=download_dir,
            endpoint=os.environ.get("HF_ENDPOINT") or None,
            local_files_only=_is_offline(),
            allow_patterns=list(_FILES),
            ignore_patterns=list(_NOT_FILES),
        )
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
    except errors.LocalEntryNotFoundError as error:
        raise HubError(_not_cached(name, error)) from error
    except Exception as error:  # of the connection, the disk, the server
        raise HubError(
            f"{name} cannot be downloaded from {_endpoint()}: {type(error).__name__}: {error}"
        ) from error
    if not any(Path(folder).glob("*.safetensors")):
        raise NotSupported(
            f"{name} has no *.safetensors; pickled weights (*.bin) run code when they are loaded "
            f"and are not downloaded. Look for a revision or a copy of the model with safetensors"
        )
    return Path(folder)


def _not_cached(name: str, error: Exception) -> str:
    if _is_offline() or error.__cause__ is None:
        return (
            f"{name} is not in the cache, or not all of it, and HF_HUB_OFFLINE is set; unset it to "
            f"download the model, or copy the cache from a machine that has it"
        )
    cause = error.__cause__
    return (
        f"{name} is not in the cache, or not all of it, and {_endpoint()} cannot be reached: "
        f"{type(cause).__name__}: {cause}; check the network, HF_ENDPOINT and the proxy"
    )


def _is_offline() -> bool:
    """As huggingface-hub reads it when it is imported; here, when a model is asked for."""
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in ("1", "ON", "YES", "TRUE")


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
