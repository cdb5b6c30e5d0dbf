"""`llmserve top` in a terminal: what a key does."""

from __future__ import annotations

import os
import pty
import sys
import termios
import time

import pytest
from llmserve.cli import doctor

DEADLINE_S = 60.0


@pytest.mark.parametrize("key", ["q", "Q", "\x04"])
def test_q_leaves_at_once_and_the_terminal_is_as_it_was(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    main, side = pty.openpty()
    try:
        with os.fdopen(side) as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            before = termios.tcgetattr(side)
            with doctor._keys() as is_left:
                assert not is_left(0.01)
                os.write(main, f"x{key}".encode())  # other keys do nothing
                begin = time.monotonic()
                assert is_left(DEADLINE_S)
                assert time.monotonic() - begin < DEADLINE_S / 4
            assert termios.tcgetattr(side) == before
    finally:
        os.close(main)


def test_without_a_terminal_there_are_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        with doctor._keys() as is_left:
            assert not is_left(0.001)
