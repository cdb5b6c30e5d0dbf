"""`llmserve doctor` and `llmserve top`: what a server's live metrics say."""

import argparse
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llmserve.common.arguments import number
from llmserve.common.units import human_bytes
from llmserve.errors import InvalidArgument
from llmserve.insight.doctor import examine
from llmserve.insight.live_metrics import LiveMetrics

_DEFAULT_URL = "http://127.0.0.1:8000"
_CLEAR = "\033[H\033[J"


def add_parsers(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds both commands to the parser."""
    doctor = commands.add_parser(
        "doctor",
        help="examine a server that runs",
        description="Reads /metrics of a server and tells symptom, cause and action of what is "
        "not as it should be. Exit code 1 if there is anything.",
    )
    doctor.set_defaults(run=run_doctor)
    doctor.add_argument(
        "--interval", type=float, default=0.0, metavar="S",
        help="look at what happens in so many seconds; default: since the server's start",
    )  # fmt: skip
    top = commands.add_parser(
        "top",
        help="watch a server that runs",
        description="Shows a server's figures, live; q leaves.",
    )
    top.set_defaults(run=run_top)
    top.add_argument("--interval", type=float, default=2.0, metavar="S", help="default 2")
    top.add_argument("--count", type=int, metavar="N", help="stop after so many; default: never")
    for parser in (doctor, top):
        parser.add_argument("url", nargs="?", default=_DEFAULT_URL, metavar="URL")
        parser.add_argument("--api-key", metavar="KEY", help="default: LLMSERVE_API_KEY")


def run_doctor(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    metrics, earlier = _fetch(options), None
    if options.interval > 0:
        time.sleep(number("--interval", options.interval))
        earlier = metrics
        metrics = _fetch(options).since(earlier)
    findings = examine(metrics, earlier)
    for finding in findings:
        print("\n".join([*finding.lines(), ""]))
    if not findings:
        print("nothing is wrong")
    return 1 if findings else 0


def run_top(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    interval_s = number("--interval", options.interval)
    if interval_s <= 0:
        raise InvalidArgument(f"--interval must be more than 0, got {interval_s}")
    earlier = _fetch(options)
    shown = 0
    with _keys() as is_left:
        while options.count is None or shown < options.count:
            if is_left(interval_s):
                break
            now = _fetch(options)
            clear = _CLEAR if options.count is None else ""
            lines = _view(now, now.since(earlier), interval_s)
            print(clear + "\n".join([*lines, *_hint(options)]), flush=True)
            earlier = now
            shown += 1
    return 0


def _hint(options: argparse.Namespace) -> list[str]:
    return ["q leaves"] if sys.stdin.isatty() and options.count is None else []


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """A wait of so many seconds that says whether q, or Ctrl-D, was pressed in a terminal."""
    if not sys.stdin.isatty():
        yield _sleep
        return
    import termios
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield lambda seconds: _is_left(fd, seconds)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _is_left(fd: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if not select.select([fd], [], [], left)[0]:
            return False
        key = os.read(fd, 1)
        if key in (b"q", b"Q", b"\x04", b""):
            return True
    return False


def _fetch(options: argparse.Namespace) -> LiveMetrics:
    key = options.api_key or os.environ.get("LLMSERVE_API_KEY", "")
    return LiveMetrics.fetch(options.url, key)


def _view(now: LiveMetrics, recent: LiveMetrics, interval_s: float) -> list[str]:
    def rate(name: str) -> float:
        return recent.value(name) / interval_s

    models, recent_models = now.by_model, recent.by_model
    lines = []
    for name, of_model in models.items():
        lines += [f"model          {name}"] if len(models) > 1 else []
        lines += _model_view(of_model, recent_models[name], interval_s)
    return [
        *lines,
        f"requests/s     {rate('request_success_total'):.1f} finished, "
        f"{rate('requests_refused_total'):.1f} refused, "
        f"{rate('requests_ended_early_total'):.1f} ended early",
        f"memory         {human_bytes(round(now.value('process_resident_memory_bytes')))}",
    ]


def _model_view(now: LiveMetrics, recent: LiveMetrics, interval_s: float) -> list[str]:
    def rate(name: str) -> float:
        return recent.value(name) / interval_s

    def quantiles(name: str) -> str:
        values = [recent.quantile(name, share) for share in (0.5, 0.95, 0.99)]
        return " / ".join("-" if value is None else f"{1e3 * value:.1f}" for value in values)

    queries = recent.value("prefix_cache_queries_total")
    hits = f"{recent.value('prefix_cache_hits_total') / queries:.0%}" if queries else "-"
    drafted = recent.value("spec_decode_num_draft_tokens_total")
    right = recent.value("spec_decode_num_accepted_tokens_total")
    return [
        f"sequences      {now.value('num_requests_running'):.0f} running, "
        f"{now.value('num_requests_waiting'):.0f} waiting",
        f"tokens/s       {rate('generation_tokens_total'):.1f} generated, "
        f"{rate('prefill_tokens_total'):.1f} of prompts",
        f"KV cache       {now.value('kv_cache_usage_perc'):.1%} in use, prefix hits {hits}, "
        f"{rate('num_preemptions_total'):.1f} preemptions/s",
        *([f"guesses        {right / drafted:.0%} right of {drafted:.0f}"] if drafted else []),
        f"first token    {quantiles('time_to_first_token_seconds')} ms (p50 / p95 / p99)",
        f"next token     {quantiles('inter_token_latency_seconds')} ms",
        f"request        {quantiles('e2e_request_latency_seconds')} ms",
    ]
