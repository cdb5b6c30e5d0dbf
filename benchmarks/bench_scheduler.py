"""Microseconds that schedule() and commit() take, without a model.

    python benchmarks/bench_scheduler.py [--num-seqs 256] [--num-steps 400]

Decode: all sequences run one token a step, with events, stop checks and prefix caching; the medians
are over steps in which all of them run. Intake: the first look at a long prompt, which hashes it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics

from llmserve import _core
from llmserve._core import testing

VOCAB_SIZE = 32_000
BLOCK_SIZE = 16
PROMPT_TOKENS = 64


def cache_of(num_blocks: int) -> _core.CacheConfig:
    cache = _core.CacheConfig()
    cache.num_blocks, cache.block_size = num_blocks, BLOCK_SIZE
    return cache


def bench_decode(num_seqs: int, num_steps: int, with_text: bool) -> dict[str, float]:
    rng = random.Random(0)
    blocks_each = -(-(PROMPT_TOKENS + num_steps) // BLOCK_SIZE) + 1
    config = _core.SchedulerConfig()
    config.max_num_seqs = num_seqs
    config.max_num_batched_tokens = num_seqs * PROMPT_TOKENS
    config.max_model_len = PROMPT_TOKENS + num_steps
    vocabulary = _core.Vocabulary([b" tok%d" % i for i in range(VOCAB_SIZE)], [])
    scheduler = _core.Scheduler(
        config, cache_of(num_seqs * blocks_each), vocabulary if with_text else None
    )
    for request_id in range(num_seqs):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(PROMPT_TOKENS)]
        params = {"stop": ["###", "\n\n"]} if with_text else {}
        fields = {"max_tokens": num_steps, "seed": request_id, **params}
        scheduler.add(request_id, prompt, _core.SamplingParams(**fields))
    times = testing.time_steps(scheduler, num_steps, VOCAB_SIZE)[1:]
    full = [t for t in times if t[2] == num_seqs]
    return {
        "schedule_us": statistics.median(t[0] for t in full),
        "commit_us": statistics.median(t[1] for t in full),
        "schedule_us_max": max(t[0] for t in full),
        "commit_us_max": max(t[1] for t in full),
    }


def bench_intake(num_tokens: int) -> dict[str, float]:
    config = _core.SchedulerConfig()
    config.max_num_batched_tokens = num_tokens
    config.max_model_len = num_tokens + 2
    scheduler = _core.Scheduler(config, cache_of(num_tokens // BLOCK_SIZE + 2))
    scheduler.add(0, list(range(num_tokens)), _core.SamplingParams(max_tokens=1))
    ((schedule_us, commit_us, _),) = testing.time_steps(scheduler, 1, VOCAB_SIZE)
    return {"schedule_us": schedule_us, "commit_us": commit_us}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--num-steps", type=int, default=400)
    args = parser.parse_args()
    results = {
        "decode": bench_decode(args.num_seqs, args.num_steps, with_text=False),
        "decode_with_text_and_stops": bench_decode(args.num_seqs, args.num_steps, with_text=True),
        "intake_of_20k_tokens": bench_intake(20_000),
    }
    print(json.dumps({"num_seqs": args.num_seqs, **results}, indent=2))


if __name__ == "__main__":
    main()
