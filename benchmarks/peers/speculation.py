"""What speculation gains beside llama.cpp's: the demo pair, the same GGUF files, prompts, threads.

Each prompt runs in all engines by turns, one sequence at a time, greedy. Times are the engines'
own, from the first token to the last: llama-server's predicted_ms, and those of
RequestOutput.metrics. The engines' texts may differ, since their arithmetic does. `repeats` are
prompts whose beginning comes again, for n-grams.

The demo model's steps take a tenth of a millisecond, which is mostly not arithmetic in llama.cpp.
--intermediate-size N widens its MLPs by zeros, which change no token: the target then takes what a
model of so many weights takes, and the draft stays as it is.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from environments import llama_cpp_build
from llmserve import LLM, SamplingParams, demo_model_path
from llmserve.bench.machine import describe_machine
from llmserve.checkpoint.model_files import demo_draft_path, demo_text_path
from llmserve.quantization import quantize
from page import write_json

OUTPUT_LEN = 128
LLAMA_CONFIGS = {
    "plain": [],
    "draft": ["--spec-type", "draft-simple", "--spec-draft-n-max", "4"],
    "ngram": [
        *("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3"),
        *("--spec-ngram-simple-size-m", "5"),
    ],
}
OWN_CONFIGS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "draft": {"num_speculative_tokens": 4},
    "ngram": {"method": "ngram", "prompt_lookup_min": 3, "prompt_lookup_max": 3},
}
# Seconds, tokens behind the first, guesses that were right.
Run = tuple[float, int, int]


def as_gguf(folder: Path, path: Path) -> Path:
    if not path.exists():
        quantize(folder, path, scheme="gguf:Q8_0", report=False, use_tqdm=False)
    return path


def widened(folder: Path, out: Path, size: int) -> Path:
    """The checkpoint with MLPs of `size` columns; those that were not there are zeros."""
    from safetensors.torch import load_file, save_file
    from torch.nn.functional import pad

    shutil.copytree(folder, out, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    more = size - config["intermediate_size"]
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            tensors[name] = pad(tensor, (0, 0, 0, more))
        elif name.endswith("down_proj.weight"):
            tensors[name] = pad(tensor, (0, more)).contiguous()
    save_file(tensors, out / "model.safetensors")
    config["intermediate_size"] = size
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return out


def make_pair(folder: Path, intermediate_size: int | None) -> tuple[Path, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / "draft"
    if not draft.exists():
        shutil.copytree(demo_draft_path(), draft)
        for path in demo_model_path().glob("tokenizer*"):  # the draft has the target's
            shutil.copy(path, draft)
    target, name = demo_model_path(), "target.gguf"
    if intermediate_size is not None:
        name = f"target-{intermediate_size}.gguf"
        if not (folder / name).exists():
            target = widened(target, folder / "widened", intermediate_size)
    return as_gguf(target, folder / name), as_gguf(draft, folder / "draft.gguf")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


@contextmanager
def llama_server(command: list[str], port: int) -> Iterator[Callable[[str], Run]]:
    url = f"http://127.0.0.1:{port}"

    def run(prompt: str) -> Run:
        body = {"prompt": prompt, "n_predict": OUTPUT_LEN, "temperature": 0}
        answer = ask(f"{url}/completion", {**body, "ignore_eos": True, "cache_prompt": False})
        timings = answer["timings"]
        seconds = timings["predicted_ms"] / 1000
        return seconds, timings["predicted_n"] - 1, timings.get("draft_n_accepted", 0)

    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            deadline = time.monotonic() + 60
            while True:
                try:
                    ask(f"{url}/health")
                    break
                except OSError:
                    if server.poll() is not None or time.monotonic() > deadline:
                        raise RuntimeError(f"it does not start: {' '.join(command)}") from None
                    time.sleep(0.2)
            yield run
        finally:
            server.terminate()


def start_llama(
    stack: ExitStack, options: argparse.Namespace, pair: tuple[Path, Path], name: str
) -> Callable[[str], Run]:
    port, threads = free_port(), str(options.threads)
    command = [str(llama_cpp_build(options.folder) / "llama-server"), "-m", str(pair[0])]
    command += ["--port", str(port), "-t", threads, "-tb", threads, "-np", "1", "-c", "1024"]
    command += ["--no-webui", *LLAMA_CONFIGS[name]]
    if name == "draft":
        command += ["-md", str(pair[1]), "-td", threads]
    return stack.enter_context(llama_server(command, port))


def start_own(
    stack: ExitStack, options: argparse.Namespace, pair: tuple[Path, Path], name: str
) -> Callable[[str], Run]:
    config = OWN_CONFIGS[name]
    if name == "draft":
        config = {**(config or {}), "model": str(pair[1])}
    llm = stack.enter_context(
        LLM(
            str(pair[0]),
            speculative_config=config,
            num_threads=options.threads,
            max_model_len=1024,
            max_num_seqs=1,
            enable_prefix_caching=False,
        )
    )
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True)

    def run(prompt: str) -> Run:
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        metrics = output.metrics
        seconds = metrics.last_token_ts - metrics.first_token_ts
        return seconds, len(output.outputs[0].token_ids) - 1, metrics.num_accepted_tokens

    return run


def measure(options: argparse.Namespace) -> None:
    cases = run_cases(options)
    if options.results is not None:
        command = " ".join(["python", *sys.argv]).replace(str(options.folder), "FOLDER")
        report = {"command": command, "machine": describe_machine(), "cases": cases}
        write_json(options.results, report)


def run_cases(options: argparse.Namespace) -> dict[str, Any]:
    pair = make_pair(options.folder / "speculation", options.intermediate_size)
    text = demo_text_path().read_text(encoding="utf-8")
    documents = [part.strip() for part in text.split("\n\n") if len(part) > 200]
    documents = documents[: options.num_prompts]
    prompts = {
        "held-out text": [document[:120] for document in documents],
        "repeats": [f"{document}\n\n{document[:60]}" for document in documents],
    }
    cases: dict[str, Any] = {}
    with ExitStack() as stack:
        engines = {f"llama.cpp, {k}": start_llama(stack, options, pair, k) for k in LLAMA_CONFIGS}
        engines |= {f"llmserve, {k}": start_own(stack, options, pair, k) for k in OWN_CONFIGS}
        for kind, given in prompts.items():
            paces: dict[str, list[float]] = {name: [] for name in engines}
            accepted = dict.fromkeys(engines, 0)
            for turn in range(options.rounds):
                for prompt in given:
                    for name in list(engines)[:: 1 if turn % 2 == 0 else -1]:
                        seconds, num_tokens, num_right = engines[name](prompt)
                        paces[name].append(num_tokens / seconds)
                        accepted[name] += num_right
            for name, found in paces.items():
                pace = round(statistics.median(found), 1)
                cases[f"{kind}: {name}"] = {"tokens_per_s": pace, "accepted": accepted[name]}
                print(f"{kind}: {name}: {cases[f'{kind}: {name}']}", flush=True)
    return cases
