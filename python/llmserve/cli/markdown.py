"""Markdown in a terminal as it comes: words are wrapped, and what is marked is drawn.

Nothing that is written is taken back, so that tables and links stay as they are, and a word is
written once it has ended.
"""

import re
import unicodedata

_BOLD, _ITALIC, _CODE, _DIM, _OFF = "\033[1m", "\033[3m", "\033[36m", "\033[2m", "\033[0m"
_FENCE = "```"
_MARKS = re.compile(r"\*\*|\*|`")
_STYLES = {"**": _BOLD, "*": _ITALIC, "`": _CODE}
# What may begin a line and says what the line is.
_BEGINS = re.compile(r"(?P<heading>#{1,6} )|(?P<item>\s*(?:[-*+]|\d{1,3}[.)]) )|(?P<quote>> )")
_MAY_BEGIN = re.compile(r"#{0,6}|\s*(?:[-*+]|\d{0,3}[.)]?)|>|`{1,2}")
# A mark opens at a word's begin, or behind one of these for a part of the word.
_OPENS_AFTER = "([{\"'*"


class MarkdownWriter:
    """Turns pieces of a text into what a terminal of `width` columns is to be written."""

    def __init__(self, width: int, has_colours: bool, column: int = 0) -> None:
        self._width = max(width, 20)
        self._has_colours = has_colours
        self._column = column
        self._head: str | None = ""  # of a line, until it is known what the line is
        self._word = ""
        self._spaces = ""  # before the word
        self._indent = ""  # of the lines that a wrapped line goes on in
        self._open: list[str] = []  # marks that are open
        self._is_heading = False
        self._is_code = False  # within a fence
        self._fence_line = False  # in the line that opens or closes one

    def feed(self, piece: str) -> str:
        """What is to be written now."""
        return "".join(self._character(character) for character in piece)

    def end(self) -> str:
        """What is left, and the end of every style."""
        rest = self._begin_line() + self._end_word()
        self._spaces = ""
        return rest + self._plain()

    def _character(self, character: str) -> str:
        if character == "\n":
            return self._end_line()
        if self._head is not None:
            self._head += character
            if self._is_undecided(self._head):
                return ""
            return self._begin_line()
        return self._text(character)

    def _is_undecided(self, head: str) -> bool:
        if self._is_code:
            return _FENCE.startswith(head)
        return _MAY_BEGIN.fullmatch(head) is not None

    def _begin_line(self) -> str:
        """Decides what the line is, and writes what came of it."""
        head, self._head = self._head or "", None
        if head.startswith(_FENCE):
            self._is_code = not self._is_code
            self._indent = ""
            self._fence_line = True
            return self._style(_DIM) + self._raw(head)
        if self._is_code:
            return self._style(_CODE) + self._raw(head)
        match = _BEGINS.match(head)
        self._indent = ""
        if match is None:
            return "".join(map(self._text, head))
        begin, rest = match[0], head[match.end() :]
        if match["heading"]:
            self._is_heading = self._has_colours
            shown = "" if self._has_colours else begin
        else:
            self._indent = begin if match["quote"] else " " * len(begin)
            shown = re.sub(r"^(\s*)[-*+] $", "\\1\u2022 ", begin) if self._has_colours else begin
        self._column += len(shown)
        return shown + self._restyle() + "".join(map(self._text, rest))

    def _text(self, character: str) -> str:
        if self._is_code or self._fence_line:
            return self._raw(character)
        if character not in " \t":
            self._word += character
            return ""
        written = self._end_word()
        self._spaces += character
        return written

    def _raw(self, text: str) -> str:
        self._column += width_of(text)
        return text

    def _end_line(self) -> str:
        written = self._begin_line() + self._end_word()
        is_blank = self._column == 0
        closes = self._is_code or self._fence_line or self._is_heading or (is_blank and self._open)
        if is_blank:  # a mark that was never closed ends with its paragraph
            self._open = []
        self._is_heading = self._fence_line = False
        self._spaces, self._column, self._head, self._indent = "", 0, "", ""
        return written + (self._plain() if closes else "") + "\n"

    def _end_word(self) -> str:
        """The word that has ended, on the next line if it does not fit in this one."""
        if not self._word:
            return ""
        shown, width = self._drawn(self._word)
        spaces, self._word = self._spaces, ""
        self._spaces = ""
        if self._column + len(spaces) + width > self._width and self._column > len(self._indent):
            self._column = len(self._indent) + width
            return f"\n{self._indent}{shown}"
        self._column += len(spaces) + width
        return spaces + shown

    def _drawn(self, word: str) -> tuple[str, int]:
        """The word with its marks drawn, and the columns that it takes."""
        if not self._has_colours:
            return word, width_of(word)
        parts: list[str] = []
        width = done = 0
        for match in _MARKS.finditer(word):
            mark, begin, end = match[0], match.start(), match.end()
            before = word[begin - 1 : begin]
            is_open = mark in self._open
            if "`" in self._open and mark != "`":
                continue
            closes_too = before in _OPENS_AFTER and mark in word[end:]
            is_inside = bool(before) and not closes_too and mark != "`"
            if not is_open and (end == len(word) or is_inside):
                continue
            parts.append(word[done:begin])
            width += width_of(word[done:begin])
            done = end
            if is_open:
                self._open.remove(mark)
            else:
                self._open.append(mark)
            parts.append(self._restyle())
        return "".join([*parts, word[done:]]), width + width_of(word[done:])

    def _restyle(self) -> str:
        styles = [_STYLES[mark] for mark in self._open]
        heading = _BOLD if self._is_heading else ""
        return _OFF + heading + "".join(styles) if self._has_colours else ""

    def _style(self, code: str) -> str:
        return code if self._has_colours else ""

    def _plain(self) -> str:
        return _OFF if self._has_colours else ""


def width_of(text: str) -> int:
    """The columns that a terminal takes for it.

    >>> width_of("a\u65e5\u0301")
    3
    """
    if text.isascii():
        return len(text)
    return sum(_width(character) for character in text)


def _width(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
