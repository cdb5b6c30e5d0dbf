"""The nano-vllm workload, prompts and decoding by vLLM and SGLang on the GPU, and by llmserve in
the same run: in environments of their own, made without a network of a folder of wheels each:

    LLMSERVE_PEER_WHEELS/vllm, LLMSERVE_PEER_WHEELS/sglang

filled beforehand by `pip download -d FOLDER/vllm vllm`. Without the variable nothing is run.

Example:
    LLMSERVE_PEER_WHEELS=peers python benchmarks/bench_cuda_peers.py qwen3-0.6b --json peers.json
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench_cuda_models import SMALL, Bench, Sizes, checkpoint_folder
from gpu_rows import Row, measure_device, read_arguments, report
from peers.workloads import Workload
from random_models import SHAPES, write_checkpoint

WORKER = Path(__file__).with_name("peers") / "gpu_worker.py"
PEERS = ("vllm", "sglang")
ENVIRONMENTS = Path("build/gpu-peers")


def environment(peer: str) -> Path | None:
    """Its Python; None, and why on the standard output, where there are no wheels of it."""
    wheels = Path(os.environ.get("LLMSERVE_PEER_WHEELS", "")) / peer
    if "LLMSERVE_PEER_WHEELS" not in os.environ or not wheels.is_dir():
        print(f"LLMSERVE_PEER_WHEELS has no folder {peer}: it is not run")
        return None
    folder = (ENVIRONMENTS / peer).absolute()
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        install = ["-m", "pip", "install", "--quiet", "--no-index", "--find-links", str(wheels)]
        subprocess.run([str(python), *install, peer], check=True)
        (folder / "ready").touch()
    return python


def seconds_by(python: Path, system: str, checkpoint: Path, bench: Bench) -> dict[str, float]:
    """Of each of the worker's measurements; raises CalledProcessError if it fails."""
    prompt, count = bench.sizes.decode
    asked = {
        "system": system,
        "checkpoint": str(checkpoint),
        "vocab_size": bench.config["vocab_size"],
        "max_model_len": bench.sizes.max_model_len,
        "max_num_seqs": bench.sizes.nano[0],
        "decode": [prompt, count],
        "prefills": list(bench.sizes.prefills),
        "prompts": bench.nano_prompts,
        "max_tokens": list(bench.nano.max_tokens),
    }
    paths = os.environ.get("PYTHONPATH", "") if system == "llmserve" else ""
    result = subprocess.run(
        [str(python), str(WORKER)],
        input=json.dumps(asked),
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    times: dict[str, float] = json.loads(lines[-1])  # engines write lines of their own
    return times


def system_rows(bench: Bench, python: Path, system: str, checkpoint: Path) -> Iterator[Row]:
    works: dict[str, Workload] = {"decode batch 1": bench.decode_work(), "nano-vllm": bench.nano}
    for length in bench.sizes.prefills:
        works[f"prefill {length}"] = Workload("prefill", (length,), (1,))
    try:
        times = seconds_by(python, system, checkpoint, bench)
    except subprocess.CalledProcessError as error:
        print(f"{system} failed with {error.returncode}")
        return
    for what, seconds in times.items():
        yield bench.row(f"{system}: {what}", seconds, works[what])


def all_rows(bench: Bench) -> Iterator[Row]:
    pythons: dict[str, Any] = {peer: environment(peer) for peer in PEERS}
    folder = checkpoint_folder(bench.config)
    try:
        write_checkpoint(folder, bench.name)
        for system, python in {**pythons, "llmserve": Path(sys.executable)}.items():
            if python is not None:
                yield from system_rows(bench, python, system, folder)
    finally:
        shutil.rmtree(folder)


def main() -> None:
    args = read_arguments(__doc__, "model", SHAPES)
    sizes = SMALL if args.small else Sizes()
    device, limits = measure_device(sizes)
    bench = Bench("tiny" if args.small else args.model, limits, sizes)
    report(device, limits, all_rows(bench), args.json)


if __name__ == "__main__":
    main()
