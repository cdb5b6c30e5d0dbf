"""`llmserve completion`: scripts that have a shell complete commands and options."""

import argparse
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

_EXAMPLES = """examples, for this user and every shell from now on:
  llmserve completion bash >> ~/.bashrc
  llmserve completion zsh > "${fpath[1]}/_llmserve"
  llmserve completion fish > ~/.config/fish/completions/llmserve.fish
"""


@dataclass(frozen=True, slots=True)
class _Command:
    """A command with what may follow it."""

    path: str  # "bench latency"; "" is the program
    commands: dict[str, str]  # by name, a line of help
    options: dict[str, str]


def add_parser(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    program: argparse.ArgumentParser,
) -> None:
    """Adds the command to the parser of the program, all of which it completes."""
    parser = commands.add_parser(
        "completion",
        help="print a script of completions for a shell",
        description="Prints a script by which a shell completes commands, options and files.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, program=program)
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), metavar="SHELL",
                        help="bash, zsh or fish")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    tree = list(_commands(options.program, ""))
    script = {"bash": _bash, "zsh": _zsh, "fish": _fish}[options.shell]
    print("\n".join(script(tree)))
    return 0


def _commands(parser: argparse.ArgumentParser, path: str) -> Iterator[_Command]:
    options: dict[str, str] = {}
    commands: dict[str, str] = {}
    children: list[tuple[str, argparse.ArgumentParser]] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            commands = {name: helps.get(name, "") for name in action.choices}
            children = list(action.choices.items())
        elif action.help is not argparse.SUPPRESS:
            options |= dict.fromkeys(action.option_strings, (action.help or "").replace("%%", "%"))
    yield _Command(path, commands, options)
    for name, child in children:
        yield from _commands(child, f"{path} {name}".strip())


def _bash(tree: list[_Command]) -> Iterator[str]:
    yield "_llmserve() {"
    yield '  local path="" word known words'
    yield '  local current="${COMP_WORDS[COMP_CWORD]}"'
    yield '  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do'
    known = " ".join(shlex.quote(command.path) for command in tree if command.path)
    yield f"    for known in {known}; do"
    yield '      [ "${path:+$path }$word" = "$known" ] && path="$known" && break'
    yield "    done"
    yield "  done"
    yield '  case "$path" in'
    for command in tree:
        words = " ".join([*command.commands, *command.options])
        yield f"    {shlex.quote(command.path)}) words={shlex.quote(words)} ;;"
    yield "  esac"
    yield '  COMPREPLY=($(compgen -W "$words" -- "$current"))'
    yield "}"
    yield "complete -o default -F _llmserve llmserve"


def _zsh(tree: list[_Command]) -> Iterator[str]:
    yield "#compdef llmserve"
    yield "_llmserve() {"
    yield '  local at="" word'  # `path` is zsh's own
    yield "  local -a items"
    yield '  for word in "${(@)words[2,CURRENT-1]}"; do'
    yield '    case "${at:+$at }$word" in'
    known = "|".join(shlex.quote(command.path) for command in tree if command.path)
    yield f'      {known}) at="${{at:+$at }}$word" ;;'
    yield "    esac"
    yield "  done"
    yield '  case "$at" in'
    for command in tree:
        entries = {**command.commands, **command.options}
        texts = [f"{name.replace(':', chr(92) + ':')}:{text}" for name, text in entries.items()]
        yield f"    {shlex.quote(command.path)}) items=({' '.join(map(shlex.quote, texts))}) ;;"
    yield "  esac"
    yield "  _describe 'llmserve' items"
    yield "  _files"
    yield "}"
    # The file of an autoloaded function is run as the function, the first time.
    yield 'if [ "${funcstack[1]}" = _llmserve ]; then _llmserve "$@"'
    yield "else compdef _llmserve llmserve; fi"


def _fish(tree: list[_Command]) -> Iterator[str]:
    yield "function __llmserve_at"
    yield "  set -l at"
    yield "  for word in (commandline -opc)[2..-1]"
    known = " ".join(shlex.quote(command.path) for command in tree if command.path)
    yield f'    contains -- (string join " " $at $word) {known}; and set -a at $word'
    yield "  end"
    yield '  test "$at" = "$argv[1]"'
    yield "end"
    for command in tree:
        where = f"-n {shlex.quote(f'__llmserve_at {shlex.quote(command.path)}')}"
        for name, text in command.commands.items():
            yield f"complete -c llmserve {where} -a {name} -d {shlex.quote(text)}"
        for name, text in command.options.items():
            kind = "-l" if name.startswith("--") else ("-s" if len(name) == 2 else "-o")
            yield f"complete -c llmserve {where} {kind} {name.lstrip('-')} -d {shlex.quote(text)}"
