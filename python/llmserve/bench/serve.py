"""`llmserve bench serve`: load on a server, and what its clients see."""

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from llmserve._version import __version__
from llmserve.bench.http_stream import Measured, Target, get_json, measure
from llmserve.bench.machine import describe_machine
from llmserve.bench.run import percentile
from llmserve.errors import InvalidArgument

METRICS = ("ttfb", "ttft", "tpot", "itl", "e2el")
_NAMES = {
    "ttfb": "time to first byte",
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}
# Of the random prompts: ids that any vocabulary has, without those that are special in many.
_FIRST_ID, _LAST_ID = 10, 999


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent, and when."""

    input_len: int
    output_len: int
    num_prompts: int
    request_rate: float  # a second; infinity: all at once
    burstiness: float = 1.0  # 1 is Poisson; less is burstier, more is more even
    max_concurrency: int | None = None
    ignore_eos: bool = False
    temperature: float = 0.0
    seed: int = 0

    def delays_s(self) -> list[float]:
        """Between requests: gamma-distributed with a mean of 1 / request_rate."""
        if self.request_rate == float("inf"):
            return [0.0] * self.num_prompts
        rng = random.Random(self.seed)
        scale = 1 / (self.request_rate * self.burstiness)
        return [rng.gammavariate(self.burstiness, scale) for _ in range(self.num_prompts)]

    def prompts(self) -> list[list[int]]:
        """[num_prompts][input_len] token ids, the same for the same seed."""
        rng = random.Random(self.seed + 1)
        return [
            [rng.randint(_FIRST_ID, _LAST_ID) for _ in range(self.input_len)]
            for _ in range(self.num_prompts)
        ]


@dataclass(frozen=True, slots=True)
class Report:
    """What came of it. Times are in milliseconds."""

    load: Load
    model: str
    duration_s: float
    completed: int
    failed: int
    errors: list[str]  # a few
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    request_goodput: float | None  # a second, of those within every limit
    latencies_ms: dict[str, dict[str, float]]  # by metric: mean, median, p99 ...
    command: str = field(default_factory=lambda: " ".join(sys.argv))

    def lines(self, metrics: Sequence[str]) -> list[str]:
        """For people."""
        lines = [
            f"{self.completed} requests in {self.duration_s:.2f} s, {self.failed} failed",
            f"requests/s            {self.request_throughput:10.2f}",
            f"output tokens/s       {self.output_throughput:10.1f}",
            f"all tokens/s          {self.total_token_throughput:10.1f}",
        ]
        if self.request_goodput is not None:
            lines.append(f"goodput, requests/s   {self.request_goodput:10.2f}")
        for metric in metrics:
            shown = ", ".join(f"{k} {v:.2f}" for k, v in self.latencies_ms[metric].items())
            lines.append(f"{_NAMES[metric]:<22}(ms)  {shown}")
        lines += [f"error: {error}" for error in self.errors]
        return lines

    def to_json(self) -> str:
        """Everything, with the machine."""
        document: dict[str, Any] = {
            "llmserve": __version__,
            **asdict(self),
            "machine": describe_machine(),
        }
        if self.load.request_rate == float("inf"):  # JSON has none
            document["load"]["request_rate"] = None
        return json.dumps(document, indent=2)


def run_load(
    target: Target,
    model: str | None,
    load: Load,
    percentiles: Sequence[float],
    goodput_ms: dict[str, float],
    on_done: Callable[[], object],
) -> Report:
    """Sends it all and waits for the last answer. Raises InvalidArgument without a server."""
    return asyncio.run(_run(target, model, load, percentiles, goodput_ms, on_done))


async def _run(
    target: Target,
    model: str | None,
    load: Load,
    percentiles: Sequence[float],
    goodput_ms: dict[str, float],
    on_done: Callable[[], object],
) -> Report:
    name = await _model_name(target) if model is None else model
    seats = asyncio.Semaphore(load.max_concurrency or load.num_prompts)

    async def one(prompt: list[int]) -> Measured:
        async with seats:
            body: dict[str, object] = {
                "model": name,
                "prompt": prompt,
                "max_tokens": load.output_len,
                "temperature": load.temperature,
            }
            if load.ignore_eos:
                body["ignore_eos"] = True
            measured = await measure(target, body, len(prompt))
            on_done()
            return measured

    begin = time.perf_counter()
    tasks = []
    for prompt, delay_s in zip(load.prompts(), load.delays_s(), strict=True):
        tasks.append(asyncio.create_task(one(prompt)))
        if delay_s > 0:
            await asyncio.sleep(delay_s)
    results = await asyncio.gather(*tasks)
    return report(load, name, results, time.perf_counter() - begin, percentiles, goodput_ms)


async def _model_name(target: Target) -> str:
    listed = await get_json(target, "/v1/models")
    try:
        return str(listed["data"][0]["id"])  # type: ignore[index]
    except (TypeError, KeyError, IndexError):
        raise InvalidArgument("/v1/models lists no model; give --model") from None


def report(
    load: Load,
    model: str,
    results: Sequence[Measured],
    duration_s: float,
    percentiles: Sequence[float],
    goodput_ms: dict[str, float],
) -> Report:
    """The figures of a run."""
    done = [result for result in results if not result.error]
    values_s = {
        "ttfb": [result.ttfb_s for result in done],
        "ttft": [result.ttft_s for result in done],
        "tpot": [result.tpot_s for result in done if result.num_output_tokens > 1],
        "itl": [itl for result in done for itl in result.itls_s],
        "e2el": [result.e2el_s for result in done],
    }
    is_good = [
        all(1e3 * getattr(result, f"{metric}_s") <= limit for metric, limit in goodput_ms.items())
        for result in done
    ]
    num_input = sum(result.num_prompt_tokens for result in done)
    num_output = sum(result.num_output_tokens for result in done)
    return Report(
        load,
        model,
        duration_s,
        len(done),
        len(results) - len(done),
        sorted({result.error for result in results if result.error})[:3],
        num_input,
        num_output,
        len(done) / duration_s,
        num_output / duration_s,
        (num_input + num_output) / duration_s,
        sum(is_good) / duration_s if goodput_ms else None,
        {metric: _summary(values, percentiles) for metric, values in values_s.items()},
    )


def _summary(values_s: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    ordered = sorted(1e3 * value for value in values_s)
    if not ordered:
        return {}
    summary = {"mean": sum(ordered) / len(ordered), "median": percentile(ordered, 50)}
    return summary | {f"p{percent:g}": percentile(ordered, percent) for percent in percentiles}
