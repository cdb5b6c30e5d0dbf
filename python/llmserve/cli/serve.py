"""`llmserve serve`: the OpenAI-compatible server."""

import argparse
import logging
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmserve.checkpoint.model_files import demo_model_path, is_on_the_hub, plain_name
from llmserve.cli.command_parser import NAMED_MODEL, take_peer_flags
from llmserve.cli.options import add_engine_options
from llmserve.errors import InvalidArgument, ResourceExhausted
from llmserve.options.flags import add_flags
from llmserve.server import check_extra

if TYPE_CHECKING:
    from llmserve.server.options import Effective

_EXAMPLES = """examples:
  llmserve serve
  llmserve serve ./Qwen3-0.6B --port 8080 --served-model-name qwen --max-model-len 4096
  llmserve serve Qwen/Qwen3-0.6B --host 0.0.0.0 --api-key "$KEY"
  llmserve serve small=./Qwen3-0.6B large=./Llama-3.2-1B
  llmserve serve --config server.yaml
"""

_log = logging.getLogger(__name__)


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser."""
    from llmserve.server.options import SERVER_OPTIONS

    parser = commands.add_parser(
        "serve",
        help="serve models by OpenAI's HTTP API",
        description="Serves MODEL, a checkpoint directory or Hub id (default: the demo), on "
        "127.0.0.1:8000 by OpenAI's HTTP API. Several models are given as NAME=MODEL. Every "
        "option may stand in the YAML file of --config; keys may be in LLMSERVE_API_KEY and "
        "LLMSERVE_ADMIN_KEY, where no list of processes shows them.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("model", nargs="*", metavar="MODEL", help="model, or NAME=MODEL")
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings")
    parser.add_argument(
        "--show-config", action="store_true", help="print every setting and its origin, and stop"
    )
    parser.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="what clients call the model"
    )
    # What is not given is not in the namespace, so that a file may say it.
    add_flags(parser.add_argument_group("server"), SERVER_OPTIONS, argparse.SUPPRESS)
    add_engine_options(parser, "serve", argparse.SUPPRESS)
    take_peer_flags(parser)


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    check_extra()
    from llmserve.async_llm import AsyncLLM
    from llmserve.server.hand_over import open_hand_over
    from llmserve.server.logs import configure_logs
    from llmserve.server.main import listen, serve
    from llmserve.server.models import ServedModel
    from llmserve.server.options import resolve
    from llmserve.server.tracing import open_tracing

    effective = resolve(_flags(options), options.config)
    named = _named_models(effective.models, effective.served_model_names)
    if options.show_config:
        _check(effective, named)
        print("\n".join(effective.lines()))
        return 0
    configure_logs(effective.server.log_format)
    if effective.engine.get("node_rank"):
        from llmserve.cli.follow import follow

        if len(named) > 1:
            raise InvalidArgument("a node other than the first computes for one model")
        follow(named[0][1], effective.engine)
        return 0
    _log.info("settings: %s", effective.changed() or "all at their defaults")
    tracing = open_tracing(effective.server)
    with ExitStack() as stack:
        sockets = listen(effective.server)
        for sock in sockets:
            stack.callback(sock.close)
        traces = _trace_files(effective.server.trace, [names[0] for names, _ in named])
        models = []
        for names, path in named:
            llm = AsyncLLM(path, **{"seed": None, **effective.engine})  # None: one is drawn
            stack.callback(llm.close)
            open_hand_over(llm, effective.server)
            _log.info("loaded %r; its seed is %d", llm, llm.model_config.seed)
            models.append(ServedModel(names, llm, aliases=[path]))
        serve(models, effective.server, sockets, tracing)
        for served, file in zip(models, traces, strict=False):
            served.llm.trace().to_perfetto(file)
            _log.info("wrote %s", file)
    return 0


def _flags(options: argparse.Namespace) -> dict[str, Any]:
    """Those that were given, by setting."""
    from llmserve.options.peer_replicas import NAMES
    from llmserve.server.options import TAKEN

    given = vars(options)
    names = (*TAKEN, *NAMES)
    flags = {name: given[name] for name in names if given.get(name) not in (None, [])}
    named = given.get(NAMED_MODEL)
    if named is not None and flags.get("model", [named]) != [named]:
        raise InvalidArgument("serve takes MODEL or --model, not both")
    return flags if named is None else {**flags, "model": [named]}


def _check(effective: "Effective", named: list[tuple[list[str], str]]) -> None:
    """Raises what the start would raise, as far as that is known without weights, and without a
    download: of a model of the Hub only the options are looked at."""
    from llmserve.async_llm import AsyncLLM
    from llmserve.options.engine_options import read_options

    _trace_files(effective.server.trace, [names[0] for names, _ in named])
    for _, path in named:
        read_options("serve", path, effective.engine).to_request(path)
        if is_on_the_hub(path):
            continue
        plan = AsyncLLM.plan(path, **effective.engine)
        if plan.refusal is not None:
            raise ResourceExhausted(plan.refusal)


def _trace_files(trace: str, names: list[str]) -> list[Path]:
    """One a model, none without a trace; they are written at the end, which is late to find out
    that they cannot be. Raises InvalidArgument."""
    if not trace:
        return []
    files = [Path(trace)]
    if len(names) > 1:
        stems = (f"{files[0].stem}-{name.replace('/', '-')}" for name in names)
        files = [files[0].with_stem(stem) for stem in stems]
    for file in files:
        try:
            file.open("ab").close()
        except OSError as error:
            raise InvalidArgument(
                f"trace {str(file)!r} cannot be written: {error.strerror}"
            ) from None
    return files


def _named_models(models: list[str], names: list[str]) -> list[tuple[list[str], str]]:
    """(names, path) a model."""
    if not models:
        return [(names or ["demo"], str(demo_model_path()))]
    if len(models) == 1 and "=" not in models[0]:
        return [(names or [plain_name(models[0])], models[0])]
    if names:
        raise InvalidArgument(
            "served_model_name is for one model; name several as NAME=MODEL NAME=MODEL"
        )
    result = []
    for item in models:
        name, equals, path = item.partition("=")
        if not (name and equals and path):
            raise InvalidArgument(f"several models are given as NAME=MODEL, got {item!r}")
        result.append(([name], path))
    if len({name[0] for name, _ in result}) < len(result):
        raise InvalidArgument("two models have the same name; each needs its own")
    return result
