"""What guesses with a folder: a head, as its own config says, or a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmserve.checkpoint.repository import PICKLED_HEADS
from llmserve.errors import CorruptFile, NotSupported

# Of `speculators_model_type`, and of parts of the names of architectures, the longest first.
_SPECULATORS = {"eagle3": "eagle3", "eagle": "eagle"}
_ARCHITECTURES = {"eagle3": "eagle3", "eagle": "eagle", "medusa": "medusa"}
# Heads of other kinds, which are told by name.
_REFUSED = ("dflash", "dspark", "peagle", "hydra", "mlpspeculator", "mlp_speculator")
_MAX_HEADER = 100_000_000  # bytes: the safetensors format's own bound
_PICKLED = "pytorch_model.bin"
_MAX_NAMES = 1_000_000  # bytes that are looked at of a file of torch.save


@dataclass(frozen=True, slots=True)
class DraftFolder:
    """The method that a folder is for, and how many tokens its config guesses, if it says so."""

    method: str
    num_tokens: int | None = None


def read_draft_folder(path: Path) -> DraftFolder:
    """Of a folder, or a config.json. Raises NotSupported for heads that are not run, and
    CorruptFile for a config that is no JSON object. What is no head is a draft model."""
    if path.suffix == ".safetensors":
        path = path.parent
    file = path if path.suffix == ".json" else path / "config.json"
    if not file.is_file():
        return DraftFolder("draft_model")  # GGUF, or whatever opening it says
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CorruptFile(f"{file}: {error}") from error
    if not isinstance(config, dict):
        raise CorruptFile(f"{file}: expected an object")
    kind = config.get("speculators_model_type")
    if kind is not None:
        if kind not in _SPECULATORS:
            raise NotSupported(
                f"{file}: speculators_model_type {kind!r} is not supported; of heads in the "
                f"layout of speculators {', '.join(_SPECULATORS)} are run"
            )
        return DraftFolder(_SPECULATORS[kind], _proposed(config))
    names = config.get("architectures") or []
    name = str(names[0]).lower() if isinstance(names, list) and names else ""
    model_type = str(config.get("model_type", "")).lower()
    for refused in _REFUSED:
        if refused in name or refused in model_type:
            raise NotSupported(
                f"{file}: a head of kind {names[0] if names else model_type!r} is not supported"
            )
    for part, method in _ARCHITECTURES.items():
        if part in name or part in model_type:
            return DraftFolder(method)
    if "medusa_num_heads" in config:
        return DraftFolder("medusa")
    return DraftFolder(_by_tensors(path))


def is_pickled_head(path: Path) -> bool:
    """Whether a folder holds a head as torch.save wrote it: it is read, without running what it
    says, and models are not. Raises what `read_draft_folder` raises."""
    return (
        any((path / name).is_file() for name in PICKLED_HEADS)
        and not any(path.glob("*.safetensors"))
        and read_draft_folder(path).method != "draft_model"
    )


def _proposed(config: Mapping[str, Any]) -> int | None:
    """How many tokens the default proposal of a `speculators` config guesses."""
    own = config.get("speculators_config")
    if not isinstance(own, dict):
        return None
    for proposal in own.get("proposal_methods") or []:
        if isinstance(proposal, dict) and proposal.get("proposal_type") in (
            own.get("default_proposal_method"),
            None,
        ):
            tokens = proposal.get("speculative_tokens")
            return tokens if isinstance(tokens, int) and tokens > 0 else None
    return None


def _by_tensors(path: Path) -> str:
    """EAGLE's authors name Llama as the architecture of their first heads."""
    names = _tensor_names(path)
    if not any(quoted in names for quoted in (b'"fc.weight"', _pickled("fc.weight"))):
        return "draft_model"
    return "eagle3" if b"hidden_norm.weight" in names else "eagle"


def _pickled(name: str) -> bytes:
    return b"X" + len(name).to_bytes(4, "little") + name.encode()


def _tensor_names(path: Path) -> bytes:
    """Bytes that the names of the tensors are in, where the folder has one file of weights; what is
    wrong with it is said by opening it. A file of torch.save begins with the record of the names.
    """
    file = path / "model.safetensors"
    if not file.is_file():
        file = path / _PICKLED
        if not file.is_file():
            return b""
        with file.open("rb") as stream:
            return stream.read(_MAX_NAMES)
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        return stream.read(size) if size <= _MAX_HEADER else b""
