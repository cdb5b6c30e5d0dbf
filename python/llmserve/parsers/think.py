"""Reasoning between two signs at the beginning of a text, which a template may have opened
already."""

from llmserve.parsers.deltas import Pieces, held_length

_WHITESPACE = " \n\r\t"
_NO_PROSE = ("<|", "<\uff5c")


class ThinkParser:
    """Of one sample: splits what was thought from what is answered. is_open: the prompt ends
    within a section. Whitespace at the ends of both is left out. starts, ends: the signs, any of
    which opens or ends it. answer: signs that may stand around what is answered, and are left out.
    calls: signs of calls, which end a section that is not closed: where they begin a line, and
    those that no prose has (<|...) anywhere.

    >>> parser = ThinkParser(is_open=False)
    >>> parser.feed("<think>Hm.</think>Yes")
    Pieces(reasoning='Hm.', content='Yes', tool_calls=[])
    """

    def __init__(
        self,
        is_open: bool,
        starts: tuple[str, ...] = ("<think>",),
        ends: tuple[str, ...] = ("</think>",),
        answer: tuple[str, str] = ("", ""),
        calls: tuple[str, ...] = (),
    ) -> None:
        self._calls = calls
        self._has_thought = False
        self._starts = starts
        self._ends = ends
        self._is_undecided = not is_open
        self._is_thinking = is_open
        self._is_at_edge = is_open  # whitespace here belongs to nobody
        self._rest = ""
        self._answer = _Unwrapped(*answer) if answer[0] else None

    def feed(self, text: str) -> Pieces:
        """The next piece of text."""
        text = self._rest + text
        self._rest = ""
        pieces = Pieces()
        if self._is_undecided:
            text = self._decide(text)
        if self._is_undecided:
            return pieces
        if self._is_thinking:
            text = self._think(text, pieces)
        if not self._is_thinking:
            pieces.content = self._past_edge(text)
            if self._answer is not None:
                pieces.content = self._answer.feed(pieces.content)
        return pieces

    def finish(self) -> Pieces:
        """There is no more: what was held back."""
        rest, self._rest = self._rest, ""
        if self._is_thinking:
            return Pieces(reasoning=rest.rstrip(_WHITESPACE))
        if self._answer is not None:
            rest = self._answer.feed(rest) + self._answer.finish()
        return Pieces(content=rest)

    def _decide(self, text: str) -> str:
        """Whether the text begins with a section; what follows its beginning."""
        stripped = text.lstrip(_WHITESPACE)
        for start in self._starts:
            if stripped.startswith(start):
                self._is_undecided = False
                self._is_thinking = self._is_at_edge = True
                return stripped[len(start) :]
        self._is_undecided = any(start.startswith(stripped) for start in self._starts)
        self._rest = text if self._is_undecided else ""
        return text

    def _think(self, text: str, pieces: Pieces) -> str:
        """Adds to the reasoning; what follows its end."""
        text = self._past_edge(text)
        places = [(found, end) for end in self._ends if (found := text.find(end)) >= 0]
        places += [(found, "") for call in self._calls if (found := self._call_at(text, call)) >= 0]
        if places:
            found, sign = min(places)
            pieces.reasoning = text[:found].rstrip(_WHITESPACE)
            self._is_thinking = False
            self._is_at_edge = True
            return text[found + len(sign) :]
        held = max(held_length(text, sign) for sign in (*self._ends, *self._calls))
        end = len(text[: len(text) - held].rstrip(_WHITESPACE))
        pieces.reasoning = text[:end]
        self._rest = text[end:]
        self._has_thought |= end > 0
        return ""

    def _call_at(self, text: str, sign: str) -> int:
        """Where a call begins; -1: nowhere. What was held back begins the text, so that there is a
        line break in it or none before it."""
        found = text.find(sign)
        while found >= 0 and not sign.startswith(_NO_PROSE):
            before = text[:found]
            is_first = not self._has_thought and not before.strip(_WHITESPACE)
            if is_first or "\n" in before[len(before.rstrip(_WHITESPACE)) :]:
                break
            found = text.find(sign, found + 1)
        return found

    def _past_edge(self, text: str) -> str:
        if self._is_at_edge:
            text = text.lstrip(_WHITESPACE)
            self._is_at_edge = not text
        return text


class _Unwrapped:
    """An answer without the signs that may stand around it, and the whitespace at its ends then."""

    def __init__(self, begin: str, end: str) -> None:
        self._begin = begin
        self._end = end
        self._is_undecided = True
        self._is_within = False
        self._is_at_edge = False
        self._rest = ""

    def feed(self, text: str) -> str:
        """The next piece of it."""
        text, self._rest = self._rest + text, ""
        if self._is_undecided:
            stripped = text.lstrip(_WHITESPACE)
            if stripped.startswith(self._begin):
                self._is_within = self._is_at_edge = True
                self._is_undecided = False
                text = stripped[len(self._begin) :]
            elif self._begin.startswith(stripped):
                self._rest = text
                return ""
            self._is_undecided = False
        text = self._past_edge(text)
        if not self._is_within:
            return text
        found = text.find(self._end)
        if found >= 0:
            self._is_within = False
            self._is_at_edge = True
            rest = self._past_edge(text[found + len(self._end) :])
            return text[:found].rstrip(_WHITESPACE) + rest
        end = len(text) - held_length(text, self._end)
        end = len(text[:end].rstrip(_WHITESPACE))
        self._rest = text[end:]
        return text[:end]

    def finish(self) -> str:
        """There is no more: what was held back."""
        rest, self._rest = self._rest, ""
        return rest

    def _past_edge(self, text: str) -> str:
        if self._is_at_edge:
            text = text.lstrip(_WHITESPACE)
            self._is_at_edge = not text
        return text
