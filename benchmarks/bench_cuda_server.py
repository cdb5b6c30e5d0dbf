"""What serving from a GPU costs beside the engine alone: many streams through the server's
application and the same through AsyncLLM, on one engine and in turns, and the host's own time a
step. The clients are another process.

Example:
    python benchmarks/bench_cuda_server.py qwen3-0.6b --json server.json
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path

from bench_cuda_models import SMALL as SMALL_MODEL
from bench_cuda_models import Bench, Sizes, checkpoint_folder
from bench_server import Clock, body, serving, stream_all
from gpu_rows import Limits, Row, measure_device, read_arguments, report
from llmserve import AsyncLLM, RequestOutputKind, SamplingParams
from random_models import SHAPES, write_checkpoint

STREAMS = (64, 256)
SMALL_STREAMS = (2,)
PATH = "/v1/completions"
PROMPT = 64  # tokens
ROUNDS = 3


def server_rows(
    bench: Bench, folder: Path, num_streams: tuple[int, ...], num_tokens: int
) -> Iterator[Row]:
    sizes, vocab = bench.sizes, bench.config["vocab_size"]
    llm = AsyncLLM(
        folder,
        device="cuda",
        max_model_len=sizes.max_model_len,
        max_num_batched_tokens=sizes.max_step_tokens,
        max_num_seqs=max(num_streams),
        enable_prefix_caching=False,
    )
    params = SamplingParams(
        max_tokens=num_tokens,
        ignore_eos=True,
        temperature=0,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    length = min(PROMPT, sizes.max_model_len - num_tokens)
    with serving(llm) as (port, loop_s):
        for streams in num_streams:
            prompts = [
                [3 + (31 * i + k) % (vocab - 3) for k in range(length)] for i in range(streams)
            ]
            bodies = [body(PATH, 0, num_tokens, temperature=0) | {"prompt": p} for p in prompts]

            async def generate(prompt: list[int]) -> None:
                async for _ in llm.generate({"prompt_token_ids": prompt}, params):
                    pass

            async def generate_all(prompts: list[list[int]] = prompts) -> None:
                await asyncio.gather(*map(generate, prompts))

            asyncio.run(generate_all())
            alone, served, loop = [], [], []
            for _ in range(ROUNDS):
                with Clock() as engine:
                    asyncio.run(generate_all())
                alone.append(engine.wall_s)
                clients, begin_s = Clock(), loop_s()
                stream_all(port, PATH, bodies, clients)
                served.append(clients.wall_s)
                loop.append((loop_s() - begin_s) / (streams * num_tokens))
            steps = [s for s in llm.trace() if s.phase == "decode" and s.num_sequences == streams]
            whole, host = bench.step_seconds(steps)
            tokens = streams * num_tokens
            for what, seconds, count in (
                (f"{streams} streams by the engine", statistics.median(alone), tokens),
                (f"{streams} streams by the server", statistics.median(served), tokens),
                (f"the event loop's time a token of {streams} streams", statistics.median(loop), 0),
                (f"a step of {streams} streams", whole, 0),
                (f"the host's own time, a step of {streams} streams", host, 0),
            ):
                yield bench.limits.row(f"{what}, {bench.name}", seconds, 0, 0, count)
    llm.close()


def all_rows(name: str, limits: Limits, is_small: bool) -> Iterator[Row]:
    bench = Bench("tiny" if is_small else name, limits, SMALL_MODEL if is_small else Sizes())
    folder = checkpoint_folder(bench.config)
    try:
        write_checkpoint(folder, bench.name)
        streams = SMALL_STREAMS if is_small else STREAMS
        yield from server_rows(bench, folder, streams, bench.sizes.batch_tokens)
    finally:
        shutil.rmtree(folder)


def main() -> None:
    args = read_arguments(__doc__, "model", SHAPES)
    sizes = SMALL_MODEL if args.small else Sizes()
    device, limits = measure_device(sizes)
    report(device, limits, all_rows(args.model, limits, args.small), args.json)


if __name__ == "__main__":
    main()
