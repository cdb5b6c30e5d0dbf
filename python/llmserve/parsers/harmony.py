"""gpt-oss: messages of channels (OpenAI's harmony format). Analysis is reasoning, final and
commentary are content, and commentary to=functions.NAME is a call."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from llmserve.parsers.deltas import Pieces, held_length
from llmserve.parsers.lark import Lark, joined
from llmserve.parsers.text_parser import MAX_HEAD, State, TextParser, sign_at
from llmserve.parsers.tool_style import Schemas, ToolStyle

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([A-Za-z0-9_.:-]+)")
_NO_TOOLS = ("assistant", "user", "all")  # whom a message may be to, besides
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class HarmonyStyle(ToolStyle):
    """Messages of channels."""

    def parser(self, names: Collection[str] | None, schemas: Schemas) -> "HarmonyParser":
        """See ToolStyle."""
        return HarmonyParser()

    def body(self, lark: Lark, name: str, parameters: Mapping[str, object]) -> str:
        """See ToolStyle."""
        head = f"{_CHANNEL}commentary to=functions.{name} <|constrain|>json{_MESSAGE}"
        return joined(lark.literal(head), lark.value(parameters))


class HarmonyParser(TextParser):
    """Of one sample, see ToolStyle.parser. Which tools there are is not asked: a head says clearly
    that its message is a call."""

    def __init__(self) -> None:
        super().__init__(_START, _CHANNEL)
        self._at = self._beginning
        self._is_reasoning = False
        self._is_call = False
        self._has_arguments = False
        self._call_text = ""  # whitespace at the end of arguments, which may be none of theirs

    def finish(self) -> Pieces:
        """See ToolParser: a head that breaks off is nobody's text."""
        if self._at == self._body:
            self._add(self._rest)
        if self._at in (self._head, self._body, self._between):
            self._rest = self._raw = ""
        return super().finish()

    def _begin(self, sign: str) -> State:
        return self._head

    def _beginning(self, text: str, pos: int) -> int | None:
        """The prompt ends in the sign of a message, whose head goes on here."""
        if (stop := self._past_whitespace(text, pos)) != pos:
            return stop
        sign = sign_at(text, pos, _CHANNEL, _START, "to=")
        if sign is None:
            return None
        if not sign:
            return self._give_up(pos)
        self._at = self._head
        return pos

    def _head(self, text: str, pos: int) -> int | None:
        end = text.find(_MESSAGE, pos)
        if end < 0 and len(text) - pos <= MAX_HEAD:
            return None
        if not 0 <= end - pos <= MAX_HEAD:
            self._raw += text[pos : pos + 1]
            return self._give_up(pos + 1)
        head = self._raw + text[pos:end]
        self._raw = ""
        channel, recipient = _CHANNEL_NAME.search(head), _RECIPIENT.search(head)
        if recipient is not None and recipient[1] in _NO_TOOLS:
            recipient = None
        self._is_reasoning = channel is not None and channel[1] == "analysis" and not recipient
        self._is_call = recipient is not None
        if recipient is not None:
            self._announce(recipient[1])
            self._call_text = ""
            self._has_arguments = False
        elif self._is_reasoning and _START in head:  # not the first message
            self._pieces.reasoning += "\n"
        self._at = self._body
        return end + len(_MESSAGE)

    def _body(self, text: str, pos: int) -> int | None:
        signs = (*_ENDS, _START)
        found, sign = min(
            ((text.find(s, pos), s) for s in signs if text.find(s, pos) >= 0), default=(-1, "")
        )
        held = max(held_length(text[pos:], s) for s in signs)
        end = found if found >= 0 else len(text) - held
        self._add(text[pos:end])
        if found < 0:
            return end if end > pos else None
        if self._is_call and not self._has_arguments:
            self._send("{}")
        self._at = self._between
        return end if sign == _START else end + len(sign)

    def _between(self, text: str, pos: int) -> int | None:
        """Behind a message: the head of the next one."""
        if (stop := self._past_whitespace(text, pos)) != pos:
            return stop
        sign = sign_at(text, pos, _START, _CHANNEL, *_ENDS)
        if sign is None:
            return None
        self._raw = ""
        if sign in _ENDS and sign:
            return pos + len(sign)
        self._at = self._head if sign else self._content
        return pos

    def _add(self, text: str) -> None:
        if self._is_call:
            text = self._call_text + text
            stripped = text.rstrip()
            self._call_text = text[len(stripped) :]
            self._has_arguments |= bool(stripped)
            self._send(stripped)
        elif self._is_reasoning:
            self._pieces.reasoning += text
        else:
            self._pieces.content += self._writer.write(text)


STYLE = HarmonyStyle(
    name="openai",
    aliases=("gptoss", "gpt-oss", "gpt_oss", "harmony"),
    is_envelope=True,
    separator=f"<|call|>{_START}assistant",
    answer_begin=f"{_CHANNEL}final{_MESSAGE}",
    signs=(_START, _CHANNEL, _MESSAGE, *_ENDS, "<|constrain|>"),
    hints=("<|channel|>analysis",),
)
