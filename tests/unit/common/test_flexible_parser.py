"""The parser that scripts for vLLM make their command lines with."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from llmserve import InvalidArgument
from llmserve.utils import FlexibleArgumentParser


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = FlexibleArgumentParser()
    parser.add_argument("--max-model-len", type=int, deprecated=False)
    parser.add_argument("--my_name", default="x")
    parser.add_argument("--enforce-eager", action=argparse.BooleanOptionalAction)
    parser.add_argument("--overrides", type=json.loads)
    parser.add_argument("--names", nargs="*")
    return parser


@pytest.mark.parametrize("line", ["--max_model_len 8", "--max-model-len=8", "--max_model_len=8"])
def test_hyphens_and_underscores_are_the_same(parser: argparse.ArgumentParser, line: str) -> None:
    assert parser.parse_args(line.split()).max_model_len == 8
    assert parser.parse_args(["--my-name", "a_b"]).my_name == "a_b"


def test_keys_of_json_are_set_one_by_one(parser: argparse.ArgumentParser) -> None:
    line = ["--overrides.rope.factor", "2.5", "--overrides.a=x", "--overrides.l+", "1"]
    found = parser.parse_args([*line, "--overrides.l+=2", "--max-model-len", "3"])
    assert found.overrides == {"rope": {"factor": 2.5}, "a": "x", "l": [1, 2]}
    assert found.max_model_len == 3


def test_a_file_gives_options_and_the_line_goes_first(
    parser: argparse.ArgumentParser, tmp_path: Path
) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "options.yaml"
    file.write_text(
        "max_model_len: 8\nmy-name: y\nenforce_eager: false\noverrides: {a: 1}\nnames: [a, b]\n"
    )
    found = parser.parse_args(["--config", str(file), "--my-name", "z"])
    assert vars(found) == {
        "max_model_len": 8,
        "my_name": "z",
        "enforce_eager": False,
        "overrides": {"a": 1},
        "names": ["a", "b"],
    }
    with pytest.raises(InvalidArgument, match=r"--config: .*nowhere\.yaml cannot be read"):
        parser.parse_args(["--config=nowhere.yaml"])


def test_an_option_that_there_is_not_is_refused(
    parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args(["--max-modellen", "3"])
    assert "unrecognized arguments: --max-modellen 3" in capsys.readouterr().err
