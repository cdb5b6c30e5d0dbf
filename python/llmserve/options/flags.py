"""Flags of a command line, made from rows of a table of options."""

import argparse
import json
from collections.abc import Iterable
from typing import Any

from llmserve.common.units import json_object, size, token_count
from llmserve.common.vllm_arguments import NOT_HERE
from llmserve.options.option import Option
from llmserve.options.peer_flags import joined

_METAVARS = {str: "X", float: "X", size: "SIZE", token_count: "N", json_object: "JSON"}


def add_flags(
    parser: argparse._ActionsContainer, options: Iterable[Option], default: object = None
) -> None:
    """A flag for each option; one that is not given is `default`."""
    for option in options:
        if option.kind is bool:
            parser.add_argument(
                *option.flags,
                action=argparse.BooleanOptionalAction,
                default=default,
                help=option.help,
            )
            continue
        parser.add_argument(
            *option.flags,
            action=JoinAction if option.is_list or option.kind is json_object else "store",
            type=option.kind,
            metavar=_METAVARS.get(option.kind, "N"),
            default=default,
            help=option.help,
        )


class JoinAction(argparse.Action):
    """Adds a text to those that are there, with a comma between, or fields to an object."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        before = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, joined(before, values, is_list=True))


def add_flags_of_what_is_not_here(parser: argparse.ArgumentParser) -> None:
    """A flag for each argument of vLLM's whose feature is not here, unless the parser has it: with
    its default, and not shown."""
    for name, (values, _) in NOT_HERE.items():
        flag = "--" + name.replace("_", "-")
        if flag in parser._option_string_actions:
            continue
        hidden: dict[str, Any] = {"default": values[0], "help": argparse.SUPPRESS}
        if isinstance(values[0], bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, **hidden)
        else:
            parser.add_argument(flag, type=json_or_text, **hidden)


def json_or_text(text: str) -> object:
    """JSON, or a text by itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
