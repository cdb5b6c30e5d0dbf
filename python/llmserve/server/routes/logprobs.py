"""Log-probabilities in the forms of the two OpenAI APIs."""

import math
from codecs import getincrementaldecoder
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from llmserve.outputs import Logprob
from llmserve.requests.state import RequestState
from llmserve.tokenization.tokenizer import Tokenizer

# JSON has no infinities; OpenAI's servers give this for what is next to impossible.
_LOWEST = -9999.0
# What stands in a text for bytes that are no character.
_REPLACED = "\ufffd"

TokenLogprobs = Mapping[int, Logprob]  # the sampled token first, then the most likely


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST


def _id_name(token_id: int) -> str:
    return f"token_id:{token_id}"


def _text(token_id: int, logprob: Logprob) -> str:
    return _id_name(token_id) if logprob.decoded_token is None else logprob.decoded_token


def _top(row: TokenLogprobs, num_top: int, named: Sequence[int]) -> list[tuple[int, Logprob]]:
    ranked = [item for item in row.items() if item[1].rank is not None]
    ranked.sort(key=lambda item: (item[1].rank, item[0]))
    if num_top == -1:  # all there are
        return ranked
    return ranked[:num_top] + [item for item in ranked[num_top:] if item[0] in named]


def chat_logprobs(
    rows: Sequence[TokenLogprobs],
    num_top: int,
    named: Sequence[int],
    tokenizer: Tokenizer,
    as_ids: bool = False,
    has_ids: bool = False,
) -> dict[str, Any]:
    """{"content": [{"token", "logprob", "bytes", "top_logprobs"}]}, an entry a token. Its
    top_logprobs are the num_top most likely tokens and those of `named`. as_ids: tokens are called
    token_id:7 and so on. has_ids: entries have an `id`, too."""

    def entry(token_id: int, logprob: Logprob) -> dict[str, Any]:
        return {
            **({"id": token_id} if has_ids else {}),
            "token": _id_name(token_id) if as_ids else _text(token_id, logprob),
            "logprob": _finite(logprob.logprob),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    content = []
    for row in rows:
        token_id, logprob = next(iter(row.items()))
        top = [entry(*item) for item in _top(row, num_top, named)]
        content.append({**entry(token_id, logprob), "top_logprobs": top})
    return {"content": content}


class PromptRows:
    """prompt_logprobs of an answer's prompts, a dict a token, as JSON. It is made once for all
    choices of a prompt, row by row: millions of dicts would stop every thread whenever the garbage
    collector looks at them."""

    def __init__(self, states: Sequence[RequestState]) -> None:
        self._states = states
        self._json: dict[int, msgspec.Raw] = {}

    def of(self, prompt_idx: int) -> msgspec.Raw:
        """null if they have not come."""
        if prompt_idx not in self._json:
            rows = self._states[prompt_idx].prompt_rows()
            if rows is None:
                return msgspec.Raw(b"null")
            json = b"[%b]" % b",".join(map(msgspec.json.encode, rows))
            self._json[prompt_idx] = msgspec.Raw(json)
        return self._json[prompt_idx]


class _Offsets:
    """Where tokens begin in their text as a client has it, in characters. A token that begins
    within a character has that one's place."""

    def __init__(self, begin: int) -> None:
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self.next = begin

    def place(self, token: bytes) -> int:
        """Of the next token."""
        is_open = token and self._decoder.getstate()[0]
        if is_open and token[0] & 0xC0 != 0x80:  # no byte of the character that was begun
            self.next += len(self._decoder.decode(b"", final=True))
        place = self.next
        self.next += len(self._decoder.decode(token))
        return place


class CompletionLogprobs:
    """{"tokens", "token_logprobs", "top_logprobs", "text_offset"} of one text, piece by piece."""

    def __init__(
        self,
        num_top: int,
        named: Sequence[int],
        tokenizer: Tokenizer | None = None,
        skips_special: bool = True,
        begin: int = 0,
        as_ids: bool = False,
    ) -> None:
        """top_logprobs has the num_top most likely tokens and those of `named`. skips_special: the
        text has no special tokens. begin: characters before it, of the prompt. as_ids: as in
        `chat_logprobs`."""
        self._as_ids = as_ids
        self._num_top = num_top
        self._named = named
        self._tokenizer = tokenizer
        self._skips_special = skips_special
        self._offsets = _Offsets(begin)

    def rows(self, rows: Iterable[TokenLogprobs]) -> dict[str, Any]:
        """Of the next tokens."""
        fields = _Fields()
        for row in rows:
            token_id = next(iter(row))
            token = self._bytes(token_id, self._skips_special)
            self._add(fields, row, token_id, self._offsets.place(token))
        return fields.to_dict()

    def prompt_rows(
        self, rows: Iterable[TokenLogprobs | None], first_token_id: int, text: str
    ) -> dict[str, Any]:
        """Of a prompt of this text. A row of None, the first token's, has nothing before it."""
        fields = _Fields()
        offsets = _Offsets(0)
        for row in rows:
            token_id = first_token_id if row is None else next(iter(row))
            token = self._bytes_in(text, offsets.next, token_id)
            self._add(fields, row, token_id, offsets.place(token))
        return fields.to_dict()

    def _add(self, fields: "_Fields", row: TokenLogprobs | None, token_id: int, place: int) -> None:
        logprob: float | None = None
        top: dict[str, float] | None = None
        if row is None:
            text = self._first_name(token_id)
        else:
            own = row[token_id]
            text, logprob, top = self._name(token_id, own), _finite(own.logprob), {}
            for top_id, other in _top(row, self._num_top, self._named):
                top.setdefault(self._name(top_id, other), _finite(other.logprob))
            top[text] = logprob  # always among them, whatever else is written as it is
        fields.tokens.append(text)
        fields.logprobs.append(logprob)
        fields.tops.append(top)
        fields.offsets.append(place)

    def _first_name(self, token_id: int) -> str:
        text = None if self._tokenizer is None else self._tokenizer.token_text(token_id)
        return self._name(token_id, Logprob(0.0, None, text))

    def _name(self, token_id: int, logprob: Logprob) -> str:
        """Its text; where that is no whole characters `bytes:\\xf0\\x9f`, as in OpenAI's API."""
        if self._as_ids:
            return _id_name(token_id)
        text = _text(token_id, logprob)
        if self._tokenizer is None or _REPLACED not in text:
            return text
        token = self._tokenizer.token_bytes(token_id)
        if text.encode() == token:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)

    def _bytes(self, token_id: int, skips_special: bool) -> bytes:
        """What it adds to the text."""
        if self._tokenizer is None or (skips_special and self._tokenizer.is_special(token_id)):
            return b""
        return self._tokenizer.token_bytes(token_id)

    def _bytes_in(self, text: str, place: int, token_id: int) -> bytes:
        """Likewise, of a prompt: special tokens that the tokenizer added are not in its text, nor
        is a space that it put before the first word."""
        token = self._bytes(token_id, skips_special=False)
        if text.startswith(token.decode(errors="replace"), place):
            return token
        if place == 0 and token.startswith(b" ") and not text.startswith(" "):
            return token[1:]
        return self._bytes(token_id, skips_special=True)


@dataclass(slots=True)
class _Fields:
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    tops: list[dict[str, float] | None] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "token_logprobs": self.logprobs,
            "top_logprobs": self.tops,
            "text_offset": self.offsets,
        }
