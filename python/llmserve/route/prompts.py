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
from llmserve.route.outgoing import canonical
from llmserve.server.http.errors import ApiError
from llmserve.server.routes.anthropic.bodies import CountTokensBody, MessagesBody
from llmserve.server.routes.anthropic.conversation import chat_body as chat_of_messages
from llmserve.server.routes.bodies import ChatBody
from llmserve.server.routes.llama_cpp.bodies import LlamaCompletionBody
from llmserve.server.routes.llama_cpp.texts import plain_prompts
from llmserve.server.routes.ollama.bodies import OllamaChatBody, OllamaGenerateBody
from llmserve.server.routes.ollama.generate import messages_of
from llmserve.server.routes.prompts import chat_prompt
from llmserve.server.routes.responses.bodies import ResponsesBody
from llmserve.server.routes.responses.conversation import chat_body as chat_of_response
from llmserve.server.routes.responses.conversation import read_input
from llmserve.tokenization.tokenizer import Tokenizer

_CHARACTERS_PER_TOKEN = 4  # of a text whose tokens are not known
_NEW_TOKENS = 256  # of a request that does not say
_NEW_TOKENS_NAMES = ("max_completion_tokens", "max_tokens", "n_predict", "max_output_tokens")


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

    def read(self, path: str, body: Mapping[str, Any]) -> PromptBlocks:
        """Of a request by its path; of one that has no prompt, or that a replica will refuse, as
        text."""
        salt = body.get("cache_salt")
        salt = salt if isinstance(salt, str) else ""
        count = next(
            (
                body[name]
                for name in _NEW_TOKENS_NAMES
                if type(body.get(name)) is int and body[name] >= 0
            ),
            _NEW_TOKENS,
        )
        n = body.get("n")
        count = min(count, INT32_MAX) * (n if type(n) is int and 0 < n < 1024 else 1)
        token_ids = self._token_ids(canonical(path), body)
        if token_ids is not None:
            hashes = _core.hash_blocks(token_ids, self.block_size, salt)
            return PromptBlocks(hashes, len(token_ids), count)
        data = _text(body)
        size = self.block_size * _CHARACTERS_PER_TOKEN
        hashes = _core.hash_text_blocks(data, size, salt)
        return PromptBlocks(hashes, len(data) // _CHARACTERS_PER_TOKEN, count)

    def _token_ids(self, path: str, body: Mapping[str, Any]) -> list[int] | None:
        if self._tokenizer is None:
            return None
        try:
            if (chat := _chat(path, body)) is not None:
                return chat_prompt(chat, self._tokenizer)[1]
            return self._of_prompt(path, body.get("prompt"), body)
        except (LLMServeError, ApiError, msgspec.ValidationError, TypeError, ValueError):
            return None

    def _of_prompt(self, path: str, prompt: Any, body: Mapping[str, Any]) -> list[int] | None:
        assert self._tokenizer is not None
        if path == "/completion":
            prompt = msgspec.convert(prompt, LlamaCompletionBody.__annotations__["prompt"])
            prompt = plain_prompts(prompt, self._tokenizer)
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            prompt = prompt[0]  # of several the first
        if isinstance(prompt, str):
            is_bare = body.get("add_special_tokens") is False
            return self._tokenizer.encode(prompt, not is_bare)
        if isinstance(prompt, list):
            return [integer("prompt", token_id, 0, INT32_MAX) for token_id in prompt]
        return None


def _chat(path: str, body: Mapping[str, Any]) -> ChatBody | None:
    """The conversation of a body in whatever words; None of one that has none. Raises ApiError,
    ValidationError."""
    fields = dict(body)
    if path in ("/v1/messages", "/v1/messages/count_tokens"):
        kind = MessagesBody if path == "/v1/messages" else CountTokensBody
        return chat_of_messages(msgspec.convert(fields, kind), False)
    if path == "/v1/responses":
        response = msgspec.convert(fields, ResponsesBody)
        return chat_of_response(response, read_input(response.input)[1])
    if path == "/api/chat":
        chat = msgspec.convert(fields, OllamaChatBody)
        think = {} if chat.think is None else {"enable_thinking": chat.think is not False}
        messages = messages_of(chat.messages or [])
        return ChatBody(messages=messages, tools=chat.tools, chat_template_kwargs=think or None)
    if path == "/api/generate" and not fields.get("raw"):
        asked = msgspec.convert(fields, OllamaGenerateBody)
        messages = [{"role": "user", "content": asked.prompt}]
        if asked.system:
            messages.insert(0, {"role": "system", "content": asked.system})
        return ChatBody(messages=messages)
    return msgspec.convert(fields, ChatBody) if "messages" in fields else None


def _text(body: Mapping[str, Any]) -> bytes:
    """What stands first in a prompt first: what is shared by many."""
    names = ("tools", "system", "instructions", "messages", "prompt", "input")
    parts = [body.get(name) for name in names]
    given = [part for part in parts if part is not None]
    return json.dumps(given, ensure_ascii=False).encode("utf-8", "surrogatepass")
