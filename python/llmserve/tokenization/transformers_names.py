"""What scripts ask of a tokenizer by the names that transformers has for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    import tokenizers


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """What calling a tokenizer gives: `tokenizer(text).input_ids`, or `["input_ids"]`."""

    input_ids: list[int] | list[list[int]]  # of a text, or of each

    def __getitem__(self, name: str) -> object:
        if name != "input_ids":
            raise KeyError(f"{name!r}: there is 'input_ids' alone")
        return self.input_ids


class TransformersNames:
    """Thin ones over a tokenizer of the tokenizers library and the special tokens by name
    ("bos_token" …)."""

    def __init__(
        self, tokenizer: "tokenizers.Tokenizer", special_tokens: Mapping[str, str]
    ) -> None:
        self._tokenizer = tokenizer
        self._special_tokens = special_tokens

    @property
    def bos_token(self) -> str | None:
        """What begins a text, None where the tokenizer's folder names none, like all of these."""
        return self._special_tokens.get("bos_token")

    @property
    def bos_token_id(self) -> int | None:
        """Its id, None where it is not in the vocabulary, like all of these."""
        return self._id("bos_token")

    @property
    def eos_token(self) -> str | None:
        """What ends a text."""
        return self._special_tokens.get("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Its id, which ends a generation beside those of the model's configs."""
        return self._id("eos_token")

    @property
    def pad_token(self) -> str | None:
        """What fills a batch: not needed here."""
        return self._special_tokens.get("pad_token")

    @property
    def pad_token_id(self) -> int | None:
        """Its id."""
        return self._id("pad_token")

    @property
    def unk_token(self) -> str | None:
        """What stands for what the vocabulary does not have."""
        return self._special_tokens.get("unk_token")

    @property
    def unk_token_id(self) -> int | None:
        """Its id."""
        return self._id("unk_token")

    @property
    def vocab_size(self) -> int:
        """Tokens without the added ones."""
        return self._tokenizer.get_vocab_size(with_added_tokens=False)

    def get_vocab(self) -> dict[str, int]:
        """Every token as the vocabulary writes it, and its id."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    @overload
    def convert_ids_to_tokens(self, ids: int) -> str | None: ...
    @overload
    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]: ...
    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str | None] | None:
        """Tokens as the vocabulary writes them, None for an id that has none."""
        if isinstance(ids, Sequence):
            return [self._tokenizer.id_to_token(token_id) for token_id in ids]
        return self._tokenizer.id_to_token(ids)

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...
    @overload
    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int | None]: ...
    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | list[int | None] | None:
        """Ids of tokens as the vocabulary writes them; unk_token_id for one that it has not."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        token_id = self._tokenizer.token_to_id(tokens)
        return self.unk_token_id if token_id is None else token_id

    def _id(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        return None if token is None else self._tokenizer.token_to_id(token)
