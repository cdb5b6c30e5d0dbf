"""The table of options: what is made from it says the same, and each option reaches the core."""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path
from typing import Any

import pytest
from llmserve import LLM, AsyncLLM, InvalidArgument, _core
from llmserve.cli import bench, chat, generate, plan, serve
from llmserve.cli import inspect as inspect_command
from llmserve.cli.command_parser import CommandParser
from llmserve.common.vllm_arguments import NOT_HERE
from llmserve.options.engine_options import (
    ENGINE_OPTIONS,
    EngineOptions,
    argument_names,
    options_of,
)
from llmserve.options.option import EngineOption
from llmserve.options.page import page

PAGE = Path(__file__).parents[3] / "docs" / "engine-options.md"
OF_CORE = [option for option in ENGINE_OPTIONS if option.core is not None]
INTEGERS = [option for option in OF_CORE if isinstance(option.default, int | None)]
INTEGERS = [option for option in INTEGERS if option.kind not in (bool, float, str)]
COMMANDS = [
    (generate, "run", ("generate",)),
    (chat, "run", ("chat",)),
    (plan, "plan", ("plan",)),
    (serve, "serve", ("serve",)),
    (inspect_command, "inspect", ("inspect",)),
    (bench, "bench", ("bench", "latency")),
]


def by_name(option: EngineOption) -> str:
    return option.name


def test_the_page_is_what_the_table_says() -> None:
    command = "python -m llmserve.options.page > docs/engine-options.md"
    assert PAGE.read_text(encoding="utf-8") == page(), command


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_the_signature_has_the_tables_names_types_and_defaults(kind: type) -> None:
    parameters = inspect.signature(kind).parameters
    assert list(parameters) == [*argument_names(), "unknown"]
    assert parameters["unknown"].kind is inspect.Parameter.VAR_KEYWORD
    for option in ENGINE_OPTIONS:
        assert parameters[option.name].default == option.default
        assert f"{option.name}: {option.help}" in str(kind.__init__.__doc__)
    assert parameters["max_num_seqs"].annotation == int | None


def test_vllms_arguments_are_here_or_not_and_never_both() -> None:
    here = {option.name for option in ENGINE_OPTIONS}
    assert not here & NOT_HERE.keys()
    for name in {*argument_names()} - here - {"model"}:
        values, _ = NOT_HERE[name]
        default = inspect.signature(LLM).parameters[name].default
        assert default in values or (default is None and None in values), name


@pytest.mark.parametrize("option", OF_CORE, ids=by_name)
def test_the_core_takes_an_option_by_its_name(option: EngineOption) -> None:
    samples: dict[Any, object] = {bool: True, float: 0.5, str: "auto"}
    value = samples.get(option.kind, max(option.minimum, 1))
    EngineOptions("model", **{option.name: value}).to_request("model")
    assert option.checked(value) is not None


def test_the_core_refuses_a_name_that_it_does_not_know_and_a_value_of_another_type() -> None:
    with pytest.raises(TypeError, match="there is no setting max_num_sequences"):
        _core.ConfigRequest(max_num_sequences=3)
    with pytest.raises(TypeError, match="max_num_seqs cannot be 'many'"):
        _core.SchedulerConfig(max_num_seqs="many")


@pytest.mark.parametrize("option", INTEGERS, ids=by_name)
def test_a_number_out_of_range_is_refused_by_its_name(option: EngineOption) -> None:
    least = 0 if option.convert is not None else option.minimum
    with pytest.raises(InvalidArgument, match=f"^{option.name} must be between {least} and "):
        EngineOptions("model", **{option.name: least - 1}).to_request("model")
    with pytest.raises(InvalidArgument, match=f"^{option.name} must be an integer, got '7'"):
        EngineOptions("model", **{option.name: "7"}).to_request("model")


@pytest.mark.parametrize(("module", "command", "words"), COMMANDS, ids=lambda x: str(x)[-20:])
def test_a_command_has_a_flag_for_each_of_its_options(
    module: Any, command: str, words: tuple[str, ...]
) -> None:
    parser: Any = CommandParser()
    module.add_parser(parser.add_subparsers())
    for word in words:
        (kinds,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        parser = kinds.choices[word]
    assert len(options_of(command)) > 3
    for option in options_of(command):
        action = parser._option_string_actions["--" + option.name.replace("_", "-")]
        assert (action.help, action.dest) == (option.help, option.name)
        assert not option.alias or parser._option_string_actions[option.alias] is action


def test_what_an_option_says_is_text_for_a_table() -> None:
    for option in ENGINE_OPTIONS:
        assert option.help
        assert option.help[-1] != "."
        assert "|" not in option.description
        assert set(option.commands.split()) <= {"run", "serve", "plan", "bench", "inspect"}
