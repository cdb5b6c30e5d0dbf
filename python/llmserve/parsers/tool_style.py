"""How a family of models writes calls of tools: what a parser looks for and what a grammar asks."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from llmserve.parsers.deltas import ToolParser
from llmserve.parsers.lark import Lark

Schemas = Mapping[str, Mapping[str, object]]  # of the tools' arguments, by name


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolStyle(ABC):
    """A row of the table in registry.py. Calls are written as `section[0]`, then each as `call[0]`,
    its body and `call[1]`, with `separator` between them, then `section[1]`."""

    name: str  # as vLLM has it
    aliases: tuple[str, ...] = ()
    begin: str = ""  # what begins a call or a section and nothing else; "": nothing does
    is_bare: bool = False  # a text may start with a call, without `begin`
    # All text stands in signs: the parser reads it also where there are no tools.
    is_envelope: bool = False
    answer_begin: str = ""  # what begins an answer without a call
    section: tuple[str, str] = ("", "")
    call: tuple[str, str] = ("", "")
    separator: str = ""
    has_section_of_one: bool = True  # the section is written around a single call, too
    signs: tuple[str, ...] = ()  # those that may be special tokens, and then have to be in the text
    # What in a chat template tells that it is this style: any text of these, or all of a tuple.
    hints: tuple[str | tuple[str, ...], ...] = ()

    @abstractmethod
    def parser(self, names: Collection[str] | None, schemas: Schemas) -> ToolParser:
        """For one sample. names: of the tools that there are, calls of others are content; None
        takes any. schemas: those that are known, by which texts become values."""

    @abstractmethod
    def body(self, lark: Lark, name: str, parameters: Mapping[str, object]) -> str:
        """An expression in Lark for one call of that tool. parameters: the schema of an object."""

    @property
    def marks_calls(self) -> bool:
        """Whether calls may stand in a text that a grammar describes."""
        return bool(self.begin) and not self.is_bare and not self.is_envelope

    def is_taught_by(self, chat_template: str) -> bool:
        """Whether a chat template shows this style."""
        return any(
            all(text in chat_template for text in ((hint,) if isinstance(hint, str) else hint))
            for hint in self.hints
        )
