"""Prompts and biases of llama.cpp's bodies, where texts may stand among token ids."""

from collections.abc import Iterable
from typing import Any

from llmserve.server.http.errors import ApiError
from llmserve.server.routes.llama_cpp.bodies import PromptObject
from llmserve.tokenization.tokenizer import Tokenizer

_BANNED = -100.0


def plain_prompts(value: object, tokenizer: Tokenizer) -> str | list[Any]:
    """A text, token ids, or a list of either. Raises ApiError."""
    if not isinstance(value, list):
        return _plain(value, tokenizer)
    kinds = set(map(type, value))
    if int in kinds and kinds <= {int, str}:  # one prompt
        return _plain(value, tokenizer)
    return [_plain(item, tokenizer) for item in value]


def _plain(item: Any, tokenizer: Tokenizer) -> str | list[Any]:
    if isinstance(item, PromptObject):
        if item.multimodal_data:
            raise ApiError(400, "prompt: multimodal_data: models take text alone", param="prompt")
        return item.prompt_string
    if isinstance(item, str):
        return item
    token_ids: list[int] = []
    if not isinstance(item, list):
        raise ApiError(400, "prompt: token ids among prompts stand in lists", param="prompt")
    for idx, part in enumerate(item):
        # As for a prompt that is a text: what begins it is added where it begins with text.
        found = [part] if isinstance(part, int) else tokenizer.encode(part, idx == 0)
        token_ids += found
    return token_ids


def bias_by_id(
    given: "dict[str, float | bool] | list[tuple[int | str, float | bool]]", tokenizer: Tokenizer
) -> dict[str, float]:
    """By token id, as OpenAI's bodies have it. A text stands for each of its tokens."""
    pairs: Iterable[tuple[int | str, float | bool]]
    pairs = given.items() if isinstance(given, dict) else given
    found: dict[str, float] = {}
    for token, bias in pairs:
        amount = _BANNED if bias is False else float(bias)
        is_id = isinstance(token, int) or token.isdecimal()
        for token_id in [token] if is_id else tokenizer.encode(str(token), False):
            found[str(token_id)] = amount
    return found
