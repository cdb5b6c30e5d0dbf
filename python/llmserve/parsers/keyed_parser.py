"""Calls whose arguments are texts between signs, one a key: Qwen3-Coder's, GLM's and kin. What each
text means is told by the tool's schema."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from llmserve.parsers.arguments_grammar import keyed_arguments
from llmserve.parsers.deltas import Pieces, held_length
from llmserve.parsers.lark import Lark, joined
from llmserve.parsers.text_parser import MAX_HEAD, NAME, State, TextParser, sign_at
from llmserve.parsers.text_values import TEXT, json_value, value_types
from llmserve.parsers.tool_style import Schemas, ToolStyle


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedStyle(ToolStyle):
    """`begin`, a name between the signs of `function`, then keys and values between theirs, the
    end of the function where it has one, and `end`."""

    end: str
    function: tuple[str, str, str] = ("", "", "")  # before the name, behind it, at the end of all
    key: tuple[str, str]
    value: tuple[str, str]
    kinds: tuple[str, str] = ("", "")  # behind a key that has a text, and another value
    pads_values: bool = False  # a line break before a value and one behind it are not its own
    may_omit_begin: bool = False  # models forget it; the sign of a function tells enough

    def parser(self, names: Collection[str] | None, schemas: Schemas) -> "KeyedParser":
        """See ToolStyle."""
        return KeyedParser(self, names, schemas)

    def body(self, lark: Lark, name: str, parameters: Mapping[str, object]) -> str:
        """See ToolStyle."""
        head = lark.literal(f"{self.function[0]}{name}{self.function[1]}\n")
        pad = "\n" if self.pads_values else ""
        behind_key = self.key[1] + ("\n" if self.value[0] else "") + self.value[0] + pad
        arguments = keyed_arguments(
            lark,
            parameters,
            before_key=self.key[0],
            before_value=(self.kinds[0] + behind_key, self.kinds[1] + behind_key),
            after_value=pad + self.value[1] + "\n",
        )
        return joined(head, arguments, lark.literal(self.function[2]))


class KeyedParser(TextParser):
    """Of one sample, see ToolStyle.parser."""

    def __init__(
        self, style: KeyedStyle, names: Collection[str] | None, schemas: Schemas | None = None
    ) -> None:
        super().__init__(style.begin, *((style.function[0],) if style.may_omit_begin else ()))
        self._style = style
        self._names = names
        self._schemas = schemas or {}
        self._between_calls = (self._after_function,)
        self._name_read = ""
        self._is_announced = False
        self._num_values = 0
        self._types: frozenset[str] = frozenset()
        self._value_text = ""  # what has not gone out
        self._is_value_begin = False

    def finish(self) -> Pieces:
        """See ToolParser: arguments that break off stay as far as they came."""
        if self._is_announced:
            if self._at == self._value:
                self._add_value(self._rest)
                self._send(self._value_text)
            self._rest = self._raw = ""
        return super().finish()

    def _begin(self, sign: str) -> State:
        return self._before_function if sign == self._style.begin else self._name

    def _before_function(self, text: str, pos: int) -> int | None:
        if (stop := self._past_whitespace(text, pos)) != pos:
            return stop
        if not (begin := self._style.function[0]):
            self._at = self._name
            return pos
        return self._sign(text, pos, {begin: self._name})

    def _sign(self, text: str, pos: int, states: Mapping[str, State]) -> int | None:
        """On from one of these signs, or else no call."""
        sign = sign_at(text, pos, *states)
        if sign is None:
            return None
        if not sign:
            return self._break_off(pos)
        self._raw += sign
        self._at = states[sign]
        return pos + len(sign)

    def _break_off(self, pos: int) -> int:
        """A call that is announced has what came of its arguments; else there is none."""
        if self._is_announced:
            self._end_call()
            self._raw = ""
        return self._give_up(pos)

    def _name(self, text: str, pos: int) -> int | None:
        match = NAME.match(text, pos)
        end = match.end() if match else pos
        if match is None or end - pos > MAX_HEAD or self._is_stranger(match.group(), text, end):
            return self._give_up(pos)
        if end == len(text):
            return None
        self._name_read = match.group()
        self._is_announced = False
        self._num_values = 0
        self._at = self._name_end if self._style.function[1] else self._between
        self._raw += match.group()
        return end

    def _name_end(self, text: str, pos: int) -> int | None:
        return self._sign(text, pos, {self._style.function[1]: self._between})

    def _is_stranger(self, name: str, text: str, end: int) -> bool:
        return self._names is not None and end < len(text) and name not in self._names

    def _between(self, text: str, pos: int) -> int | None:
        """Before a key, or at the end."""
        if (stop := self._past_whitespace(text, pos)) != pos:
            return stop
        style = self._style
        ends = {sign: self._after_function for sign in (style.function[2], style.end) if sign}
        sign = sign_at(text, pos, style.key[0], *ends)
        if sign is None:
            return None
        if sign and not self._is_announced:
            self._is_announced = True
            self._announce(self._name_read)
        if sign in ends:
            self._end_call()
            self._raw = ""
            self._at = self._content if sign == style.end else self._after_function
            return pos + len(sign)
        return self._sign(text, pos, {style.key[0]: self._key})

    def _end_call(self) -> None:
        self._send("}" if self._num_values else "{}")
        self._is_announced = False

    def _key(self, text: str, pos: int) -> int | None:
        sign = self._style.key[1]
        end = text.find(sign, pos)
        if end < 0 and len(text) - pos <= MAX_HEAD:
            return None
        if not 0 <= end - pos <= MAX_HEAD:
            return self._break_off(pos)
        key = text[pos:end].strip()
        of_text, of_other = self._style.kinds
        is_text, is_other = key.endswith(of_text), key.endswith(of_other)
        if of_text and (is_text or is_other):  # the model says what it is
            key = key.removesuffix(of_text if is_text else of_other)
            known = value_types(self._schemas.get(self._name_read, {}), key)
            is_told = not known or "string" in known  # else the schema knows better
            self._types = (TEXT if is_text else frozenset()) if is_told else known
        else:
            self._types = value_types(self._schemas.get(self._name_read, {}), key)
        self._send(f"{', ' if self._num_values else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        self._num_values += 1
        self._at = self._before_value
        return end + len(sign)

    def _before_value(self, text: str, pos: int) -> int | None:
        if self._style.value[0]:
            if (stop := self._past_whitespace(text, pos)) != pos:
                return stop
            sign = sign_at(text, pos, self._style.value[0])
            if sign is None:
                return None
            if not sign:  # a key without a value
                self._send("null")
                return self._break_off(pos)
            pos += len(sign)
        if self._types == TEXT:
            self._send('"')
        self._value_text = ""
        self._is_value_begin = self._style.pads_values
        self._at = self._value
        return pos

    def _value(self, text: str, pos: int) -> int | None:
        if self._is_value_begin:
            self._is_value_begin = False
            if text[pos] == "\n":
                return pos + 1
        style = self._style
        sign = style.value[1]
        # Models forget the sign, and go on with what stands behind it.
        others = ("\n" + style.key[0], "\n" + style.function[2]) if style.pads_values else ()
        places = [(found, s) for s in (sign, *others) if (found := text.find(s, pos)) >= 0]
        if not places:
            rest = text[pos:]
            padded = ("\n" + sign, *others) if style.pads_values else ()
            end = len(text) - max(held_length(rest, s) for s in (sign, *padded))
            self._add_value(text[pos:end])
            return end if end > pos else None
        end, found = min(places)
        if found != sign:
            end, sign = end + 1, ""  # the line break is the value's pad
        pad = self._style.pads_values and text.endswith("\n", pos, end)
        self._add_value(text[pos : end - pad])
        self._send('"' if self._types == TEXT else json_value(self._value_text, self._types))
        self._at = self._between
        return end + len(sign)

    def _add_value(self, text: str) -> None:
        """Texts go out as they come, other values at their end."""
        if self._types == TEXT:
            self._send(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._value_text += text

    def _after_function(self, text: str, pos: int) -> int | None:
        if (stop := self._past_whitespace(text, pos)) != pos:
            return stop
        sign = sign_at(text, pos, self._style.end, self._style.function[0])
        if sign is None:
            return None
        if not sign:
            return self._give_up(pos)
        self._raw = sign if sign == self._style.function[0] else ""
        self._at = self._content if sign == self._style.end else self._name
        return pos + len(sign)
