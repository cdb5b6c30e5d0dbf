"""`llmserve plan`: what a model takes and whom it serves, before anything is loaded."""

import argparse
import dataclasses
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmserve.cli.model_argument import add_model_argument, model_of
from llmserve.cli.options import add_engine_options, add_short_flags, engine_arguments
from llmserve.common.units import parse_bandwidth, parse_bytes, parse_flops
from llmserve.errors import InvalidArgument
from llmserve.llm import LLM
from llmserve.options.engine_options import options_of
from llmserve.plan.capacity import Capacity, ModelShape, plan_capacity
from llmserve.plan.figures import Device, figures
from llmserve.plan.memory_plan import MemoryPlan
from llmserve.plan.plots import plot_users

_EXAMPLES = """examples:
  what an LLM of the same settings takes on this machine, exactly
    llmserve plan ./Qwen3-0.6B
    llmserve plan ./Qwen3-0.6B --max-model-len 8192 --contexts 2048,8192 --json
    llmserve plan ./Qwen3-0.6B --memory 4GiB --bandwidth 40GB/s
  how many users fit on other hardware: 80 layers of 8 KV heads of 128
    llmserve plan --shape 80x8x128 --weights 140GB --gpu-memory 4x80GiB --overhead 0.1
    llmserve plan ./config.json --gpu-memory 80GiB --contexts 4096,32768
  bounds: reading speed, users for a rate, price, moving a KV cache
    llmserve plan --shape 80x8x128 --weights 140GB --gpu-memory 180GB --bandwidth 3.35TB/s \\
      --rate 1000 --price 3 --link 200GB/s
"""

_DEFAULT_CONTEXT = (4096,)


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "plan",
        help="show what a model takes before it is loaded",
        description="Shows the memory that a model takes and how many users it holds. Without "
        "--gpu-memory or --shape: on this machine, with LLM's settings, equal to what the engine "
        "then allocates. With them: arithmetic for any hardware.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    add_model_argument(parser)
    parser.add_argument("--contexts", metavar="N,N", help="tokens of a user, e.g. 2048,8192")
    parser.add_argument("--memory", metavar="SIZE", help="plan for so much available memory")
    add_engine_options(parser, "plan")
    add_short_flags(parser)
    hardware = parser.add_argument_group("other hardware")
    hardware.add_argument("--shape", metavar="LxKxD", help="layers x KV heads x head dim")
    hardware.add_argument("--weights", metavar="SIZE", help="bytes of weights, e.g. 140GB")
    hardware.add_argument("--gpu-memory", metavar="SIZE", help="e.g. 80GiB or 4x80GiB")
    hardware.add_argument(
        "--overhead", type=float, default=0.0, metavar="X", help="share lost, e.g. 0.1"
    )
    bounds = parser.add_argument_group("bounds")
    bounds.add_argument("--bandwidth", metavar="RATE", help="of memory, e.g. 3.35TB/s")
    bounds.add_argument("--flops", metavar="RATE", help="of arithmetic, e.g. 312TFLOP/s")
    bounds.add_argument("--rate", type=float, metavar="N", help="tokens a second wanted")
    bounds.add_argument("--price", type=float, metavar="X", help="of the hardware, an hour")
    bounds.add_argument("--link", metavar="RATE", help="of a KV hand-over, e.g. 200GB/s")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="everything, as JSON")
    output.add_argument("--html", metavar="FILE", help="write the tables as HTML too")
    output.add_argument("--plot", metavar="FILE", help="write users over context (llmserve[plot])")


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    is_calculation = options.gpu_memory is not None or options.shape is not None
    if is_calculation:
        _refuse_engine_options(options)
        return _calculate(options)
    for name in ("rate", "price", "link", "weights"):
        if getattr(options, name) is not None:
            raise InvalidArgument(f"--{name} goes with --gpu-memory or --shape")
    return _plan(options)


def _plan(options: argparse.Namespace) -> int:
    plan = LLM.plan(
        model_of(options),
        contexts=_contexts(options),
        available_memory_bytes=(
            None if options.memory is None else parse_bytes("--memory", options.memory)
        ),
        bandwidth=_device(options).bandwidth,
        flops=_device(options).flops,
        **engine_arguments(options, "plan"),
    )
    print(json.dumps(plan.to_dict(), indent=2) if options.json else plan)
    _write_files(options, plan)
    return 0


def _calculate(options: argparse.Namespace) -> int:
    contexts = _contexts(options) or _DEFAULT_CONTEXT
    shape = _shape(options)
    capacity = None
    if options.gpu_memory is not None:
        memory = parse_bytes("--gpu-memory", options.gpu_memory)
        capacity = plan_capacity(shape, memory, contexts, overhead=options.overhead)
    bounds = figures(shape, _device(options), contexts, capacity)
    kv_bytes = {context: shape.kv_bytes(context) for context in contexts}
    if options.json:
        print(
            json.dumps(
                {
                    "kv_bytes_per_token": shape.kv_bytes(1),
                    "kv_bytes": kv_bytes,
                    "capacity": None if capacity is None else dataclasses.asdict(capacity),
                    "figures": [dataclasses.asdict(figure) for figure in bounds],
                },
                indent=2,
            )
        )
    else:
        print(f"KV cache       {shape.kv_bytes(1):,} bytes a token in two bytes an element")
        for context, num_bytes in kv_bytes.items():
            print(f"  at {context:<9} {num_bytes:,} bytes")
        if capacity is not None:
            print(capacity)
        for figure in bounds:
            print(figure)
    _write_files(options, capacity)
    return 0


def _shape(options: argparse.Namespace) -> ModelShape:
    weights = None if options.weights is None else parse_bytes("--weights", options.weights)
    if options.shape is not None:
        if options.model is not None or options.word is not None:
            raise InvalidArgument("plan takes a MODEL or --shape, not both")
        match = re.fullmatch(r"(\d{1,9})x(\d{1,9})x(\d{1,9})", options.shape)
        if match is None:
            raise InvalidArgument(
                f"--shape must be LAYERSxKV_HEADSxHEAD_DIM such as 80x8x128, got {options.shape!r}"
            )
        layers, heads, dim = (int(number) for number in match.groups())
        return ModelShape.of(layers, heads, dim, weight_bytes=weights or 0)
    if options.model is None and options.word is None:
        raise InvalidArgument("--gpu-memory needs a MODEL or --shape LxKxD")
    if weights is None:  # then the architecture must be one that llmserve knows
        plan = LLM.plan(model_of(options), dtype=options.dtype or "auto")
        return ModelShape.from_config(plan.model, weight_bytes=plan.weight_bytes)
    return ModelShape.from_config(model_of(options), weight_bytes=weights)


def _device(options: argparse.Namespace) -> Device:
    def read(name: str, parse: Any) -> float | None:
        text = getattr(options, name)
        return None if text is None else float(parse(f"--{name}", text))

    return Device(
        bandwidth=read("bandwidth", parse_bandwidth),
        flops=read("flops", parse_flops),
        rate=options.rate,
        price=options.price,
        link=read("link", parse_bandwidth),
    )


def _contexts(options: argparse.Namespace) -> tuple[int, ...] | None:
    if options.contexts is None:
        return None
    if re.fullmatch(r"\d{1,18}(,\d{1,18})*", options.contexts) is None:
        raise InvalidArgument(
            f"--contexts must be numbers of tokens such as 2048,8192, got {options.contexts!r}"
        )
    return tuple(int(number) for number in options.contexts.split(","))


def _refuse_engine_options(options: argparse.Namespace) -> None:
    # Where weights are to be counted, their type matters on any hardware.
    counts_weights = options.shape is None and options.weights is None
    names = [option.name for option in options_of("plan")]
    for name in [*names, "memory"]:
        if counts_weights and name == "dtype":
            continue
        if getattr(options, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise InvalidArgument(f"{flag} plans for this machine; leave --gpu-memory, --shape out")


def _write_files(options: argparse.Namespace, plan: MemoryPlan | Capacity | None) -> None:
    if plan is None:
        if options.html is not None or options.plot is not None:
            raise InvalidArgument("--html and --plot need a MODEL or --gpu-memory")
        return
    if options.html is not None:
        page = f"<!doctype html><meta charset='utf-8'>{plan._repr_html_()}\n"
        with _writing(f"--html {options.html}"):
            Path(options.html).write_text(page, encoding="utf-8")
    if options.plot is not None:
        figure = plot_users(plan).figure
        with _writing(f"--plot {options.plot}"):
            figure.savefig(options.plot)


@contextmanager
def _writing(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidArgument(f"{what}: {error.strerror or error}") from error
    except ValueError as error:  # matplotlib's, of a kind of file that it does not write
        raise InvalidArgument(f"{what}: {error}") from error
