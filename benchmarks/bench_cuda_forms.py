"""Times a model on the GPU by the form of its weights and of its cache, and what edits of logits
add to its steps, each beside the same model in bf16:

    floats     bf16, E4M3 with scales of rows and of blocks, a cache in E4M3, penalties, grammars
    integers   own integers, blocks of GGUF files (with the gguf package)

Example:
    python benchmarks/bench_cuda_forms.py floats --json forms.json
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench_cuda_models import SMALL, Bench, Runner, Sizes, checkpoint_folder
from gpu_rows import Row, measure_device, read_arguments, report
from llmserve import LLM, SamplingParams, StructuredOutputsParams
from random_models import write_checkpoint, write_gguf

MODEL = "llama-3.1-8b"
PARTS = ("floats", "integers")
# Sequences whose steps are timed with edits.
EDITED = 16
EDITS: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.5},
    "a grammar": {"structured_outputs": StructuredOutputsParams(regex="[a-z ]*")},
}
# Fewer than in the comparison of models, so that several forms fit a stage.
SIZES = replace(Sizes(), prefills=(2048,), batch_tokens=64)


def options(bench: Bench, **more: Any) -> dict[str, Any]:
    sizes = bench.sizes
    return {
        "device": "cuda",
        "max_model_len": sizes.max_model_len,
        "max_num_batched_tokens": sizes.max_step_tokens,
        "max_num_seqs": sizes.batch,
        **more,
    }


def form_rows(bench: Bench, path: Path, label: str, form: str, **more: Any) -> Iterator[Row]:
    """form: whose bytes and rates the bound is of."""
    with LLM(path, **options(bench, **more)) as llm:
        yield from bench.short_rows(llm, f"{label}: ", form)


def edit_rows(bench: Bench, path: Path) -> Iterator[Row]:
    """Medians of steps that edit the logits of each of their rows, the host's part beside."""
    count = min(EDITED, bench.sizes.batch)
    length = bench.sizes.decode[0]
    with LLM(path, **options(bench)) as llm:
        runner = Runner(llm, bench.config["vocab_size"])
        begin_us = 0
        for name, edits in EDITS.items():
            prompts = runner.prompts([length] * count)
            params = SamplingParams(
                temperature=1.0, max_tokens=bench.sizes.batch_tokens, ignore_eos=True, **edits
            )
            llm.generate(prompts, params, use_tqdm=False)
            decoding = [s for s in llm.trace() if s.phase == "decode" and s.start_us > begin_us]
            whole, host = bench.step_seconds([s for s in decoding if s.num_sequences == count])
            begin_us = decoding[-1].start_us
            what = f"a step of {count} with {name}"
            yield bench.limits.row(f"{what}, {bench.name}", whole, 0)
            yield bench.limits.row(f"the host's own time, {what}, {bench.name}", host, 0)


def float_rows(bench: Bench, folder: Path) -> Iterator[Row]:
    write_checkpoint(folder / "bf16", bench.name)
    yield from form_rows(bench, folder / "bf16", "bf16", "bfloat16")
    yield from form_rows(bench, folder / "bf16", "fp8 cache", "bfloat16", kv_cache_dtype="fp8")
    yield from edit_rows(bench, folder / "bf16")
    shutil.rmtree(folder / "bf16")
    for scales in ("rows", "blocks"):
        write_checkpoint(folder / scales, bench.name, fp8=scales)
        yield from form_rows(bench, folder / scales, f"fp8 {scales}", "int8")
        shutil.rmtree(folder / scales)


def integer_rows(bench: Bench, folder: Path) -> Iterator[Row]:
    write_checkpoint(folder / "bf16", bench.name)
    for form in ("int8", "int4"):
        yield from form_rows(bench, folder / "bf16", form, form, quantization=form)
    try:
        import gguf  # noqa: F401
    except ImportError:
        print("gguf is not installed: no blocks of GGUF files")
        return
    # Rows of Q4_K are whole blocks of 256, which those of the smallest model are not.
    kinds = (
        {"Q8_0": "int8"} if bench.config["hidden_size"] % 256 else {"Q8_0": "int8", "Q4_K": "int4"}
    )
    for kind, form in kinds.items():
        path = folder / f"{kind}.gguf"
        write_gguf(folder / "bf16", path, kind)
        yield from form_rows(bench, path, kind, form)
        path.unlink()


def all_rows(bench: Bench, part: str) -> Iterator[Row]:
    folder = checkpoint_folder(bench.config)
    try:
        yield from (float_rows if part == "floats" else integer_rows)(bench, folder)
    finally:
        shutil.rmtree(folder)


def main() -> None:
    args = read_arguments(__doc__, "part", PARTS)
    sizes = SMALL if args.small else SIZES
    device, limits = measure_device(sizes)
    bench = Bench("tiny" if args.small else MODEL, limits, sizes)
    report(device, limits, all_rows(bench, args.part), args.json)


if __name__ == "__main__":
    main()
