"""Servers and routers as processes, which end with their test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from processes import Process, Start, start_server
from serving import DEADLINE_S


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a server, or whatever command is given."""
    made: list[Process] = []

    def run(*arguments: str, port: int = 0, command: str = "serve") -> Process:
        one = (
            start_server(*arguments, port=port)
            if command == "serve"
            else Process(command, *arguments, port=port)
        )
        made.append(one)
        return one

    yield run
    for one in made:
        one.process.kill()
        one.process.wait(DEADLINE_S)
