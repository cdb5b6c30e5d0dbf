"""Of which blocks a request's prompt is made, so that it goes where they are."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from llmserve import _core
from llmserve.common.arguments import INT32_MAX, integer
from llmserve.errors import InvalidArgument, LLMServeError
from llmserve.server.http.errors import ApiError
from llmserve.server.routes.bodies import ChatBody
from llmserve.server.routes.prompts import chat_prompt
from llmserve.tokenization.tokenizer import Tokenizer

_CHARACTERS_PER_TOKEN = 4  # of a text whose tokens are not known
_NEW_TOKENS = 256  # of a request that does not say


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """What a router is told of a request."""

    hashes: bytes  # of its prompt's full blocks, 32 bytes each
    num_tokens: int
    max_new_tokens: int


class PromptReader:
    """Splits prompts into blocks, as replicas do if it has their tokenizer; else by text."""

    def __init__(self, tokenizer: str, block_size: int = 16) -> None:
        """tokenizer: a path, or empty. Raises InvalidArgument, CorruptFile, NotSupported."""
        self.block_size = block_size
        self._tokenizer = Tokenizer.from_path(Path(tokenizer)) if tokenizer else None
        if tokenizer and self._tokenizer is None:
            raise InvalidArgument(f"tokenizer: {tokenizer} has no tokenizer")

    @property
    def has_tokens(self) -> bool:
        """Whether blocks are those of the replicas' caches."""
        return self._tokenizer is not None

    def read(self, body: Mapping[str, Any]) -> PromptBlocks:
        """Of a body of completions or of a chat; of what is neither, and of one that a replica will
        refuse, as text."""
        salt = body.get("cache_salt")
        salt = salt if isinstance(salt, str) else ""
        count = next(
            (
                body[name]
                for name in ("max_completion_tokens", "max_tokens", "n_predict")
                if type(body.get(name)) is int and body[name] >= 0
            ),
            _NEW_TOKENS,
        )
        n = body.get("n")
        count = min(count, INT32_MAX) * (n if type(n) is int and 0 < n < 1024 else 1)
        token_ids = self._token_ids(body)
        if token_ids is not None:
            hashes = _core.hash_blocks(token_ids, self.block_size, salt)
            return PromptBlocks(hashes, len(token_ids), count)
        data = _text(body)
        size = self.block_size * _CHARACTERS_PER_TOKEN
        hashes = _core.hash_text_blocks(data, size, salt)
        return PromptBlocks(hashes, len(data) // _CHARACTERS_PER_TOKEN, count)

    def _token_ids(self, body: Mapping[str, Any]) -> list[int] | None:
        if self._tokenizer is None:
            return None
        prompt = body.get("prompt")
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            prompt = prompt[0]  # of several the first
        try:
            if isinstance(prompt, str):
                is_bare = body.get("add_special_tokens") is False
                return self._tokenizer.encode(prompt, not is_bare)
            if isinstance(prompt, list):
                return [integer("prompt", token_id, 0, INT32_MAX) for token_id in prompt]
            if "messages" in body:
                chat = msgspec.convert(dict(body), ChatBody)
                return chat_prompt(chat, self._tokenizer)[1]
        except (LLMServeError, ApiError, msgspec.ValidationError, TypeError, ValueError):
            pass
        return None


def _text(body: Mapping[str, Any]) -> bytes:
    """What stands first in a prompt first: what is shared by many."""
    parts = [body.get("tools"), body.get("system"), body.get("messages"), body.get("prompt")]
    parts.append(body.get("input"))
    given = [part for part in parts if part is not None]
    return json.dumps(given, ensure_ascii=False).encode("utf-8", "surrogatepass")
