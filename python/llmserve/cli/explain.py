"""`llmserve explain`: what a request did at every moment of its life, from an exported trace."""

import argparse

from llmserve.errors import InvalidArgument
from llmserve.insight.perfetto import read_lives
from llmserve.insight.timeline import describe_life

_EXAMPLES = """examples, after llm.trace().to_perfetto("trace.json") in Python:
  llmserve explain trace.json
  llmserve explain trace.json 7
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "explain",
        help="tell why a request waited",
        description="Lists the requests of a trace that LLM.trace().to_perfetto(path) wrote or, "
        "given one, tells what it did at every moment and why it waited.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("trace", metavar="TRACE", help="file that Trace.to_perfetto wrote")
    parser.add_argument("request", metavar="REQUEST", nargs="?", help="request id")


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    lives = read_lives(options.trace)
    if options.request is None:
        for name, (summary, _) in lives.items():
            print(f"request {name}: {summary}")
        return 0
    if options.request not in lives:
        raise InvalidArgument(
            f"{options.trace} has no request {options.request!r}; without one, its "
            f"{len(lives)} requests are listed"
        )
    summary, spans = lives[options.request]
    for line in describe_life(options.request, summary, spans):
        print(line)
    return 0
