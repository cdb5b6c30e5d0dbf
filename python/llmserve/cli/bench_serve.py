"""`llmserve bench serve`: load on a server that runs."""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from llmserve.bench.http_stream import Target
from llmserve.bench.serve import METRICS, Load, run_load
from llmserve.common.arguments import integer, number
from llmserve.errors import InvalidArgument

_EXAMPLES = """examples, with `llmserve serve` in another terminal:
  llmserve bench serve --num-prompts 100 --input-len 128 --output-len 64 --ignore-eos
  llmserve bench serve --request-rate 4 --burstiness 0.5 --goodput ttft:500 tpot:50
  llmserve bench serve --base-url http://host:8000 --max-concurrency 8 --save-result run.json
"""


def add_parser(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the benchmark to the parser."""
    parser = kinds.add_parser(
        "serve",
        help="load on a server that runs, as its clients see it",
        description="Sends streamed completions of random prompts to an OpenAI-compatible server "
        "and reports throughput and latencies.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--base-url", default="http://127.0.0.1:8000", metavar="URL", help="default %(default)s"
    )
    parser.add_argument("--api-key", metavar="KEY", help="default: LLMSERVE_API_KEY")
    parser.add_argument("--model", metavar="NAME", help="default: the first that is served")
    parser.add_argument("--dataset-name", default="random", choices=["random"], help="prompts")
    for flag, default in (("--input-len", 128), ("--output-len", 64), ("--num-prompts", 100)):
        parser.add_argument(
            flag, type=int, default=default, metavar="N", help="default %(default)s"
        )
    parser.add_argument(
        "--request-rate", type=float, default=float("inf"), metavar="N",
        help="requests a second; default: all at once",
    )  # fmt: skip
    parser.add_argument(
        "--burstiness", type=float, default=1.0, metavar="X",
        help="1 is Poisson, less is burstier, more is more even",
    )  # fmt: skip
    parser.add_argument("--max-concurrency", type=int, metavar="N", help="most at a time")
    parser.add_argument("--ignore-eos", action="store_true", help="run to the full length")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals")
    parser.add_argument(
        "--percentile-metrics",
        default="ttft,tpot,itl,e2el",
        metavar="LIST",
        help="what to print; ttfb, too, is known",
    )
    parser.add_argument("--metric-percentiles", default="99", metavar="LIST", help="such as 50,99")
    parser.add_argument(
        "--goodput", nargs="+", default=[], metavar="METRIC:MS", help="limits of a good request"
    )
    parser.add_argument(
        "--save-result", nargs="?", const="", metavar="FILE",
        help="write everything as JSON; default: bench-serve-DATE-TIME.json in this folder",
    )  # fmt: skip
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit code: 1 if no request was answered."""
    metrics = _metrics(options.percentile_metrics)
    key = options.api_key or os.environ.get("LLMSERVE_API_KEY", "")
    bar = _bar(options)
    try:
        report = run_load(
            Target.of(options.base_url, key),
            options.model,
            _load(options),
            _percentiles(options.metric_percentiles),
            _goodput(options.goodput),
            lambda: bar.update(1),
        )
    finally:
        bar.close()
    for line in report.lines(metrics):
        print(line)
    if options.save_result is not None:
        path = options.save_result or time.strftime("bench-serve-%Y%m%d-%H%M%S.json")
        try:
            Path(path).write_text(report.to_json() + "\n", encoding="utf-8")
        except OSError as error:
            raise InvalidArgument(f"--save-result {path}: {error.strerror}") from error
        print(f"saved in {path}")
    return 0 if report.completed else 1


def _load(options: argparse.Namespace) -> Load:
    if not options.request_rate > 0:
        raise InvalidArgument(f"--request-rate must be more than 0, got {options.request_rate}")
    if number("--burstiness", options.burstiness) <= 0:
        raise InvalidArgument(f"--burstiness must be more than 0, got {options.burstiness}")
    concurrency = options.max_concurrency
    return Load(
        integer("--input-len", options.input_len, 1),
        integer("--output-len", options.output_len, 1),
        integer("--num-prompts", options.num_prompts, 1),
        options.request_rate,
        options.burstiness,
        None if concurrency is None else integer("--max-concurrency", concurrency, 1),
        options.ignore_eos,
        number("--temperature", options.temperature),
        integer("--seed", options.seed, 0),
    )


def _metrics(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in METRICS:
            raise InvalidArgument(f"--percentile-metrics: {name!r} is none of {', '.join(METRICS)}")
    return names


def _percentiles(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [-1.0]
    if not all(0 <= value <= 100 for value in values):
        raise InvalidArgument(f"--metric-percentiles must be numbers from 0 to 100, got {text!r}")
    return values


def _goodput(limits: list[str]) -> dict[str, float]:
    result = {}
    for item in limits:
        name, _, value = item.partition(":")
        try:
            result[name] = float(value)
        except ValueError:
            name = ""
        if name not in ("ttft", "tpot", "e2el"):
            raise InvalidArgument(f"--goodput takes ttft:MS, tpot:MS or e2el:MS, got {item!r}")
    return result


def _bar(options: argparse.Namespace) -> Any:
    from tqdm.auto import tqdm

    return tqdm(
        total=options.num_prompts, desc="requests", disable=options.disable_tqdm, file=sys.stderr
    )
