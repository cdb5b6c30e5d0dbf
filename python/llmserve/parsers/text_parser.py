"""What parsers of calls have in common: a machine whose states read on from a place in the text, or
say that more of it has to be known first."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable

from llmserve.parsers.deltas import ContentWriter, Pieces, ToolCallDelta, held_length, new_call_id

WHITESPACE = re.compile(r"[ \t\n\r]+")
NAME = re.compile(r"[A-Za-z0-9_.:-]+")
MAX_HEAD = 512  # characters up to the arguments: a text that has more is no call

State = Callable[[str, int], int | None]


class TextParser(ABC):
    """Of one sample, see ToolParser. A state reads the text at a place: it gives the place from
    which the next state reads, or None where more has to be known. So it decides by the text alone.
    """

    def __init__(self, *begins: str) -> None:
        self._begins = begins  # what ends content
        self._longest_begin = max(map(len, begins), default=0)
        self._at: State = self._content
        self._rest = ""  # read and not decided
        self._raw = ""  # of what may turn out to be content: since the last that was none
        self._writer = ContentWriter()
        self._pieces = Pieces()
        self._num_calls = 0
        self._between_calls: tuple[State, ...] = ()  # states in which nothing but signs is held

    @abstractmethod
    def _begin(self, sign: str) -> State:
        """The state behind one of `begins`."""

    def feed(self, text: str) -> Pieces:
        """See ToolParser."""
        text = self._rest + text
        self._rest = ""
        pos = 0
        while pos < len(text):
            stop = self._at(text, pos)
            if stop is None:
                self._rest = text[pos:]
                break
            pos = stop
        return self._take()

    def finish(self) -> Pieces:
        """See ToolParser."""
        raw, self._raw, self._rest = self._raw + self._rest, "", ""
        if self._at in self._between_calls and self._writer.is_after_call:
            raw = ""  # signs of the call before
        self._pieces.content += self._writer.write(raw) + self._writer.finish()
        return self._take()

    def _take(self) -> Pieces:
        pieces, self._pieces = self._pieces, Pieces()
        return pieces

    def _content(self, text: str, pos: int) -> int | None:
        places = ((text.find(sign, pos), sign) for sign in self._begins)
        rest = text[max(pos, len(text) - self._longest_begin) :]
        held = max((held_length(rest, sign) for sign in self._begins), default=0)
        end, sign = min((p for p in places if p[0] >= 0), default=(len(text) - held, ""))
        self._pieces.content += self._writer.write(text[pos:end])
        if not sign:
            return end if end > pos else None
        self._raw = sign
        self._at = self._begin(sign)
        return end + len(sign)

    def _give_up(self, pos: int) -> int:
        """What was no call is content, and what follows too, until the next one."""
        raw, self._raw = self._raw, ""
        self._pieces.content += self._writer.write(raw)
        self._at = self._content
        return pos

    def _past_whitespace(self, text: str, pos: int) -> int:
        """The place behind it, or `pos` where there is none; it is kept as raw text. A state that
        finds some has to return its end: what waits for more text must not be read twice."""
        match = WHITESPACE.match(text, pos)
        if match is None:
            return pos
        self._raw += match.group()
        return match.end()

    def _announce(self, name: str, call_id: str | None = None) -> None:
        """A call begins; its text is no content."""
        self._pieces.tool_calls.append(
            ToolCallDelta(self._num_calls, "", call_id or new_call_id(), name)
        )
        self._note_call()

    def _note_call(self) -> None:
        self._num_calls += 1
        self._raw = ""
        self._writer.call()

    def _send(self, arguments: str) -> None:
        """Arguments of the call that was announced last."""
        if arguments:
            self._pieces.tool_calls.append(ToolCallDelta(self._num_calls - 1, arguments))


def sign_at(text: str, pos: int, *signs: str) -> str | None:
    """The sign that stands there, "" where none does, None where more has to be known.

    >>> sign_at("a </b", 2, "</b>"), sign_at("a </b>", 2, "</b>"), sign_at("a", 0, "</b>")
    (None, '</b>', '')
    """
    for sign in signs:
        if sign and text.startswith(sign, pos):
            return sign
    rest = text[pos : pos + max(map(len, signs), default=0)]
    return None if any(sign.startswith(rest) for sign in signs if sign) else ""
