"""Parameters that are words to their users and token ids to the engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmserve import _core
from llmserve.common.arguments import describe, refuse_unknown
from llmserve.errors import InvalidArgument
from llmserve.tokenization.tokenizer import Tokenizer

_NAMES = ("reasoning_start_str", "reasoning_end_str")


def bad_word_token_ids(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Each word as it is tokenized at the start of a text and after a space, which most
    vocabularies have as tokens of their own."""
    texts = [prefix + word.lstrip() for word in words for prefix in ("", " ")]
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    return [list(ids) for ids in dict.fromkeys(map(tuple, encoded)) if ids]


@dataclass(frozen=True, slots=True)
class ThinkingTokens:
    """The token sequences that open and end a section of thinking."""

    start_token_ids: list[int]
    end_token_ids: list[int]

    def budget(self, max_tokens: int) -> _core.ThinkingBudget:
        """The engine's struct."""
        budget = _core.ThinkingBudget()
        budget.max_tokens = max_tokens
        budget.start_token_ids = self.start_token_ids
        budget.end_token_ids = self.end_token_ids
        return budget


def read_thinking_tokens(config: object, tokenizer: Tokenizer | None) -> ThinkingTokens | None:
    """Those of LLM(reasoning_config=...), or the tokenizer's own <think> and </think>; None if
    there are neither. Raises InvalidArgument."""
    if config is None:
        return _own_thinking_tokens(tokenizer)
    if not isinstance(config, Mapping):
        raise InvalidArgument(
            f"reasoning_config must be a dict with {' and '.join(_NAMES)}, got {describe(config)}"
        )
    refuse_unknown("reasoning_config", config, _NAMES)
    if tokenizer is None:
        raise InvalidArgument("reasoning_config needs a tokenizer, and the model has none")
    start, end = (_encoded(name, config.get(name), tokenizer) for name in _NAMES)
    return ThinkingTokens(start, end)


def _encoded(name: str, value: object, tokenizer: Tokenizer) -> list[int]:
    if not isinstance(value, str) or not value:
        raise InvalidArgument(
            f"reasoning_config: {name} must be a string that is not empty, got {describe(value)}"
        )
    return tokenizer.encode(value, add_special_tokens=False)


def _own_thinking_tokens(tokenizer: Tokenizer | None) -> ThinkingTokens | None:
    if tokenizer is None:
        return None
    start, end = (tokenizer.token_id(token) for token in ("<think>", "</think>"))
    return None if start is None or end is None else ThinkingTokens([start], [end])
