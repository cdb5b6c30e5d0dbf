"""The special tokens that a tokenizer's folder names."""

from pathlib import Path

from llmserve.checkpoint.model_files import JsonObject, read_json_object

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
    special = _special_tokens(config)
    if "added_tokens_decoder" not in config:  # as transformers reads older checkpoints
        special |= _special_tokens(legacy)
    return special


def _special_tokens(config: JsonObject) -> dict[str, str]:
    tokens = {}
    for name in SPECIAL_TOKENS:
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            tokens[name] = content
    return tokens
