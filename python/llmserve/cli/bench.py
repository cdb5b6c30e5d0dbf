"""`llmserve bench`: how fast it starts, answers and serves, beside what the machine can do."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmserve.bench.run import Result, Workload, run_latency, run_startup, run_throughput
from llmserve.cli import bench_serve
from llmserve.cli.model_argument import add_model_argument, model_of
from llmserve.cli.options import add_engine_options, add_short_flags, engine_arguments
from llmserve.common.arguments import integer
from llmserve.errors import InvalidArgument

_EXAMPLES = """examples:
  llmserve bench latency ./Qwen3-0.6B --input-len 32 --output-len 128 --batch-size 8
  llmserve bench throughput ./Qwen3-0.6B --num-prompts 100 --output-json run.json
  llmserve bench startup ./Qwen3-0.6B --quantization int8

startup: weight_read_s and weight_pack_s are parts of load_s. Reading also looks for values that are
not finite; packing also rounds to integers, and reads the blocks of a GGUF file. Neither has what a
large model in floats packs after it has answered (LLM(defer_packing=True)).
bound_s is the larger of reading every weight once a step (and each KV cache once a token) at the
machine's read rate and of all multiply-adds at the rate of a large matrix product of llmserve's,
both measured between the runs. share_of_bound is what was reached of it.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command and its three benchmarks to the parser."""
    parser = commands.add_parser(
        "bench",
        help="measure start, latency and throughput, and load a server",
        description="Measures an engine beside a bound from the same run.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    bench_serve.add_parser(kinds)
    startup = _add(kinds, "startup", _startup, "import, load, first token", num_iters=5)
    latency = _add(kinds, "latency", _latency, "one batch, repeated", num_iters=10)
    throughput = _add(kinds, "throughput", _throughput, "many requests at once", num_iters=1)
    latency.add_argument("--batch-size", type=int, default=8, metavar="N", help="default 8")
    latency.add_argument("--num-iters-warmup", type=int, default=2, metavar="N", help="default 2")
    throughput.add_argument("--num-prompts", type=int, default=64, metavar="N", help="default 64")
    for benchmark in (latency, throughput):
        benchmark.add_argument("--input-len", type=int, default=32, metavar="N", help="default 32")
        benchmark.add_argument("--output-len", type=int, default=64, metavar="N", help="default 64")
    for benchmark in (startup, latency, throughput):
        add_engine_options(benchmark, "bench")
        add_short_flags(benchmark)


def _add(
    kinds: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    run: Any,
    text: str,
    num_iters: int,
) -> argparse.ArgumentParser:
    parser = kinds.add_parser(
        name,
        help=text,
        description=f"Measures {text}.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    add_model_argument(parser)
    parser.add_argument(
        "--num-iters", type=int, default=num_iters, metavar="N", help=f"default {num_iters}"
    )
    parser.add_argument("--output-json", metavar="FILE", help="write everything as JSON")
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    return parser


def _startup(options: argparse.Namespace) -> int:
    iters = integer("--num-iters", options.num_iters, 1)
    return _report(
        options,
        run_startup(_model(options), iters, _arguments(options), _bar(options)),
    )


def _latency(options: argparse.Namespace) -> int:
    return _report(
        options,
        run_latency(
            _model(options),
            _workload(options, "--batch-size", options.batch_size),
            integer("--num-iters", options.num_iters, 1),
            integer("--num-iters-warmup", options.num_iters_warmup, 0),
            _arguments(options),
            _bar(options),
        ),
    )


def _throughput(options: argparse.Namespace) -> int:
    return _report(
        options,
        run_throughput(
            _model(options),
            _workload(options, "--num-prompts", options.num_prompts),
            integer("--num-iters", options.num_iters, 1),
            _arguments(options),
            _bar(options),
        ),
    )


def _model(options: argparse.Namespace) -> str:
    return str(model_of(options))


def _workload(options: argparse.Namespace, flag: str, num_prompts: int) -> Workload:
    return Workload(
        integer(flag, num_prompts, 1),
        integer("--input-len", options.input_len, 1),
        integer("--output-len", options.output_len, 1),
        0 if options.seed is None else options.seed,
    )


def _arguments(options: argparse.Namespace) -> dict[str, Any]:
    return engine_arguments(options, "bench")


def _bar(options: argparse.Namespace) -> Any:
    def show(rounds: range, text: str) -> Iterator[int]:
        from tqdm.auto import tqdm

        bar: Any = tqdm(rounds, desc=text, disable=options.disable_tqdm, file=sys.stderr)
        yield from bar

    return show


def _report(options: argparse.Namespace, result: Result) -> int:
    for line in result.lines():
        print(line)
    if options.output_json is not None:
        try:
            Path(options.output_json).write_text(result.to_json() + "\n", encoding="utf-8")
        except OSError as error:
            raise InvalidArgument(
                f"--output-json {options.output_json}: {error.strerror}"
            ) from error
    return 0
