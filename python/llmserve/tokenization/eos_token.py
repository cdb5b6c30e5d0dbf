"""The id of the token that ends a text."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from llmserve.checkpoint.model_files import (
    MAX_TOKENIZER_BYTES,
    is_gguf,
    read_bytes,
    read_json_object,
)
from llmserve.checkpoint.special_tokens import read_special_tokens
from llmserve.tokenization.harmony_ends import harmony_end_ids
from llmserve.tokenization.tokenizer_files import configured_tokens, find_tokenizer, read_tokenizer

_ADDED_TOKENS = re.compile(r'"added_tokens"\s*:\s*(?=\[)')


def read_eos_token_id(source: Path) -> int | None:
    """The id of a tokenizer's eos_token, None if it names none. source: as Tokenizer.from_path.

    The engine's ends are set before the weights load, and the tokenizer, which takes long, is read
    meanwhile: so this id is looked for by itself. Raises what Tokenizer.from_path raises.
    """
    return _eos_and_added(source)[0]


def read_end_token_ids(source: Path) -> list[int]:
    """What ends an answer by a tokenizer's files: its eos_token, and the ends of harmony's
    messages. source and errors: as read_eos_token_id."""
    eos, added = _eos_and_added(source)
    return [*([] if eos is None else [eos]), *harmony_end_ids(added)]


def _eos_and_added(source: Path) -> tuple[int | None, Mapping[str, int]]:
    if is_gguf(source):
        from llmserve.tokenization.gguf_tokenizer import GgufVocabulary

        vocabulary = GgufVocabulary(source)
        if not vocabulary.exists:
            return None, {}
        return vocabulary.special_id("eos"), vocabulary.control_ids
    path = find_tokenizer(source) if source.is_dir() else source
    if path is None:
        return None, {}
    eos_token = read_special_tokens(path.parent).get("eos_token")
    added = _added_token_ids(path)
    if eos_token is None:
        return None, added
    token_id = added.get(eos_token)
    return (read_tokenizer(path).token_to_id(eos_token) if token_id is None else token_id), added


def _added_token_ids(path: Path) -> dict[str, int]:
    """By their text, as far as they are quickly found: of a tokenizer.json no more is parsed, and
    for other files they are in tokenizer_config.json."""
    text = ""
    if path.suffix == ".json":
        data = read_bytes(path.parent, path.name, MAX_TOKENIZER_BYTES) or b""
        text = data.decode(errors="replace")
    if (found := _ADDED_TOKENS.search(text)) is None:
        config_path = path.parent / "tokenizer_config.json"
        config = read_json_object(config_path.parent, config_path.name) or {}
        return {token.content: token.token_id for token in configured_tokens(config, config_path)}
    try:
        tokens, _ = json.JSONDecoder().raw_decode(text, found.end())
        return {token["content"]: int(token["id"]) for token in tokens}
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return {}  # the library says what is wrong
