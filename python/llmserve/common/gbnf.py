"""Grammars in GBNF, llama.cpp's notation (`root ::= "a" [b-z]+`), to llguidance's Lark.

In GBNF every character counts. In Lark a rule is a sequence of lexemes, of which each takes as much
as it can. So what can be one lexeme becomes one: every rule that does not refer to itself, by
whatever way, and in the others every longest part that refers to no such rule.

Sources: llama.cpp's grammars/README.md for the notation; llguidance's docs/syntax.md.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from llmserve.common.arguments import describe
from llmserve.errors import InvalidArgument

_ROOT = "root"
_NO_LEXEME = "<>"  # the name of no rule
_RULE = re.compile(r"^[ \t]*[A-Za-z_][\w-]*[ \t]*::=", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_][\w-]*")
_SPACE = re.compile(r"(?:\s|#[^\n]*)+")
_TOKEN = re.compile(r"(?P<other>!?)(?:<\[(?P<id>\d{1,9})\]>|(?P<name><[^<>\s\[\]]{1,256}>))")
_REPEAT = re.compile(r"\{\s*(\d*)\s*(?:(,)\s*(\d*)\s*)?\}")
_HEX_ESCAPE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", **{sign: sign for sign in "\\\"'[]-^/"}}
_MAX_REPEATS = 2000  # as llama.cpp has it


def is_gbnf(grammar: str) -> bool:
    """Whether a grammar has rules with `::=`, which Lark has not.

    >>> is_gbnf('root ::= "a"'), is_gbnf('start: "a"')
    (True, False)
    """
    return _RULE.search(grammar) is not None


def gbnf_to_lark(grammar: str, special_token_ids: Mapping[str, int] | None = None) -> str:
    """The same language in Lark, whose first rule is `start`. Raises InvalidArgument with the line.
    special_token_ids: by how they are written, for `<|name|>`; None takes any name, for a grammar
    that is only looked at.

    >>> print(gbnf_to_lark('root ::= "a" digit+  # as many as you like\\ndigit ::= [0-9]'))
    start: T0
    T0: /a/ T1+
    T1: /[0-9]/
    """
    try:
        rules = _Parser(grammar, special_token_ids).rules()
        return _Writer(rules).lark()
    except RecursionError:
        raise InvalidArgument("the grammar is nested too deeply") from None


@dataclass(frozen=True, slots=True)
class _Text:
    """What a regular expression says."""

    regex: str  # of Rust's
    is_empty: bool = False


@dataclass(frozen=True, slots=True)
class _Token:
    """One token, or any but that one; no text, and so no part of a lexeme."""

    token_id: int
    is_other: bool


@dataclass(frozen=True, slots=True)
class _Ref:
    name: str


@dataclass(frozen=True, slots=True)
class _Sequence:
    parts: "tuple[_Node, ...]"


@dataclass(frozen=True, slots=True)
class _Choice:
    parts: "tuple[_Node, ...]"


@dataclass(frozen=True, slots=True)
class _Repeat:
    part: "_Node"
    least: int
    most: int | None


_Node = _Text | _Token | _Ref | _Sequence | _Choice | _Repeat


def _escaped(character: str) -> str:
    is_plain = character.isascii() and character.isalnum()
    return character if is_plain else f"\\x{{{ord(character):X}}}"


@dataclass(slots=True)
class _Parser:
    """Goes through a text once."""

    text: str
    special_token_ids: Mapping[str, int] | None
    at: int = 0
    lines_of: dict[str, int] = field(default_factory=dict)  # where a rule is first referred to

    def rules(self) -> Mapping[str, _Node]:
        """Every rule by its name, all that are referred to among them."""
        rules: dict[str, _Node] = {}
        self._skip_space()
        while self.at < len(self.text):
            name = self._name()
            self._skip_space()
            if not self._take("::="):
                raise self._error("expected ::= after the name of a rule")
            if name in rules:
                raise self._error(f"there are two rules {name}")
            rules[name] = self._choice()
        if _ROOT not in rules:
            raise InvalidArgument(f"the grammar has no rule {_ROOT}, with which it begins")
        for name, line in self.lines_of.items():
            if name not in rules:
                raise InvalidArgument(f"line {line}: there is no rule {name}")
        return rules

    def _choice(self) -> _Node:
        parts = [self._sequence()]
        while self._take("|"):
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else _Choice(tuple(parts))

    def _sequence(self) -> _Node:
        parts: list[_Node] = []
        while (part := self._part()) is not None:
            parts.append(self._repeated(part))
        return parts[0] if len(parts) == 1 else _Sequence(tuple(parts))

    def _part(self) -> _Node | None:
        """The next part of a sequence, None at its end."""
        self._skip_space()
        sign = self.text[self.at : self.at + 1]
        if sign in ('"', "'"):
            return self._literal(sign)
        if sign == "[":
            return self._characters()
        if self._take("."):
            return _Text("(?s:.)")
        if self._take("("):
            inner = self._choice()
            if not self._take(")"):
                raise self._error("expected )")
            return inner
        if sign in ("", "|", ")"):
            return None
        if match := _TOKEN.match(self.text, self.at):
            return self._token(match)
        match = _NAME.match(self.text, self.at)
        if match is None:
            raise self._error("expected a literal, [characters], a name or (")
        after = _SPACE.match(self.text, match.end())
        if self.text.startswith("::=", after.end() if after else match.end()):
            return None  # the next rule
        self.at = match.end()
        self.lines_of.setdefault(match[0], self._line())
        return _Ref(match[0])

    def _token(self, match: re.Match[str]) -> _Token:
        """<[id]>, or <name> of a special token; with ! before it any other token."""
        token_id = int(match["id"] or 0)
        if match["name"] is not None and self.special_token_ids is not None:
            if match["name"] not in self.special_token_ids:
                raise self._error(f"there is no special token {match['name']}")
            token_id = self.special_token_ids[match["name"]]
        self.at = match.end()
        return _Token(token_id, bool(match["other"]))

    def _repeated(self, part: _Node) -> _Node:
        while True:
            self._skip_space()
            if self._take("*"):
                part = _Repeat(part, 0, None)
            elif self._take("+"):
                part = _Repeat(part, 1, None)
            elif self._take("?"):
                part = _Repeat(part, 0, 1)
            elif self.text.startswith("{", self.at):
                part = _Repeat(part, *self._bounds())
            else:
                return part

    def _bounds(self) -> tuple[int, int | None]:
        match = _REPEAT.match(self.text, self.at)
        if match is None or not (match[1] or match[3]):
            raise self._error("expected {count}, {least,} or {least,most}")
        least = int(match[1] or 0)
        most = least if match[2] is None else int(match[3]) if match[3] else None
        if max(least, most or 0) > _MAX_REPEATS or (most is not None and most < least):
            raise self._error(f"a part repeats {match[0]} times; at most {_MAX_REPEATS} are taken")
        self.at = match.end()
        return least, most

    def _literal(self, quote: str) -> _Text:
        self.at += 1
        regex = ""
        while not self._take(quote):
            regex += _escaped(self._character("a literal"))
        return _Text(regex, is_empty=not regex)

    def _characters(self) -> _Text:
        self.at += 1
        inverse = "^" if self._take("^") else ""
        members = ""
        while not self._take("]"):
            low = self._character("[characters]")
            high = low
            if self.text.startswith("-", self.at) and not self.text.startswith("-]", self.at):
                self.at += 1
                high = self._character("[characters]")
            if high < low:
                raise self._error(f"the range {low}-{high} is empty")
            members += _escaped(low) + (f"-{_escaped(high)}" if high != low else "")
        if not members and not inverse:
            raise self._error("[] has no character")
        return _Text(f"[{inverse}{members}]" if members else "(?s:.)")

    def _character(self, where: str) -> str:
        if self.at >= len(self.text):
            raise self._error(f"{where} has no end")
        sign = self.text[self.at]
        self.at += 1
        if sign != "\\":
            if "\ud800" <= sign <= "\udfff":
                raise self._error("a lone surrogate is not Unicode")
            return sign
        match = _HEX_ESCAPE.match(self.text, self.at)
        if match is not None:
            self.at = match.end()
            code = int(match[1] or match[2] or match[3], 16)
            if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
                raise self._error(f"\\{match[0]} is no character")
            return chr(code)
        escape = self.text[self.at : self.at + 1]
        if escape not in _ESCAPES:
            raise self._error(f"there is no escape \\{escape}")
        self.at += 1
        return _ESCAPES[escape]

    def _name(self) -> str:
        match = _NAME.match(self.text, self.at)
        if match is None:
            raise self._error("expected the name of a rule")
        self.at = match.end()
        return match[0]

    def _skip_space(self) -> None:
        match = _SPACE.match(self.text, self.at)
        if match is not None:
            self.at = match.end()

    def _take(self, sign: str) -> bool:
        is_there = self.text.startswith(sign, self.at)
        if is_there:
            self.at += len(sign)
        return is_there

    def _line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def _error(self, message: str) -> InvalidArgument:
        found = self.text[self.at : self.at + 20]
        return InvalidArgument(f"line {self._line()}: {message}, at {describe(found)}")


def _refs(node: _Node) -> Iterator[str]:
    """Rules that it refers to; a token as one that is no lexeme's."""
    if isinstance(node, _Token):
        yield _NO_LEXEME
    elif isinstance(node, _Ref):
        yield node.name
    elif isinstance(node, _Repeat):
        yield from _refs(node.part)
    elif isinstance(node, _Sequence | _Choice):
        for part in node.parts:
            yield from _refs(part)


class _Writer:
    """Rules as Lark: those that are one lexeme are terminals, T0 ...; the others rules, r0 ..."""

    def __init__(self, rules: Mapping[str, _Node]) -> None:
        self._rules = rules
        self._recursive = _recursive(rules)
        self._nullable = _nullable(rules)
        self._names = {
            name: f"{'r' if name in self._recursive else 'T'}{idx}"
            for idx, name in enumerate([_ROOT, *(name for name in rules if name != _ROOT)])
        }
        self._pieces: dict[str, str] = {}  # names of terminals by what they are

    def lark(self) -> str:
        """All rules, `start` first."""
        lines = [
            f"{text}: {self._rule(node) if name in self._recursive else self._terminal(node)}"
            for name, text, node in ((n, t, self._rules[n]) for n, t in self._names.items())
        ]
        root = self._names[_ROOT]
        if _ROOT not in self._recursive and self._can_be_empty(self._rules[_ROOT]):
            root = self._lexeme(_Ref(_ROOT))
        pieces = [f"{name}: {text}" for text, name in self._pieces.items()]
        return "\n".join([f"start: {root}", *lines, *pieces])

    def _is_recursive(self, node: _Node) -> bool:
        return any(name == _NO_LEXEME or name in self._recursive for name in _refs(node))

    def _can_be_empty(self, node: _Node) -> bool:
        return _is_nullable(node, self._nullable)

    def _terminal(self, node: _Node) -> str:
        """Of one lexeme: what stands side by side in it is one text."""
        if isinstance(node, _Text):
            return '""' if node.is_empty else f"/{node.regex}/"
        if isinstance(node, _Ref):
            return self._names[node.name]
        if isinstance(node, _Repeat):
            return _repeat(self._terminal(node.part), node, isinstance(node.part, _Text | _Ref))
        assert not isinstance(node, _Token)  # a rule's
        parts = [_bracketed(self._terminal(part), part, node) for part in node.parts]
        if isinstance(node, _Choice):
            return " | ".join(parts)
        return " ".join(parts) or '""'

    def _rule(self, node: _Node) -> str:
        """Of several lexemes."""
        if not self._is_recursive(node):
            return self._lexeme(node)
        if isinstance(node, _Token):
            return f"<[{'^' if node.is_other else ''}{node.token_id}]>"
        if isinstance(node, _Ref):
            return self._names[node.name]
        if isinstance(node, _Repeat):
            return _repeat(self._rule(node.part), node, isinstance(node.part, _Ref))
        if isinstance(node, _Choice):
            regular = tuple(part for part in node.parts if not self._is_recursive(part))
            others = [part for part in node.parts if self._is_recursive(part)]
            written = [self._rule(part) for part in others]
            if regular:
                one = _Choice(regular) if len(regular) > 1 else regular[0]
                written.insert(0, self._lexeme(one))
            return " | ".join(written)
        assert isinstance(node, _Sequence)  # a text is not recursive
        return self._sequence(node)

    def _sequence(self, node: _Sequence) -> str:
        written: list[str] = []
        regular: list[_Node] = []
        for part in (*node.parts, None):
            if part is not None and not self._is_recursive(part):
                regular.append(part)
                continue
            if regular:
                one = regular[0] if len(regular) == 1 else _Sequence(tuple(regular))
                written.append(self._lexeme(one))
                regular = []
            if part is not None:
                written.append(_bracketed(self._rule(part), part, node))
        return " ".join(written)

    def _lexeme(self, node: _Node) -> str:
        """The name of a terminal, which matches no empty text: then it is left out."""
        can_be_empty = self._can_be_empty(node)
        if isinstance(node, _Ref) and not can_be_empty:
            return self._names[node.name]
        text = self._terminal(node)
        if can_be_empty:
            text = f"({text}) & /(?s:.+)/"
        name = self._pieces.setdefault(text, f"P{len(self._pieces)}")
        return f"{name}?" if can_be_empty else name


def _bracketed(text: str, part: _Node, around: _Node) -> str:
    needs = isinstance(part, _Choice) and isinstance(around, _Sequence)
    return f"({text})" if needs else text


def _repeat(text: str, node: _Repeat, is_one: bool) -> str:
    inner = text if is_one else f"({text})"
    bounds = (node.least, node.most)
    signs = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    most = "" if node.most is None else node.most
    return inner + signs.get(bounds, f"{{{node.least},{most}}}")


def _recursive(rules: Mapping[str, _Node]) -> set[str]:
    """Rules that refer to themselves or to tokens, or to such rules, by whatever way."""
    refers = {name: set(_refs(node)) for name, node in rules.items()}
    regular: set[str] = set()
    while True:
        more = {name for name, refs in refers.items() if refs <= regular} - regular
        if not more:
            return set(rules) - regular
        regular |= more


def _nullable(rules: Mapping[str, _Node]) -> set[str]:
    """Rules that match the empty text."""
    nullable: set[str] = set()
    while True:
        more = {name for name, node in rules.items() if _is_nullable(node, nullable)} - nullable
        if not more:
            return nullable
        nullable |= more


def _is_nullable(node: _Node, nullable: set[str]) -> bool:
    if isinstance(node, _Text):
        return node.is_empty
    if isinstance(node, _Token):
        return False
    if isinstance(node, _Ref):
        return node.name in nullable
    if isinstance(node, _Repeat):
        return node.least == 0 or _is_nullable(node.part, nullable)
    found = (_is_nullable(part, nullable) for part in node.parts)
    return any(found) if isinstance(node, _Choice) else all(found)
