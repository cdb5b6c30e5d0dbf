"""The tokens that end an answer of gpt-oss."""

from collections.abc import Mapping

# A call of a tool, and the answer.
_HAND_OVERS = ("<|call|>", "<|return|>")


def harmony_end_ids(token_ids: Mapping[str, int]) -> list[int]:
    """Of a vocabulary, by text, that has the signs of harmony: those that hand over to somebody
    else. Its <|end|> only ends one message of several. OpenAI 2025, "OpenAI harmony response
    format", special tokens."""
    is_harmony = all(sign in token_ids for sign in ("<|channel|>", "<|message|>", *_HAND_OVERS))
    return [token_ids[sign] for sign in _HAND_OVERS] if is_harmony else []
