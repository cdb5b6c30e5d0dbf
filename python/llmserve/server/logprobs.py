"""Log-probabilities in the forms of the two OpenAI APIs."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from llmserve.outputs import Logprob
from llmserve.request_state import RequestState
from llmserve.tokenization.tokenizer import Tokenizer

# JSON has no infinities; OpenAI's servers give this for what is next to impossible.
_LOWEST = -9999.0

TokenLogprobs = Mapping[int, Logprob]  # the sampled token first, then the most likely


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST


def _text(token_id: int, logprob: Logprob) -> str:
    return f"token_id:{token_id}" if logprob.decoded_token is None else logprob.decoded_token


def _top(row: TokenLogprobs, num_top: int, named: Sequence[int]) -> list[tuple[int, Logprob]]:
    ranked = [item for item in row.items() if item[1].rank is not None]
    ranked.sort(key=lambda item: (item[1].rank, item[0]))
    if num_top == -1:  # all there are
        return ranked
    return ranked[:num_top] + [item for item in ranked[num_top:] if item[0] in named]


def chat_logprobs(
    rows: Sequence[TokenLogprobs], num_top: int, named: Sequence[int], tokenizer: Tokenizer
) -> dict[str, Any]:
    """{"content": [{"token", "logprob", "bytes", "top_logprobs"}]}, an entry a token. Its
    top_logprobs are the num_top most likely tokens and those of `named`."""

    def entry(token_id: int, logprob: Logprob) -> dict[str, Any]:
        return {
            "token": _text(token_id, logprob),
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


class CompletionLogprobs:
    """{"tokens", "token_logprobs", "top_logprobs", "text_offset"} of one text, piece by piece."""

    def __init__(self, num_top: int, named: Sequence[int]) -> None:
        """top_logprobs has the num_top most likely tokens and those of `named`."""
        self._num_top = num_top
        self._named = named
        self._offset = 0

    def rows(self, rows: Iterable[TokenLogprobs | None], first_text: str = "") -> dict[str, Any]:
        """Of the next tokens. A row of None has nothing before it; its text is first_text."""
        tokens: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for row in rows:
            if row is None:
                text, logprob, top = first_text, None, None
            else:
                token_id, own = next(iter(row.items()))
                text, logprob = _text(token_id, own), _finite(own.logprob)
                tops_of_row = _top(row, self._num_top, self._named)
                top = {_text(i, p): _finite(p.logprob) for i, p in tops_of_row}
                top.setdefault(text, logprob)  # the sampled token is always among them
            tokens.append(text)
            logprobs.append(logprob)
            tops.append(top)
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": tops,
            "text_offset": offsets,
        }
