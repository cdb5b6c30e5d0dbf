"""The benchmarks: how long a start, a batch and a crowd take, each beside its bound."""

import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmserve import _core
from llmserve._version import __version__
from llmserve.bench.machine import MachineProbe, Rates, describe_machine
from llmserve.checkpoint.model_files import find_checkpoint
from llmserve.errors import InvalidArgument
from llmserve.llm import LLM
from llmserve.plan.experts import active_experts, load_balance
from llmserve.plan.memory_plan import MemoryPlan
from llmserve.prompts import TokensPrompt
from llmserve.sampling_params import SamplingParams

_IMPORT = "import time; start = time.perf_counter(); import llmserve; "
_IMPORT += "print(time.perf_counter() - start)"


@dataclass(frozen=True, slots=True)
class Workload:
    """`num_prompts` prompts of random tokens, all alike in length, from a fixed seed."""

    num_prompts: int
    input_len: int
    output_len: int
    seed: int = 0

    def prompts(self, vocab_size: int) -> list[TokensPrompt]:
        """Their token ids; no two share a prefix but by chance."""
        draw = random.Random(self.seed)
        return [
            {"prompt_token_ids": [draw.randrange(vocab_size) for _ in range(self.input_len)]}
            for _ in range(self.num_prompts)
        ]


@dataclass(frozen=True, slots=True)
class Result:
    """Figures by name, in the units that the names end in, and what they were measured on."""

    benchmark: str
    command: str
    settings: Mapping[str, object]
    machine: Mapping[str, object]
    form: str  # of the weights that multiply, by the arithmetic that it takes
    rates: Rates
    runs_s: tuple[float, ...]
    figures: Mapping[str, float]

    def to_json(self) -> str:
        """Everything, as JSON."""
        return json.dumps({"llmserve": __version__, **asdict(self)}, indent=2)

    def lines(self) -> Iterator[str]:
        """The figures, for people."""
        for name, value in self.figures.items():
            yield f"{name:<24} {value:,.4g}"
        yield f"machine                  {self.rates.text([self.form])}, measured in the same run"


def run_latency(
    model: str,
    workload: Workload,
    num_iters: int,
    num_iters_warmup: int,
    arguments: Mapping[str, Any],
    show: Callable[[range, str], Iterator[int]],
) -> Result:
    """Seconds until one batch is done, and a token's share of them; repeated."""
    with _Bench("latency", model, workload, arguments) as bench:
        for _ in show(range(num_iters_warmup), "warming up"):
            bench.run_once(is_counted=False)
        for _ in show(range(num_iters), "measuring"):
            bench.run_once(is_counted=True)
        times = sorted(bench.runs_s)
        figures = {
            "mean_latency_s": statistics.mean(times),
            **{f"p{q}_latency_s": percentile(times, q) for q in (10, 50, 90, 99)},
            "output_tokens_per_s": bench.num_output_tokens / statistics.median(times),
        }
        return bench.result(figures)


def run_throughput(
    model: str,
    workload: Workload,
    num_iters: int,
    arguments: Mapping[str, Any],
    show: Callable[[range, str], Iterator[int]],
) -> Result:
    """Requests and tokens a second of a crowd that is all there at the start."""
    with _Bench("throughput", model, workload, arguments) as bench:
        for _ in show(range(num_iters), "measuring"):
            bench.run_once(is_counted=True)
        elapsed_s = statistics.median(bench.runs_s)
        num_input_tokens = workload.num_prompts * workload.input_len
        figures = {
            "elapsed_s": elapsed_s,
            "requests_per_s": workload.num_prompts / elapsed_s,
            "total_tokens_per_s": (num_input_tokens + bench.num_output_tokens) / elapsed_s,
            "output_tokens_per_s": bench.num_output_tokens / elapsed_s,
        }
        return bench.result(figures)


def run_startup(
    model: str,
    num_iters: int,
    arguments: Mapping[str, Any],
    show: Callable[[range, str], Iterator[int]],
) -> Result:
    """Seconds to import, to load and to the first token, beside reading the weights once; and of
    the load, how many went to reading the weights and how many to packing and rounding them."""
    imports, loads, reads, packs, firsts = [], [], [], [], []
    plan = LLM.plan(model, **arguments)
    form = _form_of(plan)
    probe = MachineProbe(plan.num_threads, [form])
    for _ in show(range(num_iters), "starting"):
        imports.append(_import_s())
        start = time.perf_counter()
        with LLM(model, **arguments) as llm:
            loads.append(time.perf_counter() - start)
            metrics = llm.get_metrics()
            reads.append(metrics.weight_read_us / 1e6)
            packs.append(metrics.weight_pack_us / 1e6)
            prompt: TokensPrompt = {"prompt_token_ids": [1]}
            llm.generate(prompt, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
            firsts.append(time.perf_counter() - start)
        probe.measure()
    rates = probe.rates()
    figures = {
        "import_s": statistics.median(imports),
        "load_s": statistics.median(loads),
        "weight_read_s": statistics.median(reads),
        "weight_pack_s": statistics.median(packs),
        "first_token_s": statistics.median(firsts),
        "bound_s": rates.bound_s(plan.weight_bytes, 0, form),
    }
    return Result(
        "startup",
        " ".join(sys.argv),
        {"model": model, **arguments},
        describe_machine(),
        form,
        rates,
        tuple(firsts),
        figures,
    )


class _Bench:
    """An LLM, the prompts and the times that they took."""

    def __init__(
        self, name: str, model: str, workload: Workload, arguments: Mapping[str, Any]
    ) -> None:
        length = workload.input_len + workload.output_len
        self._plan: MemoryPlan = LLM.plan(model, **arguments)
        if length > self._plan.max_model_len:
            raise InvalidArgument(
                f"--input-len and --output-len are {length} together, and max_model_len is "
                f"{self._plan.max_model_len}"
            )
        # The second run of the same prompts must not find them cached.
        self._llm = LLM(model, **{"enable_prefix_caching": False, **arguments})
        self._name = name
        self._settings = {"model": model, **asdict(workload), **arguments}
        self._workload = workload
        self._prompts = workload.prompts(
            _core.Checkpoint(str(find_checkpoint(model))).read_vocab_size()
        )
        self._form = _form_of(self._plan)
        # What is read is as the plan has it; what is multiplied is as many weights in any format.
        self._dense = LLM.plan(model, **{**arguments, "quantization": "none"})
        self._probe = MachineProbe(self._plan.num_threads, [self._form])
        self._num_steps = 0
        self.num_output_tokens = workload.num_prompts * workload.output_len
        self.runs_s: list[float] = []

    def __enter__(self) -> "_Bench":
        return self

    def __exit__(self, *exception: object) -> None:
        self._llm.close()

    def run_once(self, is_counted: bool) -> None:
        """All prompts, to their full length, greedily."""
        params = SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            max_tokens=self._workload.output_len,
            detokenize=False,
        )
        before = self._llm.get_metrics()
        start = time.perf_counter()
        self._llm.generate(self._prompts, params, use_tqdm=False)
        elapsed_s = time.perf_counter() - start
        after = self._llm.get_metrics()
        if is_counted:
            self.runs_s.append(elapsed_s)
            self._num_steps = (after.num_prefill_steps - before.num_prefill_steps) + (
                after.num_decode_steps - before.num_decode_steps
            )
        self._probe.measure()

    def result(self, figures: Mapping[str, float]) -> Result:
        """The figures with the bound and the share of it that was reached."""
        rates = self._probe.rates()
        bound_s = self._bound_s(rates)
        share = bound_s / statistics.median(self.runs_s)
        return Result(
            self._name,
            " ".join(sys.argv),
            self._settings,
            describe_machine(),
            self._form,
            rates,
            tuple(self.runs_s),
            {**figures, "bound_s": bound_s, "share_of_bound": share, **self._balance()},
        )

    def _balance(self) -> dict[str, float]:
        """How unevenly experts were used, and ranks that they are balanced among, where that was
        counted: the rows of the busiest over the mean, of all layers and of the worst."""
        figures = {}
        for name, loads in (
            ("expert_balance", self._llm.expert_loads()),
            ("rank_balance", self._llm.expert_rank_rows()),
        ):
            if balances := [load_balance(rows) for rows in loads.values()]:
                figures[name] = statistics.mean(balances)
                figures[name + "_worst"] = max(balances)
        return figures

    def _bound_s(self, rates: Rates) -> float:
        """Reading the weights once a step and each sequence's KV cache once a token, and two
        operations a parameter and token; attention's own arithmetic is left out. Of experts those
        that tokens are given, drawn evenly."""
        work, plan = self._workload, self._plan
        num_tokens = work.num_prompts * (work.input_len + work.output_len - 1)
        read_share = multiplied_share = 1.0
        if plan.num_experts:
            multiplied_share = plan.experts_per_token / plan.num_experts
            step_tokens = max(1, round(num_tokens / max(1, self._num_steps)))
            active = active_experts(plan.num_experts, plan.experts_per_token, step_tokens)
            read_share = active / plan.num_experts
        read = sum(
            g.num_bytes * (read_share if g.name == "experts" else 1.0)
            for g in plan.weights
            if g.name != "embedding"
        )
        size = 2 if self._dense.dtype == "bfloat16" else 4
        weights = {g.name: g.num_bytes / size for g in self._dense.weights}
        weights["experts"] = weights.get("experts", 0.0) * multiplied_share
        head = weights["lm_head"]
        body = sum(weights.values()) - weights["embedding"] - head
        kv_tokens = work.output_len * (work.input_len + work.output_len / 2)
        num_bytes = self._num_steps * read + (
            work.num_prompts * kv_tokens * self._plan.kv_bytes_per_token
        )
        num_ops = 2 * (body * num_tokens + head * self.num_output_tokens)
        return rates.bound_s(num_bytes, num_ops, self._form)


def _form_of(plan: MemoryPlan) -> str:
    """Integers that there are take most of the arithmetic."""
    return "int8" if plan.integers else plan.dtype


def _import_s() -> float:
    """Seconds of `import llmserve` in a fresh interpreter, by its own clock."""
    package = str(Path(__file__).resolve().parents[2])
    code = f"import sys; sys.path.insert(0, {package!r}); {_IMPORT}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of sorted values, by linear interpolation."""
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
