"""Names of models on a Hub, as people type them and copy them from its pages."""

import re
from dataclasses import dataclass

_PART = r"[A-Za-z0-9][\w.-]{0,95}"
_NAME = re.compile(rf"((?:{_PART}/)?{_PART})(?::([\w.-]+(?:/[\w.-]+)*))?")
_HOST = re.compile(r"(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/")
_PAGE = re.compile(rf"({_PART}/{_PART})/(?:tree|blob|resolve)/([^/?#]+)(?:/([^?#]+))?")
_FILE_SUFFIXES = (".gguf", ".json", ".safetensors")


@dataclass(frozen=True, slots=True)
class ModelName:
    """What a name says: the repository, and which of its GGUF files."""

    model_id: str  # "organisation/name", or the name alone
    file: str | None = None  # a file's name, or the quantization in one: "Q4_K_M"
    revision: str | None = None  # of a page's address
    is_address: bool = False  # it begins with the Hub's host, and cannot be a path

    def __str__(self) -> str:
        return self.model_id if self.file is None else f"{self.model_id}:{self.file}"


def parse_model_name(text: str) -> ModelName | None:
    """The name in `text`; None for what can only be a path.

    >>> parse_model_name("hf.co/Qwen/Qwen3-0.6B-GGUF:Q8_0").file
    'Q8_0'
    >>> parse_model_name("./Qwen3-0.6B")
    """
    host = _HOST.match(text)
    name = text[host.end() :].split("?")[0].rstrip("/") if host else text
    if ".." in name:
        return None
    page = _PAGE.fullmatch(name) if host else None
    if page is not None:
        model_id, revision, file = page.groups()
        is_gguf = file is not None and file.endswith(".gguf")
        return ModelName(model_id, file if is_gguf else None, revision, is_address=True)
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    model_id, file = match.groups()
    if model_id.endswith(_FILE_SUFFIXES) and not host:  # a file's name, mistyped
        return None
    return ModelName(model_id, file, is_address=host is not None)
