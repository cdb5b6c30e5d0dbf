"""`llmserve route`: one address for several servers."""

import argparse
import os
from contextlib import ExitStack
from typing import Any

from llmserve.errors import InvalidArgument
from llmserve.options.flags import add_flags
from llmserve.server import check_extra

_EXAMPLES = """examples:
  llmserve route --replicas http://127.0.0.1:8001 http://127.0.0.1:8002
  llmserve route --replicas http://10.0.0.1:8000 http://10.0.0.2:8000 \\
    --tokenizer ./Qwen3-0.6B --replica-admin-key "$ADMIN" --host 0.0.0.0 --api-key "$KEY"
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser."""
    from llmserve.route.settings import OPTIONS

    parser = commands.add_parser(
        "route",
        help="one address for several servers",
        description="Takes requests of OpenAI's HTTP API and sends each to one of several "
        "`llmserve serve`, by the prefixes that they hold and by their load. A stream whose server "
        "dies goes on at another one, with the same tokens. Keys may be in LLMSERVE_API_KEY, "
        "LLMSERVE_REPLICA_KEY and LLMSERVE_ADMIN_KEY, where no list of processes shows them.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--replicas", nargs="+", metavar="URL", required=True, help="servers: http://host:port"
    )
    add_flags(parser.add_argument_group("router"), OPTIONS, argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    check_extra()
    from llmserve.route.main import route
    from llmserve.route.settings import OPTIONS, SECRETS, RouteSettings
    from llmserve.server.logs import configure_logs
    from llmserve.server.main import listen

    given: dict[str, Any] = {
        name: os.environ[variable] for name, variable in SECRETS.items() if variable in os.environ
    }
    names = [option.name for option in OPTIONS]
    given |= {name: value for name, value in vars(options).items() if name in names}
    settings = RouteSettings(**given)
    if len(set(options.replicas)) < len(options.replicas):
        raise InvalidArgument("--replicas has an address twice")
    configure_logs(settings.log_format)
    with ExitStack() as stack:
        sockets = listen(settings.listening)
        for sock in sockets:
            stack.callback(sock.close)
        route(options.replicas, settings, sockets)
    return 0
