"""What speculation gains, each figure beside plain steps of the same process.

    python benchmarks/bench_speculation.py demo --results speculation-demo.json
    python benchmarks/bench_speculation.py demo --head build/demo-eagle3
    python benchmarks/bench_speculation.py shape --shape tinyllama-1.1b --dtype bfloat16
    python benchmarks/bench_speculation.py edits

`demo`: the demo model and its draft or a head, and n-grams, on held-out text. `shape`: a published
shape with random weights and a drafter of known accuracy, which has recorded what plain steps gave:
how fast steps of more rows are, and what deciding costs where guessing is hopeless. Rounds run by
turns; a ratio is of medians. `edits`: n-grams where the output is the prompt's text with some words
changed. No small model does that, so that the text is given, and steps take their time without
computing: a tenth of what a bf16 model of 1.1 billion weights takes on two cores.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from core_testing import testing
from llmserve import LLM, SamplingParams, _core, demo_model_path
from llmserve.bench.machine import describe_machine
from llmserve.checkpoint.model_files import demo_draft_path, demo_text_path
from random_models import SHAPES, write_checkpoint

Figures = dict[str, Any]


@contextmanager
def recorded_drafter(**drafter: Any) -> Iterator[None]:
    """LLMs made within it have this drafter in the place of their method's."""
    made = _core.Engine

    def engine(loading: Any, vocabulary: Any = None) -> Any:
        recorder = testing.RecordedDrafter(**drafter)
        return testing.faulty_engine(loading.config, vocabulary=vocabulary, drafter=recorder)

    _core.Engine = engine  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        _core.Engine = made  # type: ignore[misc]


def decode(llm: LLM, prompts: list[Any], params: SamplingParams) -> tuple[float, list[list[int]]]:
    """(seconds from the first token of all to the last, tokens)."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    begin = min(output.metrics.first_token_ts for output in outputs)
    end = max(output.metrics.last_token_ts for output in outputs)
    return end - begin, [output.outputs[0].token_ids for output in outputs]


def acceptance(llm: LLM, before: Any) -> Figures:
    """Of what ran since then."""
    now = llm.get_metrics()
    drafts = now.num_drafts - before.num_drafts
    accepted = now.num_accepted_tokens - before.num_accepted_tokens
    drafted = now.num_draft_tokens - before.num_draft_tokens
    by_place = [
        b - a for a, b in zip(before.num_accepted_per_pos, now.num_accepted_per_pos, strict=True)
    ]
    return {
        "drafts": drafts,
        "accepted_of_drafted": round(accepted / drafted, 3) if drafted else None,
        "tokens_a_draft_step": round(1 + accepted / drafts, 3) if drafts else None,
        "survival": [round(count / drafts, 3) for count in by_place if drafts and count],
    }


def compare(
    plain: LLM, drafted: LLM, prompts: list[Any], params: SamplingParams, rounds: int
) -> Figures:
    """Both by turns; the tokens have to be the same."""
    seconds: dict[str, list[float]] = {"plain": [], "drafted": []}
    num_tokens = 0
    before = drafted.get_metrics()
    last_step = max((step.step_id for step in steps_of(drafted)), default=-1)
    for turn in range(rounds):
        found = {}
        order = [("plain", plain), ("drafted", drafted)]
        for name, llm in order if turn % 2 == 0 else order[::-1]:
            elapsed, found[name] = decode(llm, prompts, params)
            seconds[name].append(elapsed)
        assert found["plain"] == found["drafted"], "speculation changed a token"
        num_tokens = sum(len(tokens) - 1 for tokens in found["plain"])
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        "plain_tokens_per_s": round(num_tokens / medians["plain"], 1),
        "drafted_tokens_per_s": round(num_tokens / medians["drafted"], 1),
        "speedup": round(medians["plain"] / medians["drafted"], 3),
        **by_own_steps(drafted, num_tokens * rounds, last_step),
        **acceptance(drafted, before),
    }


def steps_of(llm: LLM) -> list[Any]:
    assert llm._engine is not None
    return [step for step in llm._engine.trace() if step.phase == "decode"]


def by_own_steps(llm: LLM, num_tokens: int, last_step: int) -> Figures:
    """The speed by that of the engine's own steps without guesses: two engines of the same weights
    differ by some percent, by where these lie in memory."""
    steps = [step for step in steps_of(llm) if step.step_id > last_step]
    plain = [s for s in steps if s.num_tokens == s.num_sequences]
    if len(plain) < 8:
        return {}
    plain_us = statistics.median(s.execute_us / s.num_sequences for s in plain)
    elapsed_us = sum(s.draft_us + s.schedule_us + s.execute_us + s.commit_us for s in steps)
    typical_us = statistics.mean(s.execute_us / s.num_sequences for s in plain)
    return {
        "plain_steps_of_its_own": len(plain),
        "speed_by_own_plain_steps": round(num_tokens * typical_us / elapsed_us, 3),
        "plain_step_us": round(plain_us),
    }


def demo(options: argparse.Namespace) -> Iterator[tuple[str, Figures]]:
    text = demo_text_path().read_text(encoding="utf-8")
    documents = [part.strip() for part in text.split("\n\n") if len(part) > 200]
    common = {"num_threads": options.num_threads, "max_num_seqs": 16}
    model = str(demo_model_path())
    with LLM(model, **common) as plain:
        tokenizer = plain.get_tokenizer()
        prompts = [
            {"prompt_token_ids": tokenizer.encode(document)[:32]}
            for document in documents[: options.num_prompts]
        ]
        edits = [
            {"prompt": f"{document}\n\n{document[:60]}"}
            for document in documents[: options.num_prompts]
        ]
        draft = {"model": options.head or str(demo_draft_path()), "num_speculative_tokens": 4}
        what = "head" if options.head else "draft model"
        drafters = [
            (f"{what}, always 4", {**draft, "adaptive": False}, prompts),
            (f"{what}, decided", draft, prompts),
        ]
        if not options.head:
            drafters += [
                ("ngram on held-out text", {"method": "ngram"}, prompts),
                ("ngram on a text said twice", {"method": "ngram", "prompt_lookup_min": 3}, edits),
            ]
        for name, config, given in drafters:
            with LLM(model, speculative_config=config, **common) as drafted:
                for temperature in (0.0, 0.7, 1.0):
                    params = SamplingParams(
                        temperature=temperature, seed=1, max_tokens=128, ignore_eos=True
                    )
                    alone = [compare(plain, drafted, [one], params, 3) for one in given]
                    yield f"{name}, temperature {temperature}", summed(alone)


def summed(rows: list[Figures]) -> Figures:
    """Of prompts that ran one at a time."""
    drafts = sum(row["drafts"] for row in rows)
    tokens = sum((row["tokens_a_draft_step"] or 0) * row["drafts"] for row in rows)
    # Of few plain steps the mean says little, and a few prompts of all nothing.
    own = [
        row["speed_by_own_plain_steps"]
        for row in rows
        if row.get("plain_steps_of_its_own", 0) >= 128
    ]
    return {
        "prompts": len(rows),
        "speedup": round(statistics.median(row["speedup"] for row in rows), 3),
        **(
            {"speed_by_own_plain_steps": round(statistics.median(own), 3)}
            if 2 * len(own) >= len(rows)
            else {}
        ),
        "plain_tokens_per_s": statistics.median(row["plain_tokens_per_s"] for row in rows),
        "tokens_a_draft_step": round(tokens / drafts, 3) if drafts else None,
        "drafts": drafts,
    }


def shape(options: argparse.Namespace) -> Iterator[tuple[str, Figures]]:
    folder = options.folder / options.shape
    write_checkpoint(folder, options.shape)
    vocab_size = SHAPES[options.shape]["vocab_size"]
    common: dict[str, Any] = {
        "dtype": options.dtype,
        "quantization": options.quantization,
        "num_threads": options.num_threads,
        "max_model_len": 1024,
        "num_gpu_blocks_override": 1024,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "defer_packing": False,
    }
    params = SamplingParams(
        temperature=1.0, seed=1, max_tokens=options.output_len, ignore_eos=True, detokenize=False
    )
    cases = [("accuracy 0.8, always 4", 1, 0.8, False, {})]
    cases += [("accuracy 0.8, decided", 1, 0.8, True, {})]
    cases += [(f"hopeless, {size} sequences", size, 0.0, True, {}) for size in (1, 16)]
    turns = {"change_at": 40, "change_back_at": 120, "later_accuracy": 0.3}
    cases += [("accuracy 0.8, 0.3, 0.8", 1, 0.8, True, turns)]
    chosen = [case for case in cases if options.cases in case[0]]
    with LLM(str(folder), **common) as plain:
        for name, size, accuracy, is_adaptive, drafter in chosen:
            prompts = [
                {"prompt_token_ids": [(7 * i + j) % 30000 % vocab_size for j in range(32)]}
                for i in range(size)
            ]
            decode(plain, prompts, params)
            _, tokens = decode(plain, prompts, params)
            # The drafted engine's requests are numbered from 0, round after round.
            recorded = {
                turn * size + i: tokens[i] for turn in range(options.rounds) for i in range(size)
            }
            settings = {"recorded": recorded, "vocab_size": vocab_size, "accuracy": accuracy}
            with (
                recorded_drafter(**settings, **drafter, token_us=options.draft_us),
                LLM(
                    str(folder),
                    speculative_config={
                        "method": "ngram",
                        "num_speculative_tokens": 4,
                        "adaptive": is_adaptive,
                    },
                    **common,
                ) as drafted,
            ):
                yield name, compare(plain, drafted, prompts, params, options.rounds)


# Of a step and of a row more: 67 and 5.2 ms, by ten.
STEP_US, ROW_US = 6700, 520


def edited(words: list[str], share: float, seed: int) -> str:
    """One word in so many is another one of the text."""
    rng = random.Random(seed)
    return " ".join(rng.choice(words) if rng.random() < share else word for word in words)


def edits(options: argparse.Namespace) -> Iterator[tuple[str, Figures]]:
    text = demo_text_path().read_text(encoding="utf-8")
    documents = [part.split() for part in text.split("\n\n") if len(part) > 400]
    with LLM(str(demo_model_path()), num_threads=1) as llm:
        tokenizer = llm.get_tokenizer()
        assert llm._engine is not None
        vocab_size = llm._engine.vocab_size
    for share in (0.0, 0.05, 0.1, 0.2):
        prompts, recorded = [], {}
        for i, words in enumerate(documents[: options.num_prompts]):
            prompts.append(tokenizer.encode(" ".join(words)))
            recorded[i] = tokenizer.encode(" " + edited(words, share, i))[:200]
        seconds, steps = {}, {}
        for name, config in (
            ("plain", _core.SpeculationConfig()),
            ("ngram", _core.SpeculationConfig(method="ngram", num_speculative_tokens=8, **LOOKUP)),
        ):
            engine = testing.oracle_engine(
                _core.EngineConfig(
                    cache=_core.CacheConfig(num_blocks=400, block_size=16),
                    scheduler=_core.SchedulerConfig(max_model_len=4096, max_num_seqs=1),
                    speculation=config,
                ),
                testing.OracleOptions(
                    vocab_size=vocab_size, step_us=STEP_US, row_us=ROW_US, recorded=recorded
                ),
            )
            params = [
                _core.SamplingParams(detokenize=False, max_tokens=len(recorded[i]), seed=1)
                for i in range(len(prompts))
            ]
            begin = time.perf_counter()
            generated = run_alone(engine, prompts, params)
            seconds[name] = time.perf_counter() - begin
            steps[name] = engine.metrics().num_decode_steps
            engine.close()
            assert generated == list(recorded.values()), "speculation changed a token"
        yield (
            f"ngram, {share:.0%} of the words changed",
            {
                "prompts": len(prompts),
                "tokens": sum(map(len, recorded.values())),
                "tokens_a_step": round(steps["plain"] / steps["ngram"], 3),
                "speedup": round(seconds["plain"] / seconds["ngram"], 3),
            },
        )


LOOKUP = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}


def run_alone(
    engine: _core.Engine, prompts: list[list[int]], params: list[_core.SamplingParams]
) -> list[list[int]]:
    """Tokens of each, one after another."""
    results = []
    for prompt, one in zip(prompts, params, strict=True):
        engine.add_requests([_core.EngineRequest(prompt, one)])
        tokens: list[int] = []
        is_finished = False
        while not is_finished:
            for event in engine.wait_events(1.0):
                tokens += event.token_ids
                is_finished = event.is_request_finished
        results.append(tokens)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["demo", "shape", "edits"])
    parser.add_argument("--head", help="of demo: the folder of a head in the place of the draft")
    parser.add_argument("--shape", default="tinyllama-1.1b", choices=SHAPES)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", default="", help="of shape: those whose name has this")
    parser.add_argument("--draft-us", type=int, default=0, help="what a guess takes")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "shapes")
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    cases: dict[str, Figures] = {}
    begin = time.time()
    measure = {"demo": demo, "shape": shape, "edits": edits}[options.what]
    for name, figures in measure(options):
        cases[name] = figures
        print(f"{name}: {json.dumps(figures)}", flush=True)
    if options.results is None:
        return
    result = {
        "command": " ".join(["python", *sys.argv]),
        "machine": describe_machine(),
        "seconds": round(time.time() - begin),
        "cases": cases,
    }
    options.results.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
