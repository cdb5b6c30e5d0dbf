"""The tool that compares outputs before and after a change finds what is not the same."""

from __future__ import annotations

import json
from pathlib import Path

import outputs
import pytest

FEW = "sampling/n*/float32"  # greedy, with seeds, several samples


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("golden") / "outputs.json"
    assert outputs.main(["record", str(path), "--only", FEW]) == 0
    return path


def test_outputs_recorded_twice_are_the_same(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs.main(["record", str(tmp_path / "again.json"), "--only", FEW])
    assert (tmp_path / "again.json").read_text() == recorded.read_text()
    assert len(json.loads(recorded.read_text())["cases"]) > 2
    assert outputs.main(["compare", str(recorded)]) == 0
    assert "all recorded cases are the same" in capsys.readouterr().out


def test_one_bit_of_a_logprob_is_found_where_it_is(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = json.loads(recorded.read_text())
    name = "sampling/n greedy/float32"
    row = file["cases"][name]["values"][1]["outputs"][0]["logprobs"][5]
    token_id = next(iter(row))
    row[token_id][0] *= 1 + 2**-50
    file["cases"][name]["sha256"] = outputs.digest_of(file["cases"][name]["values"])
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(file))
    assert outputs.main(["compare", str(path)]) == 1
    place = f"{name}[1]['outputs'][0]['logprobs'][5]['{token_id}'][0]: {row[token_id][0]} before"
    assert f"1 cases differ; the first: {place}" in capsys.readouterr().out


def test_a_file_of_another_instruction_set_is_not_compared(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = json.loads(recorded.read_text())
    file["head"]["isa"] = "cpu/other"
    path = tmp_path / "other.json"
    path.write_text(json.dumps(file))
    assert outputs.main(["compare", str(path)]) == 1
    assert "recorded on cpu/other" in capsys.readouterr().out


def test_values_that_only_json_tells_apart_are_found() -> None:
    assert outputs.first_difference([{"a": 0.0}], [{"a": 0.0}]) is None
    assert outputs.first_difference([{"a": 0.0}], [{"a": -0.0}]) == "[0]['a']: 0.0 before, -0.0 now"
    assert outputs.first_difference({"a": [1]}, {"a": [1, 2]}) == "['a']: [1] before, [1, 2] now"
    assert outputs.first_difference({"a": 1}, {"b": 1}) == ': {"a": 1} before, {"b": 1} now'
