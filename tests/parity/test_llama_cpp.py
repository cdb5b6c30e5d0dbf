"""The same GGUF file gives the same greedy tokens as llama.cpp.

llama-cpp-python is built from its source, which takes a quarter of an hour, so that the suite
compares with the tokens that a long run left in tests/golden/llama_cpp.json. The long run needs
LLMSERVE_LLAMA_CPP_PYTHON, the interpreter of an environment with llama-cpp-python; with
LLMSERVE_RECORD_GOLDEN=1 it writes the file.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import gguf
import pytest
from checkpoints import checkpoint, tokenizer
from gguf_files import ARCHITECTURES, OVERRIDES, add_bpe, write_gguf
from llmserve import LLM, SamplingParams

GOLDEN = Path(__file__).parents[1] / "golden" / "llama_cpp.json"
RUNNER = Path(__file__).parents[1] / "llama_cpp_runner.py"
PROMPTS = [[5, 9, 200, 31, 7], [1, 2, 3], list(range(40, 100))]
MAX_TOKENS = 24
# What llama.cpp takes for granted: no biases, as many KV heads as heads, a width that it derives.
# It compares groups of experts by two scores, where DeepSeek-V2 does by one, norms latents with the
# epsilon of the other norms, and rounds YaRN's range, which gpt-oss does not.
TAKEN_FOR_GRANTED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "rms_norm_eps": 1e-6,
    },
    "deepseek_v3": {"rms_norm_eps": 1e-6},
    "dots1": {"num_key_value_heads": 4},
    "ernie4_5": {"use_bias": False},
    "ernie4_5_moe": {"intermediate_size": 128},
    "falcon": {"bias": False},
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "olmoe": {"num_key_value_heads": 4},
    "seed_oss": {"attention_out_bias": False},
    "youtu": {"rms_norm_eps": 1e-6},
}
# All that llama.cpp reads as what they are. It routes PhiMoE by a plain softmax.
FAMILIES = {
    family: {**OVERRIDES.get(family, {}), **TAKEN_FOR_GRANTED.get(family, {})}
    for family in ARCHITECTURES
    if family not in ("mistral", "phimoe")
}


def gguf_file(family: str, directory: Path) -> Path:
    """A tiny model in F32, with what llama.cpp insists on."""

    def extra(writer: gguf.GGUFWriter) -> None:
        add_bpe(writer, tokenizer().backend_tokenizer, "gpt-2")

    path = directory / f"{family}.gguf"
    return write_gguf(path, checkpoint(family, **FAMILIES[family]), extra=extra)


def our_tokens(path: Path) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, detokenize=False, ignore_eos=True)
    with LLM(path, num_gpu_blocks_override=128, num_threads=1) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_that_llama_cpp_left(family: str, tmp_path: Path) -> None:
    golden = json.loads(GOLDEN.read_text())["tokens"]
    assert family in golden, (
        f"{GOLDEN.name} has no tokens of {family}: record them with LLMSERVE_RECORD_GOLDEN=1 "
        "(docs/adding-a-model.md)"
    )
    assert our_tokens(gguf_file(family, tmp_path)) == golden[family]


@pytest.mark.long
def test_tokens_are_those_of_llama_cpp(tmp_path: Path) -> None:
    python = os.environ.get("LLMSERVE_LLAMA_CPP_PYTHON")
    if not python:
        pytest.skip("LLMSERVE_LLAMA_CPP_PYTHON names no interpreter with llama-cpp-python")
    paths = {family: gguf_file(family, tmp_path) for family in FAMILIES}
    jobs = [
        {"model": str(path), "prompts": PROMPTS, "max_tokens": MAX_TOKENS}
        for path in paths.values()
    ]
    process = subprocess.run(
        [python, str(RUNNER)], input=json.dumps(jobs), capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    theirs = dict(zip(paths, json.loads(process.stdout), strict=True))
    if os.environ.get("LLMSERVE_RECORD_GOLDEN"):
        version = [python, "-c", "import llama_cpp; print(llama_cpp.__version__)"]
        by = subprocess.run(version, capture_output=True, text=True, check=True).stdout.strip()
        golden = {"llama-cpp-python": by, "tokens": theirs}
        GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
    assert {family: our_tokens(path) for family, path in paths.items()} == theirs
