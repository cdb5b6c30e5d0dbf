"""What is parsed in Python takes anything: a few hundred cases a target here, as many as are wanted
by hand (`python -m fuzz.guided`)."""

from __future__ import annotations

import dataclasses

import pytest
from fuzz.guided import fuzz
from fuzz.guided_targets import TARGETS, Target

CASES = 400


@pytest.mark.parametrize("name", TARGETS)
def test_whatever_comes_is_taken_or_refused(name: str) -> None:
    figures = fuzz(TARGETS[name], CASES, seconds=60.0)
    assert figures.findings == []
    assert figures.num_cases > CASES
    assert figures.num_kept > 1


def test_what_is_found_is_told_and_inputs_that_lead_further_are_kept() -> None:
    def run(data: bytes) -> None:
        depth = 0
        if data[:1] == b"a":
            depth += 1
            if data[1:2] == b"b":
                depth += 1
                if data[2:3] == b"c":
                    raise KeyError("found")

    target = Target("abc", run, ("fuzz/test_guided",), [b"xyz"], [b"a", b"b", b"c"])
    figures = fuzz(target, 20_000, seconds=60.0)
    assert "abc b'abc" in figures.findings[0]
    assert "KeyError: 'found'" in figures.findings[0]
    blind = dataclasses.replace(target, modules=("no/such",), words=[b"q"])
    assert fuzz(blind, 100, seconds=60.0).num_kept == 0
