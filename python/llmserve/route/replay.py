"""Streams that outlive the replica that makes them.

A stream is asked for with the ids of its tokens and with a seed. When its replica dies, another one
of the same numerics class gets the same request with the tokens that have come (`resume_token_ids`)
and goes on after them: its lines are those that the dead one would have sent. Of several choices
each goes on as a request of its own, with the seed that its sample had.
"""

import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec

from llmserve import _core

_DONE = b"[DONE]"
_DATA = b"data: "
# What says nothing to a request that goes on, or was said with the first line.
_SAID_ONCE = ("echo", "prompt_logprobs", "n", "best_of", "return_prompt_text")


@dataclass(slots=True)
class Choice:
    """One of a stream's sequences, as far as it has come."""

    prompt: object  # of a completion: its own prompt; None of a chat
    seed: int
    token_ids: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0
    has_begun: bool = False
    is_finished: bool = False


class StreamRecord:
    """A stream's request, and what its client has been given."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.body = dict(body)
        self._wants_ids = bool(body.get("return_token_ids"))
        options = body.get("stream_options")
        options = options if isinstance(options, dict) else {}
        self.wants_usage = bool(options.get("include_usage"))
        self._counts_always = bool(options.get("continuous_usage_stats"))
        seed = body.get("seed")
        self._seed = seed if type(seed) is int and seed != -1 else drawn_seed()
        n = body.get("n")
        self._n = n if type(n) is int and n > 0 else 1
        self._head: dict[str, Any] = {}  # id, created and model of the first line
        self._cached_tokens = 0
        self.is_failed = False  # the engine has said why it cannot go on
        self.has_told_usage = False
        self._is_done = False  # the stream's own last line has come
        self.num_resumed = 0  # tokens that were not made again

    @cached_property
    def choices(self) -> list[Choice]:
        """All, by their index; once a replica has taken the request, which bounds their number."""
        return [
            Choice(prompt, _core.sample_seed(self._seed % 2**64, sample))
            for prompt in _prompts(self.body)
            for sample in range(self._n)
        ]

    @property
    def can_resume(self) -> bool:
        """Whether it may go on elsewhere. What a prompt's log-probabilities move is not told."""
        if not self._head and not any(choice.has_begun for choice in self.choices):
            return True
        body = self.body
        return not (body.get("echo") and body.get("logprobs") is not None)

    @property
    def is_finished(self) -> bool:
        """Whether every choice has had its last token."""
        return all(choice.is_finished for choice in self.choices)

    @property
    def num_tokens(self) -> int:
        """Generated, of all choices."""
        return sum(len(choice.token_ids) for choice in self.choices)

    def request(self) -> dict[str, Any]:
        """The body for the first replica."""
        return {**self.body, "seed": self._seed, "return_token_ids": True}

    def rest(self, index: int) -> dict[str, Any]:
        """The body of what a choice still lacks."""
        choice = self.choices[index]
        body = {name: value for name, value in self.body.items() if name not in _SAID_ONCE}
        if choice.prompt is not None:
            body["prompt"] = choice.prompt
        body |= {"seed": choice.seed, "return_token_ids": True}
        if choice.token_ids:
            body["resume_token_ids"] = choice.token_ids
            self.num_resumed += len(choice.token_ids)
        return body

    def has_ended(self, index: int | None) -> bool:
        """Whether a replica's stream, of one choice or of all, has said all."""
        if self.is_failed:
            return True
        return self._is_done if index is None else self.choices[index].is_finished

    def unfinished(self) -> list[int]:
        """Indices of the choices that lack something."""
        return [index for index, choice in enumerate(self.choices) if not choice.is_finished]

    def line(self, data: bytes, index: int | None) -> bytes:
        """An event of a replica's stream as the client gets it; empty: not at all. index: the
        choice that the replica's only one is; None: they are the stream's own. Raises ValueError
        for what is no event of such a stream."""
        if not data.startswith(_DATA):
            return data + b"\n\n"  # a comment
        if data[len(_DATA) :].strip() == _DONE:
            self._is_done = True
            return b""
        chunk = msgspec.json.decode(data[len(_DATA) :])
        if not isinstance(chunk, dict):
            raise ValueError("an event is no object")
        if "error" in chunk:
            self.is_failed = True
            return data + b"\n\n"
        names = ("id", "created", "model")
        if not self._head:
            self._head = {name: chunk.get(name) for name in names}
        chunk |= self._head
        prompt_ids = chunk.pop("prompt_token_ids", None)
        kept = []
        for told in chunk.get("choices") or ():
            if self._note(told, index, prompt_ids):
                kept.append(told)
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            details = usage.get("prompt_tokens_details") or {}
            self._cached_tokens = max(self._cached_tokens, details.get("cached_tokens") or 0)
        if not kept:  # usage, which comes once, at the end; or nothing that is new
            if chunk.get("choices") or index is not None:
                return b""
            self.has_told_usage = isinstance(usage, dict)
            return _event(chunk)
        chunk["choices"] = kept
        if self._wants_ids and prompt_ids is not None and index is None:
            chunk["prompt_token_ids"] = prompt_ids
        if self._counts_always and index is not None:
            chunk["usage"] = self.usage()
        return _event(chunk)

    def _note(self, told: dict[str, Any], index: int | None, prompt_ids: object) -> bool:
        """Takes in a choice of a chunk; whether the client is told of it."""
        if index is not None:
            told["index"] = index
        choice = self.choices[told["index"]]
        token_ids = told.get("token_ids") or []
        own_ids = told.get("prompt_token_ids", prompt_ids)
        if isinstance(own_ids, list):
            choice.num_prompt_tokens = len(own_ids)
        if not self._wants_ids:
            told.pop("token_ids", None)
            told.pop("prompt_token_ids", None)
        choice.token_ids += token_ids
        delta = told.get("delta")
        is_opening = isinstance(delta, dict) and "role" in delta
        if is_opening and choice.has_begun:
            return False
        choice.has_begun = True
        if told.get("finish_reason"):
            choice.is_finished = True
        elif isinstance(delta, dict) and not delta and not self._wants_ids:
            # A line for the token's id alone, which the client has not asked for.
            return bool(told.get("logprobs"))
        return True

    def usage(self) -> dict[str, Any]:
        """Token counts of the whole."""
        prompt = sum(choice.num_prompt_tokens for choice in self.choices[:: self._n])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.num_tokens,
            "total_tokens": prompt + self.num_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }

    def usage_line(self) -> bytes:
        """The event that ends a stream which asks for usage and whose own was lost."""
        kind = "chat.completion.chunk" if "messages" in self.body else "text_completion"
        return _event({**self._head, "object": kind, "choices": [], "usage": self.usage()})


def _event(chunk: object) -> bytes:
    return _DATA + msgspec.json.encode(chunk) + b"\n\n"


def drawn_seed() -> int:
    """Of a request that has none."""
    return int.from_bytes(os.urandom(8), "little") >> 1


def _prompts(body: Mapping[str, Any]) -> list[Any]:
    if "messages" in body:
        return [None]
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return prompt
    return [prompt]


async def events(
    pieces: AsyncIterator[bytes], max_bytes: int = 2**26
) -> AsyncGenerator[bytes, None]:
    """The events of a stream, without the empty lines after them; one that broke off is not
    given. Raises ValueError for one of more than max_bytes."""
    rest = b""
    async for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n\n")
        for event in whole:
            yield event
        if len(rest) > max_bytes:
            raise ValueError(f"an event of more than {max_bytes} bytes")
