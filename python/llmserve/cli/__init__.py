"""The `llmserve` command. Results go to stdout, everything else to stderr."""

import argparse
import os
import sys
from collections.abc import Sequence

from llmserve._version import __version__
from llmserve.cli import bench, cache, chat, doctor, eval, explain, generate, inspect, plan, serve
from llmserve.cli.command_parser import CommandParser
from llmserve.errors import DeviceError, InternalError, LLMServeError

_EXAMPLES = """examples:
  llmserve generate "Once upon a time"
  llmserve generate --model ./Qwen3-0.6B --temperature 0 --max-tokens 64 "The capital of France is"
  llmserve chat Qwen/Qwen3-0.6B
  llmserve serve ./Qwen3-0.6B --port 8000
  llmserve inspect ./Qwen3-0.6B
  llmserve explain trace.json 7
  llmserve plan ./Qwen3-0.6B --contexts 2048,8192
  llmserve cache list
  llmserve eval perplexity --quantization none,int8,int4
  llmserve bench latency --model ./Qwen3-0.6B --batch-size 8
"""

# Exit codes: 0 done; 1 our or the machine's fault; 2 the caller's; 128 + n as a shell reports the
# signal n.
_USER_ERROR = 2
_INTERRUPTED = 130
_BROKEN_PIPE = 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code; argparse exits itself on bad usage (2)."""
    parser: argparse.ArgumentParser = CommandParser(
        prog="llmserve",
        description="An LLM serving engine: runs Hugging Face checkpoints on the CPU.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"llmserve {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    generate.add_parser(commands)
    chat.add_parser(commands)
    inspect.add_parser(commands)
    explain.add_parser(commands)
    plan.add_parser(commands)
    cache.add_parser(commands)
    serve.add_parser(commands)
    bench.add_parser(commands)
    eval.add_parser(commands)
    doctor.add_parsers(commands)
    try:
        options = parser.parse_args(arguments)
        exit_code: int = options.run(options)
        sys.stdout.flush()
        return exit_code
    except KeyboardInterrupt:
        print("llmserve: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # the reader has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except LLMServeError as error:
        print(f"llmserve: {error}", file=sys.stderr)
        return 1 if isinstance(error, DeviceError | InternalError) else _USER_ERROR
