"""Every pre-tokenizer that a GGUF file can name cuts words as llama.cpp's own cutter does.

That one walks over code points by hand, or by std::regex over classes of them, and shares nothing
with ours but the name. The suite compares with digests of the ids that a long run left in
tests/golden/llama_cpp_words.json: see test_llama_cpp.py.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import subprocess
from pathlib import Path

import gguf
import pytest
import tokenizers
from gguf_files import add_bpe
from llmserve.tokenization.pre_tokenizers import PRE_TOKENIZERS
from llmserve.tokenization.tokenizer import Tokenizer
from tokenizer_files import byte_level, sentence_piece

GOLDEN = Path(__file__).parents[1] / "golden" / "llama_cpp_words.json"
RUNNER = Path(__file__).parents[1] / "llama_cpp_runner.py"
NUM_TEXTS = 200
_PIECES = [
    *"abcQZ \n\r\t'.,!?-_<>/()1234½ⅷ①éßǅ日本한กあア中🙂\u00a0\u3000\u0301",
    *("'s", "'LL", "hello", "World", "2024", "   ", "\r\n", "été", "日本語", "a1b2", "x.y"),
]


@functools.cache
def texts() -> list[str]:
    rng = random.Random(3)
    return ["".join(rng.choices(_PIECES, k=rng.randint(1, 30))) for _ in range(NUM_TEXTS)]


@functools.cache
def source(is_byte_level: bool) -> tokenizers.Tokenizer:
    return byte_level(700) if is_byte_level else sentence_piece()


def vocabulary_file(name: str, directory: Path) -> Path:
    """A file of nothing but a vocabulary."""
    path = directory / f"{name}.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    add_bpe(writer, source(PRE_TOKENIZERS[name].is_byte_level), name)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def our_ids(path: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_path(path)
    assert tokenizer is not None
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts()]


def digest(ids: list[list[int]]) -> str:
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_ids_are_those_that_llama_cpp_left(name: str, tmp_path: Path) -> None:
    golden = json.loads(GOLDEN.read_text())
    assert digest(our_ids(vocabulary_file(name, tmp_path))) == golden["digests"][name]


@pytest.mark.long
def test_ids_are_those_of_llama_cpp(tmp_path: Path) -> None:
    python = os.environ.get("LLMSERVE_LLAMA_CPP_PYTHON")
    if not python:
        pytest.skip("LLMSERVE_LLAMA_CPP_PYTHON names no interpreter with llama-cpp-python")
    paths = {name: vocabulary_file(name, tmp_path) for name in sorted(PRE_TOKENIZERS)}
    jobs = [{"model": str(path), "texts": texts()} for path in paths.values()]
    process = subprocess.run(
        [python, str(RUNNER)], input=json.dumps(jobs), capture_output=True, text=True, check=True
    )
    theirs = dict(zip(paths, json.loads(process.stdout), strict=True))
    if os.environ.get("LLMSERVE_RECORD_GOLDEN"):
        version = [python, "-c", "import llama_cpp; print(llama_cpp.__version__)"]
        by = subprocess.run(version, capture_output=True, text=True, check=True).stdout.strip()
        digests = {name: digest(ids) for name, ids in theirs.items()}
        golden = {"llama-cpp-python": by, "digests": digests}
        GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
    for name, path in paths.items():
        for text, ours, expected in zip(texts(), our_ids(path), theirs[name], strict=True):
            assert ours == expected, (name, text)
