"""`llmserve generate`: the model and the prompt by place, files, shapes, log-probabilities."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import checkpoints
import pytest
from cli_calls import Run
from llmserve import LLM, SamplingParams, demo_model_path

GREEDY = ("--temperature", "0", "--quiet", "-n", "9")


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> str:
    return str(checkpoint)


@pytest.mark.parametrize(
    "arguments",
    [
        ("MODEL", "hello"),
        ("-m", "MODEL", "hello"),
        ("MODEL", "--prompt", "hello"),
        ("hello", "-p", "hello", "-m", "MODEL"),
        ("MODEL", "--ignore-eos", "hello"),
    ],
)
def test_model_and_prompt_come_by_place_or_by_name(
    arguments: tuple[str, ...], call: Run, model: str
) -> None:
    given = [model if word == "MODEL" else word for word in arguments]
    if given[0] == "hello":
        assert "MODEL is given twice" in call("generate", *given, *GREEDY).stderr
        return
    expected = call("generate", "--model", model, "--ignore-eos", "hello", *GREEDY).stdout
    assert call("generate", *given, "--ignore-eos", *GREEDY).stdout == expected


def test_a_model_alone_reads_the_prompt_from_stdin(
    call: Run, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = call("generate", model, "hello", *GREEDY).stdout
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert call("generate", model, *GREEDY).stdout == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a", "b", "c"), "takes MODEL and PROMPT, got 3 words; quote a prompt of several"),
        (("m", "x", "-m", "n"), "MODEL is given twice, as 'm' and as 'n'"),
        (("-f", "/nowhere", "x"), "--file /nowhere: expected UTF-8 text, got No such file"),
        (("--json-schema", "x", "y"), "--json-schema must be a JSON schema or the file of one"),
        (("--regex", "a", "--choice", "b", "y"), "exactly one"),
        (("--hf-file", "x.gguf", "y"), "--hf-file is of a repository on the Hub"),
    ],
)
def test_what_does_not_go_together_is_said(
    arguments: tuple[str, ...], message: str, call: Run
) -> None:
    done = call("generate", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_files_stand_before_the_prompt(call: Run, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Once upon\n")
    (tmp_path / "b.txt").write_text("a time")
    files = ("-f", str(tmp_path / "a.txt"), "-f", str(tmp_path / "b.txt"))
    done = call("generate", *files, "the fox", "--json", *GREEDY)
    assert json.loads(done.stdout)["prompt"] == "Once upon\n\na time\n\nthe fox"


def test_a_system_message_goes_by_the_chat_template(call: Run) -> None:
    done = call("generate", "--system", "Be kind.", "Tell me a story.", "--json", *GREEDY)
    with LLM(demo_model_path()) as llm:
        messages = [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Tell me a story."},
        ]
        params = SamplingParams(temperature=0.0, max_tokens=9)
        (output,) = llm.chat(messages, params, use_tqdm=False)
    report = json.loads(done.stdout)
    assert report["prompt_token_ids"] == list(output.prompt_token_ids)
    assert report["outputs"][0]["text"] == output.outputs[0].text


def test_without_a_chat_template_a_system_message_is_refused(
    call: Run, model: str, tmp_path: Path
) -> None:
    folder = checkpoints.copy_checkpoint(Path(model), tmp_path / "model")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "tokenizer_config.json").write_text("{}")
    done = call("generate", str(folder), "--chat", "x")
    assert "no chat template; leave --system and --chat out" in done.stderr


def test_the_text_matches_a_schema_a_pattern_a_grammar_or_a_choice(
    call: Run, tmp_path: Path
) -> None:
    schema = '{"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"]}'
    (tmp_path / "schema.json").write_text(schema)
    (tmp_path / "answer.gbnf").write_text('root ::= "yes" | "no"')
    quiet = ("--quiet", "--seed", "1", "-n", "60")
    for given in (schema, str(tmp_path / "schema.json")):
        done = call("generate", "x", "-j", given, *quiet)
        assert json.loads(done.stdout)["n"] == 7
    assert re.fullmatch("[0-9]{3}\n", call("generate", "x", "--regex", "[0-9]{3}", *quiet).stdout)
    chosen = call("generate", "x", "--choice", "red", "--choice", "blue", *quiet).stdout
    assert chosen in ("red\n", "blue\n")
    grammar = call("generate", "x", "--grammar", str(tmp_path / "answer.gbnf"), *quiet).stdout
    assert grammar in ("yes\n", "no\n")


def test_logprobs_are_a_line_a_token(call: Run) -> None:
    done = call("generate", "The fox", "--logprobs", "2", *GREEDY)
    text, *rows = done.stdout.splitlines()
    assert len(rows) == 9
    assert "".join(json.loads(row.split()[1].replace("'", '"')) for row in rows[:1])
    assert all(float(row.split()[0]) <= 0 for row in rows)
    assert text.startswith("o was")


def test_json_has_all_there_is(call: Run) -> None:
    done = call("generate", "The fox", "--json", "--n", "2", "--logprobs", "1", "-n", "4")
    report = json.loads(done.stdout)
    assert [output["index"] for output in report["outputs"]] == [0, 1]
    for output in report["outputs"]:
        for token_id, entries in zip(output["token_ids"], output["logprobs"], strict=True):
            assert token_id in [entry["token_id"] for entry in entries]
