"""The command in this process."""

from __future__ import annotations

import pytest
from cli_calls import Done, Run
from llmserve import cli


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Run:
    """The command in this process, which saves the start of another."""

    def call(*arguments: str) -> Done:
        try:
            exit_code = cli.main(arguments)
        except SystemExit as end:  # argparse's own
            exit_code = int(end.code or 0)
        captured = capsys.readouterr()
        return Done(exit_code, captured.out, captured.err)

    return call
