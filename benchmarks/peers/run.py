"""The same token ids through llmserve and its peers, interleaved, and tables of ratios.

    python benchmarks/peers/run.py prepare   # virtual environments; llama.cpp builds for minutes
    python benchmarks/peers/run.py measure --shape tinyllama-1.1b   # engines; to benchmarks/results
    python benchmarks/peers/run.py serve --shape tinyllama-1.1b   # HTTP servers; likewise
    python benchmarks/peers/run.py speculate --results FILE   # the demo pair, beside llama.cpp
    python benchmarks/peers/run.py start --shape tinyllama-1.1b   # time to first token; memory
    python benchmarks/peers/run.py report    # puts the results into the pages of docs/performance

Each system is a process that loads one checkpoint of random weights. A round runs each workload
once on every system, one after another, and measures the machine's rates of reading and arithmetic
in between, so that whatever else the machine does hits all alike. A ratio is the median over rounds
of (peer's seconds / llmserve's seconds in the same format) of the same round: over 1, llmserve is
faster. Weights of 8 and 4 bits are llmserve's int8 and int4 and llama.cpp's Q8_0 and Q4_0; formats
that are named like GGUF's are of one file, which both read.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # random_models
sys.path.insert(0, str(Path(__file__).resolve().parent))

import engines  # all from the two folders above
import environments
import page
import servers
import speculation
import starts
import targets
from random_models import SHAPES
from workloads import FORMATS, GGUF_FORMATS


def report(options: argparse.Namespace) -> None:
    for path, rendered in PAGES.items():
        page.update(path, rendered, check=options.check)


def targets_page(text: str) -> str:
    return page.with_section(text, "targets", f"\n{targets.tables()}\n\n")


def peers_page(text: str) -> str:
    return page.with_tables(text, "peers", engines.table_of)


def experts_page(text: str) -> str:
    text = page.with_tables(text, "experts", engines.table_of)
    return page.with_section(text, "expert-ops", f"\n{targets.expert_ops()}\n")


def servers_page(text: str) -> str:
    text = page.with_tables(text, "servers", servers.table_of)
    return page.with_tables(text, "starts", starts.table_of)


# Each page, and what makes it of its text and benchmarks/results.
PAGES = {
    page.TARGETS_PAGE: targets_page,
    page.PEERS_PAGE: peers_page,
    page.SERVERS_PAGE: servers_page,
    page.EXPERTS_PAGE: experts_page,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "llmserve-peers"
    parser.add_argument("--folder", type=Path, default=default, help=f"default {default}")
    parser.set_defaults(isa="")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    preparing = commands.add_parser("prepare", help="make the peers' environments")
    preparing.set_defaults(run=environments.prepare)
    peers = list(environments.PACKAGES)
    preparing.add_argument("--systems", nargs="+", choices=peers, default=peers)
    add_isa(preparing, "build llama.cpp, as one more build, for CPUs that have no more")
    preparing.add_argument("--jobs", type=int, default=os.cpu_count(), help="of compilers")

    measuring = commands.add_parser("measure", help="run the work on every system; adds a run")
    measuring.set_defaults(run=engines.measure)
    measuring.add_argument("--formats", nargs="+", choices=FORMATS, default=["bfloat16"])
    add_systems(measuring, engines.SYSTEMS)
    measuring.add_argument(
        "--work", nargs="+", default=[""], metavar="TEXT", help="only work whose name has it"
    )
    measuring.add_argument("--rounds", type=int, default=5)
    add_isa(measuring, "run as on a CPU that has no more")

    serving = commands.add_parser("serve", help="the same requests to every server")
    serving.set_defaults(run=servers.measure)
    add_systems(serving, servers.SYSTEMS)
    serving.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 32], metavar="N")
    serving.add_argument("--input-len", type=int, default=64)
    serving.add_argument("--output-len", type=int, default=32)
    serving.add_argument("--rounds", type=int, default=3)

    starting = commands.add_parser("start", help="process start to first token; peak memory")
    starting.set_defaults(run=starts.measure)
    checkpoint_formats = [form for form in FORMATS if form not in GGUF_FORMATS]
    starting.add_argument("--formats", nargs="+", choices=checkpoint_formats, default=["bfloat16"])
    add_systems(starting, engines.SYSTEMS)
    starting.add_argument("--rounds", type=int, default=5)

    speculating = commands.add_parser("speculate", help="guessed tokens, beside llama.cpp")
    speculating.set_defaults(run=speculation.measure)
    speculating.add_argument(
        "--intermediate-size", type=int, metavar="N", help="of the target; zeros beyond its own"
    )
    speculating.add_argument("--threads", type=int, default=1)
    speculating.add_argument("--num-prompts", type=int, default=8)
    speculating.add_argument("--rounds", type=int, default=3)
    speculating.add_argument("--results", type=Path, help="file to write")

    reporting = commands.add_parser("report", help="write docs/performance.md and docs/performance")
    reporting.set_defaults(run=report)
    reporting.add_argument("--check", action="store_true", help="only say whether it is up to date")
    options = parser.parse_args()
    is_measured = options.run in (engines.measure, servers.measure, starts.measure)
    if is_measured and "llmserve" not in options.systems:
        parser.error("--systems: llmserve is what the others are compared with")
    if is_measured and os.environ.get("LLMSERVE_CPU_ISA", options.isa) != options.isa:
        parser.error("LLMSERVE_CPU_ISA holds llmserve alone: use `measure --isa`")
    if is_measured and options.isa:
        if not set(options.systems) <= set(environments.CAPPED_SYSTEMS):
            parser.error(f"--isa: for --systems {' '.join(environments.CAPPED_SYSTEMS)} alone")
        os.environ["LLMSERVE_CPU_ISA"] = options.isa  # of llmserve's worker, and of the rates
    options.run(options)


def add_isa(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--isa", default="", choices=environments.ISAS, help=text)


def add_systems(parser: argparse.ArgumentParser, systems: tuple[str, ...]) -> None:
    parser.add_argument("--shape", choices=SHAPES, default="tinyllama-1.1b")
    parser.add_argument("--systems", nargs="+", choices=systems, default=list(systems))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--results", type=Path, help="file to write")


if __name__ == "__main__":
    main()
