"""The parser of the command line: an option that it does not know is answered with what to do."""

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from llmserve.common.flexible_parser import spelled, with_dotted
from llmserve.common.units import json_object
from llmserve.common.vllm_arguments import (
    MAY_TAKE_NONE,
    NOT_HERE,
    TAKE_SEVERAL,
    refuse_what_is_not_here,
)
from llmserve.options.engine_options import ENGINE_OPTIONS, argument_names
from llmserve.options.flags import JoinAction, json_or_text
from llmserve.options.peer_flags import PeerFlag, joined, peer_flags
from llmserve.options.peer_flags import spelled as peer_spelled
from llmserve.options.peer_replicas import NAMES as REPLICAS

NAMED_MODEL = "named_model"  # where a namespace has the model of a flag
_USAGE_ERROR = 2  # argparse's own exit code


class CommandParser(argparse.ArgumentParser):
    """As argparse's; the parsers of its subcommands are of this kind, too."""

    takes_llm_arguments = False
    gathers_words = False  # words between options are words of the command, too
    takes_peer_flags = False  # those of others' servers, too

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Ends the program where something is left over. Raises NotSupported for an argument of LLM
        whose feature is not here."""
        if self.takes_llm_arguments:
            if self.takes_peer_flags:
                self._add_peer_flags()
            self._add_what_is_not_here()
            args = self._spelled(sys.argv[1:] if args is None else args)
        found, rest = super().parse_known_args(args, namespace)
        unknown = next((word for word in rest if word.startswith("-")), None)
        if unknown is not None:
            flag = unknown.partition("=")[0]
            self.error(f"there is no {flag}; {self._hint(flag)}")
        if rest and self.gathers_words:
            found.words += rest
        elif rest:
            self.error(f"{' '.join(map(repr, rest))} is more than the command takes")
        return found, []

    def error(self, message: str) -> NoReturn:
        """Ends the program, after a line of usage: --help has all of it."""
        self.exit(_USAGE_ERROR, f"{self.short_usage()}\n{self.prog}: error: {message}\n")

    def short_usage(self) -> str:
        """One line, without the options."""
        words = []
        for action in self._actions:
            if not action.option_strings:
                name = action.metavar or action.dest
                is_plain = action.nargs not in ("?", "*") or "[" in str(name)
                words.append(str(name) if is_plain else f"[{name}]")
        return " ".join(["usage:", self.prog, "[OPTION ...]", *words])

    def also(self, flag: str, *names: str) -> None:
        """More names of an option that is there; those that are taken stay what they are."""
        action = self._option_string_actions.get(flag)
        for name in names:
            if action is not None and name not in self._option_string_actions:
                self._option_string_actions[name] = action
                action.option_strings = [*action.option_strings, name]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Of a command that is not there, the nearest one."""
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            near = difflib.get_close_matches(str(value), action.choices, n=1)
            hint = f"did you mean {near[0]}?" if near else "there are " + ", ".join(action.choices)
            self.error(f"there is no command {value!r}; {hint}")
        super()._check_value(action, value)

    def _add_what_is_not_here(self) -> None:
        """But what the command has."""
        by_others = peer_flags() if self.takes_peer_flags else {}
        for name, (values, _) in NOT_HERE.items():
            flag = "--" + name.replace("_", "-")
            if flag in self._option_string_actions or name in by_others:
                continue
            hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
            if self.takes_peer_flags and name in REPLICAS:  # refused, or not, by all of them
                if isinstance(values[0], bool):
                    self.add_argument(flag, action=argparse.BooleanOptionalAction, **hidden)
                else:
                    self.add_argument(flag, type=json_or_text, **hidden)
            elif isinstance(values[0], bool):
                self.add_argument(flag, action=_RefusedSwitch, **hidden)
            else:
                nargs = "*" if name in TAKE_SEVERAL else "?" if name in MAY_TAKE_NONE else None
                self.add_argument(flag, action=_Refused, type=json_or_text, nargs=nargs, **hidden)

    def _add_peer_flags(self) -> None:
        """The engine's options that have no flag of the command, and other servers' flags."""
        known = self._option_string_actions
        hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        for row in peer_flags().values():
            flags = [flag for flag in row.flags if flag not in known]
            if flags and row.arity == "":
                off = [f"--no-{flag[2:]}" for flag in flags if flag.startswith("--")]
                flags += [flag for flag in off if flag not in known]
            if flags:
                nargs = {"": 0, "=": None, "*": "*"}[row.arity]
                self.add_argument(*flags, action=_PeerAction, row=row, nargs=nargs, **hidden)
        for option in ENGINE_OPTIONS:
            if option.flags[0] in known:
                continue
            if option.kind is bool:
                self.add_argument(*option.flags, action=argparse.BooleanOptionalAction, **hidden)
            else:
                kind = option.kind if option.is_text else json_or_text
                nargs = "*" if option.name in TAKE_SEVERAL else None
                action = JoinAction if kind is json_object else "store"
                self.add_argument(*option.flags, action=action, type=kind, nargs=nargs, **hidden)

    def _spelled(self, words: Sequence[str]) -> list[str]:
        """By the names that are here, and keys of JSON together. Behind "--" there are no flags."""
        known = self._option_string_actions
        end = words.index("--") if "--" in words else len(words)
        ours = [word if word in known else peer_spelled(word) for word in words[:end]]
        return [*with_dotted([spelled(word, known) for word in ours]), *words[end:]]

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """What an abbreviation may stand for: nothing hidden, but for short flags with a value."""
        found = super()._get_option_tuples(option_string)
        is_long = option_string.startswith("--")
        return [item for item in found if not is_long or item[0].help is not argparse.SUPPRESS]

    def _hint(self, flag: str) -> str:
        name = flag.removeprefix("--").replace("-", "_")
        if name in argument_names():
            return f"in Python LLM takes {name}"
        flags = self._option_string_actions
        shown = [flag for flag in flags if flags[flag].help is not argparse.SUPPRESS]
        near = difflib.get_close_matches(flag, shown, n=1)
        near = difflib.get_close_matches(flag, flags, n=1, cutoff=0.9) or near
        return f"did you mean {near[0]}?" if near else f"{self.prog} --help lists what there is"


def take_peer_flags(parser: argparse.ArgumentParser) -> None:
    """Has a command take the flags of vLLM's server, SGLang's and llama.cpp's."""
    assert isinstance(parser, CommandParser)
    parser.takes_peer_flags = True


def take_llm_arguments(parser: argparse.ArgumentParser) -> None:
    """Has a command answer vLLM's arguments of features that are not here as LLM does: at their
    defaults they change nothing, and otherwise they are refused by their names."""
    assert isinstance(parser, CommandParser)
    parser.takes_llm_arguments = True


class _Refused(argparse.Action):
    """Leaves nothing in the namespace."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        refuse_what_is_not_here(_command(parser), self.dest, values)


class _RefusedSwitch(argparse.BooleanOptionalAction):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        is_on = not option_string.startswith("--no-")
        refuse_what_is_not_here(_command(parser), self.dest, is_on)


class _PeerAction(argparse.Action):
    """Sets what a row of the table says, and leaves nothing else."""

    def __init__(self, *arguments: Any, row: PeerFlag, **details: Any) -> None:
        super().__init__(*arguments, **details)
        self._row = row

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        if self.nargs == 0:
            values = not option_string.startswith("--no-") or option_string in self._row.flags
        actions = parser._option_string_actions
        for name, value in self._row.settings(values).items():
            is_list = isinstance(actions.get("--" + name.replace("_", "-")), JoinAction)
            dest = NAMED_MODEL if name == "model" else name
            setattr(namespace, dest, joined(getattr(namespace, dest, None), value, is_list))


def _command(parser: argparse.ArgumentParser) -> str:
    return parser.prog.removeprefix("llmserve ")
