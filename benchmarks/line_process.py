"""A process that does work for another one, which asks for it line by line."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any


class LineProcess:
    """Answers every line with one of JSON. Its environment is this process', and `variables`."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        variables: Mapping[str, str],
        *,
        leads_group: bool = False,  # of the processes that it starts
    ) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables},
            start_new_session=leads_group,
        )
        self.pid = self._process.pid

    def ask(self, line: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        """The next one; the first may come unasked, when it is ready."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with status {self._process.wait()}; see above")
        return json.loads(line)

    def close(self) -> None:
        with self._process:  # its pipes
            self._process.kill()
