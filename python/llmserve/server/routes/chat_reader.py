"""Reads the samples of a conversation's job: what their new text adds to each message, how each
ends, and how many of its tokens were thoughts."""

from dataclasses import dataclass, field

from llmserve.outputs import CompletionOutput
from llmserve.parsers.deltas import Pieces
from llmserve.server.routes.chat_parser import ChatFormat, ChatParser
from llmserve.server.routes.wire import finish_reason
from llmserve.tokenization.tokenizer import Tokenizer


@dataclass(slots=True)
class _ThoughtCounter:
    """Counts the tokens of one sample up to the end of its reasoning, sign and all."""

    form: ChatFormat
    tokenizer: Tokenizer
    num_tokens: int = 0
    _read: bytearray = field(default_factory=bytearray)  # what the signs are looked for in
    _num_read: int = 0
    _is_open: bool = False
    _is_over: bool = False

    def __post_init__(self) -> None:
        self._is_open = self.form.is_thinking
        self._is_over = self.form.reasoning is None

    def read(self, token_ids: list[int]) -> None:
        """The next tokens."""
        if self._is_over:
            return
        assert self.form.reasoning is not None
        starts = tuple(sign.encode() for sign in self.form.reasoning.starts)
        ends = tuple(sign.encode() for sign in self.form.reasoning.ends)
        longest = max(map(len, starts)) + max(map(len, ends))
        for token_id in token_ids:
            self._num_read += 1
            self._read += self.tokenizer.token_bytes(token_id)
            if not self._is_open:
                text = bytes(self._read).lstrip()
                self._is_open = text.startswith(starts)
                may_open = any(start.startswith(text) for start in starts)
                self._is_over = not self._is_open and not may_open
            if self._is_open:
                self.num_tokens = self._num_read
                self._is_over = any(end in self._read for end in ends)
                del self._read[:-longest]
            if self._is_over:
                return


class ChatReader:
    """Of all samples of one job."""

    def __init__(self, form: ChatFormat, tokenizer: Tokenizer) -> None:
        self._format = form
        self._tokenizer = tokenizer
        self._parsers: dict[int, ChatParser] = {}
        self._counters: dict[int, _ThoughtCounter] = {}

    @property
    def is_plain(self) -> bool:
        """Whether all text is content, as it comes."""
        return self._format.style is None and self._format.reasoning is None

    @property
    def num_reasoning_tokens(self) -> int:
        """Of those read so far."""
        return sum(counter.num_tokens for counter in self._counters.values())

    def has_begun(self, index: int) -> bool:
        """Whether anything of this sample was read."""
        return index in self._parsers

    def read(self, completion: CompletionOutput) -> Pieces:
        """What an output's new text adds to its message."""
        index = completion.index
        if index not in self._parsers:
            self._parsers[index] = self._format.parser()
            self._counters[index] = _ThoughtCounter(self._format, self._tokenizer)
        self._counters[index].read(completion.token_ids)
        return self._parsers[index].read(completion)

    def finish_reason(self, completion: CompletionOutput, cause: str) -> str | None:
        """Of an output that was read: as `wire.finish_reason`, or "tool_calls" where it stopped
        with calls."""
        reason = finish_reason(completion, cause)
        parser = self._parsers.get(completion.index)
        if reason == "stop" and parser is not None and parser.has_tool_calls:
            return "tool_calls"
        return reason
