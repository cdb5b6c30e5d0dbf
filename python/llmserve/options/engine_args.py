"""The arguments of an LLM as an object, as scripts for vLLM have them."""

import argparse
import dataclasses
import inspect
import os
from typing import Any, NoReturn, TypeVar

from llmserve.checkpoint.model_files import demo_model_path
from llmserve.common.vllm_arguments import NOT_HERE, check_names
from llmserve.errors import NotSupported
from llmserve.options.engine_options import ENGINE_OPTIONS, EngineOptions, argument_names
from llmserve.options.flags import add_flags, add_flags_of_what_is_not_here

_Parser = TypeVar("_Parser", bound=argparse.ArgumentParser)
_Self = TypeVar("_Self", bound="EngineArgs")

# LLM's arguments first, then vLLM's of what is not here, at their defaults.
_DEFAULTS: dict[str, Any] = {name: values[0] for name, (values, _) in NOT_HERE.items()}
_DEFAULTS.update({item.name: item.default for item in dataclasses.fields(EngineOptions)})
_DEFAULTS["model"] = str(demo_model_path())
_TYPES: dict[str, Any] = {item.name: item.type for item in dataclasses.fields(EngineOptions)}
_Fields = dataclasses.make_dataclass(
    "_Fields",
    [
        (name, _TYPES.get(name, object), dataclasses.field(default=_DEFAULTS[name]))
        for name in (*argument_names(), *(name for name in NOT_HERE if name not in _TYPES))
    ],
)


class EngineArgs(_Fields):  # type: ignore[misc, valid-type]  # made from the table
    """The arguments of LLM and AsyncLLM by their names, which may be assigned, and read from a
    command line: `LLM(**vars(args))` takes them, and `LLMEngine.from_engine_args(args)`.

    The default model is the demo. Raises InvalidArgument for the name of no argument, and
    NotSupported for one of vLLM's whose feature is not here, unless it is at its default.

    >>> args = EngineArgs(max_model_len=512)
    >>> args.max_num_seqs = 8
    >>> vars(args)["max_model_len"], args.max_num_seqs
    (512, 8)
    """

    def __init__(self, model: str | os.PathLike[str] = _DEFAULTS["model"], **given: Any) -> None:
        # LLM warns of what changes nothing.
        check_names(type(self).__name__, given, argument_names(), warns=False)
        super().__init__(model, **given)

    @staticmethod
    def add_cli_args(parser: _Parser) -> _Parser:
        """A flag for each argument, with hyphens for underscores; gives the parser back."""
        group = parser.add_argument_group("arguments of LLM")
        group.add_argument(
            "--model",
            default=_DEFAULTS["model"],
            metavar="MODEL",
            help="checkpoint directory, or Hub id (default: the demo)",
        )
        for option in ENGINE_OPTIONS:
            if option.is_text:
                add_flags(group, [option], option.default)
        add_flags_of_what_is_not_here(parser)
        return parser

    @classmethod
    def from_cli_args(cls: type[_Self], args: argparse.Namespace) -> _Self:
        """From what a parser with those flags found; what else it found is left alone."""
        return cls(**{name: getattr(args, name) for name in _DEFAULTS if hasattr(args, name)})

    def create_engine_config(self, *_arguments: object, **_keywords: object) -> NoReturn:
        """Not here: raises NotSupported that says what to use."""
        raise NotSupported(
            "create_engine_config is not supported: vLLM's config objects are not here; LLM.plan("
            "**vars(args)) says what an engine would take, and LLM(**vars(args)) starts one"
        )


EngineArgs.__signature__ = inspect.signature(_Fields)


class AsyncEngineArgs(EngineArgs):
    """EngineArgs for AsyncLLM: the same arguments."""

    @staticmethod
    def add_cli_args(parser: _Parser, async_args_only: bool = False) -> _Parser:
        """As EngineArgs.add_cli_args; async_args_only: none, as there are none of its own."""
        return parser if async_args_only else EngineArgs.add_cli_args(parser)
