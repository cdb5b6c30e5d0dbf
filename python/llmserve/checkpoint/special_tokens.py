"""The special tokens that a tokenizer's folder names."""

from pathlib import Path

from llmserve.checkpoint.model_files import JsonObject, read_json_object
from llmserve.errors import CorruptFile

_MAX_CHARACTERS = 2**16  # of a token; published: 20

SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def read_special_tokens(directory: Path) -> dict[str, str]:
    """By name, those of tokenizer_config.json and special_tokens_map.json. Raises CorruptFile."""
    config = read_json_object(directory, "tokenizer_config.json") or {}
    legacy = read_json_object(directory, "special_tokens_map.json") or {}
    special = _special_tokens(config, directory / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # as transformers reads older checkpoints
        special |= _special_tokens(legacy, directory / "special_tokens_map.json")
    return special


def _special_tokens(config: JsonObject, path: Path) -> dict[str, str]:
    tokens = {}
    for name in SPECIAL_TOKENS:
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            if len(content) > _MAX_CHARACTERS:
                raise CorruptFile(
                    f"{path}: {name}: {len(content)} characters, at most {_MAX_CHARACTERS} are read"
                )
            tokens[name] = content
    return tokens
