"""`llmserve embed` and `tokenize`, and commands by the names that other programs have for them."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from cli_calls import Run
from llmserve import LLM, NotSupported, Tokenizer, demo_model_path
from llmserve.cli.peer_commands import ours

TEXTS = ["Once upon a time", "The fox"]


def test_texts_become_their_vectors(
    call: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(demo_model_path()) as llm:
        outputs = llm.embed(TEXTS, use_tqdm=False)
    expected = [pytest.approx(list(o.outputs.embedding), abs=1e-7) for o in outputs]

    def vectors(*arguments: str) -> list[list[float]]:
        done = call("embed", *arguments)
        assert (done.returncode, done.stderr) == (0, "")
        return [json.loads(line) for line in done.stdout.splitlines()]

    assert vectors(*TEXTS) == expected
    file = tmp_path / "lines.txt"
    file.write_text("\n".join(TEXTS))
    assert vectors(str(demo_model_path()), "-f", str(file)) == expected
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(TEXTS)))
    assert vectors("-m", str(demo_model_path())) == expected
    (short,) = vectors("-p", TEXTS[0], "--dimensions", "4")
    assert len(short) == 4
    assert sum(value * value for value in short) == pytest.approx(1.0)


def test_a_text_becomes_its_tokens(call: Run, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(demo_model_path())
    assert tokenizer is not None
    ids = tokenizer.encode(TEXTS[0])
    assert json.loads(call("tokenize", TEXTS[0], "--ids").stdout) == ids
    lines = call("tokenize", str(demo_model_path()), TEXTS[0]).stdout.splitlines()
    assert [int(line.split()[0]) for line in lines] == ids
    assert "".join(line.partition("'")[2][:-1] for line in lines) == TEXTS[0]
    done = call("tokenize", "two", "texts")
    assert done.returncode == 2
    assert "tokenize takes one TEXT, got 2" in done.stderr
    done = call("tokenize", "-f", str(tmp_path / "none"))
    assert (done.returncode, "--file" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("server -m x", "serve -m x"),
        ("complete Hi", "generate Hi"),
        ("collect-env", "doctor"),
        ("ls", "list"),
        ("show x", "inspect x"),
        ("help", "--help"),
        ("version", "--version"),
        ("run x", "chat x"),
        ("run x -q Hi", "generate x -q Hi"),
        ("serve x", "serve x"),
        ("nonsense", "nonsense"),
    ],
)
def test_commands_of_others_are_ours(line: str, expected: str) -> None:
    assert ours(line.split(), ["serve", "chat"]) == expected.split()


def test_commands_that_are_not_here_say_what_to_use(call: Run) -> None:
    with pytest.raises(NotSupported, match="run-batch is not supported: pass all prompts to LLM"):
        ours(["run-batch", "-i", "x"], [])
    done = call("push", "x")
    assert (done.returncode, done.stderr) == (
        2,
        "llmserve: push is not supported: nothing is uploaded\n",
    )
    assert call("version").stdout.startswith("llmserve ")


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("entrypoints.openai.api_server", ["--model", "./no-such-model", "--show-config"]),
        ("entrypoints.cli.main", ["serve", "--model", "./no-such-model", "--show-config"]),
    ],
)
def test_vllms_modules_run_as_commands(module: str, words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"llmserve.{module}", *words], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "no-such-model" in done.stderr
    assert done.stderr.startswith("llmserve: ")
