"""The `llmserve` command. Results go to stdout, everything else to stderr."""

import argparse
import os
import sys
from collections.abc import Sequence

from llmserve._version import __version__
from llmserve.errors import DeviceError, InternalError, LLMServeError

_EXAMPLES = """examples:
  llmserve generate "Once upon a time"
  llmserve generate ./Qwen3-0.6B "The capital of France is" --temperature 0 -n 64
  llmserve chat Qwen/Qwen3-0.6B
  llmserve chat Qwen/Qwen3-0.6B-GGUF:Q8_0 --device cuda
  llmserve pull Qwen/Qwen3-0.6B
  llmserve serve ./Qwen3-0.6B --port 8000
  llmserve route --replicas http://127.0.0.1:8001 http://127.0.0.1:8002
  llmserve inspect ./Qwen3-0.6B
  llmserve explain trace.json 7
  llmserve embed "Once upon a time"
  llmserve plan ./Qwen3-0.6B --contexts 2048,8192
  llmserve cache list
  llmserve quantize ./Qwen3-0.6B ./Qwen3-0.6B-int4 --calibration chats.jsonl
  llmserve eval perplexity --quantization none,int8,int4
  llmserve bench latency ./Qwen3-0.6B --batch-size 8
"""

# Exit codes: 0 done; 1 our or the machine's fault; 2 the caller's; 128 + n as a shell reports the
# signal n.
_USER_ERROR = 2
_INTERRUPTED = 130
_BROKEN_PIPE = 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code; argparse exits itself on bad usage (2)."""
    try:
        _open_closed_streams()
        options = _parse(arguments)
        exit_code: int = options.run(options)
        sys.stdout.flush()
        return exit_code
    except KeyboardInterrupt:
        print("llmserve: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # the reader has gone, as with `| head`
        _drop_output()
        return _BROKEN_PIPE
    except LLMServeError as error:
        print(f"llmserve: {error}", file=sys.stderr)
        return 1 if isinstance(error, DeviceError | InternalError) else _USER_ERROR
    except OSError as error:  # of what nobody has expected to fail, such as writing to stdout
        print(f"llmserve: {error}", file=sys.stderr)
        _drop_output()
        return 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    try:
        from llmserve.cli.peer_commands import ours

        parser = _parser()
        given = sys.argv[1:] if arguments is None else list(arguments)
        if not given:
            parser.print_help(sys.stderr)
            sys.exit(_USER_ERROR)
        (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        return parser.parse_args(ours(given, list(commands.choices)))
    finally:
        sys.stdout.flush()  # --help and --version write to it and end the program


def _parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    # The commands are imported here, where a Ctrl-C is caught, since that takes a while.
    from llmserve.cli import (
        bench,
        cache,
        chat,
        completion,
        doctor,
        eval,
        explain,
        generate,
        inspect,
        models,
        plan,
        quantize,
        route,
        serve,
        texts,
    )
    from llmserve.cli.command_parser import CommandParser

    parser: argparse.ArgumentParser = CommandParser(
        prog="llmserve",
        description="An LLM serving engine: runs Hugging Face checkpoints and GGUF files on the "
        "CPU, and on a CUDA GPU where it was built for one. MODEL is a directory, a .gguf file or "
        "a Hub id; without it the demo runs, a small model of stories that ships inside.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-V", "--version", action="version", version=f"llmserve {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    generate.add_parser(commands)
    chat.add_parser(commands)
    inspect.add_parser(commands)
    explain.add_parser(commands)
    plan.add_parser(commands)
    cache.add_parser(commands)
    serve.add_parser(commands)
    route.add_parser(commands)
    bench.add_parser(commands)
    quantize.add_parser(commands)
    eval.add_parser(commands)
    texts.add_parsers(commands)
    doctor.add_parsers(commands)
    models.add_parsers(commands)
    completion.add_parser(commands, parser)
    return parser


def _open_closed_streams() -> None:
    """Python has None for a stream that the caller has closed (`>&-`). One in its place reads as
    empty, and fails to write what is written to stdout; what goes to stderr is lost."""
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY))
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


def _drop_output() -> None:
    """What stdout still holds would be written once more at the end of the program."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
