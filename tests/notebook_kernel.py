"""A Jupyter kernel to run cells in."""

from __future__ import annotations

from typing import Any

DEADLINE_S = 120.0  # tells a hang from an answer; a cell takes milliseconds


class Kernel:
    def __init__(self) -> None:
        from jupyter_client.manager import start_new_kernel

        self.manager, self.client = start_new_kernel(kernel_name="python3")
        self.num_figures = 0  # shown by the cells so far
        self.traceback = ""  # of the last error

    def start(self, code: str) -> None:
        self.client.execute(code)

    def finish(self) -> tuple[str, str]:
        """The running cell's standard output and the name of the exception that ended it."""
        text, error = [], ""
        while True:
            message: dict[str, Any] = self.client.get_iopub_msg(timeout=DEADLINE_S)
            content = message["content"]
            if message["msg_type"] == "stream" and content["name"] == "stdout":
                text.append(content["text"])
            elif message["msg_type"] == "error":
                error = content["ename"]
                self.traceback = "\n".join(content["traceback"])
            elif "image/png" in content.get("data", ()):  # of display_data or execute_result
                self.num_figures += 1
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return "".join(text), error

    def run(self, code: str) -> str:
        self.start(code)
        text, error = self.finish()
        assert error == "", self.traceback
        return text

    def wait_for_output(self, wanted: str) -> None:
        while True:
            message: dict[str, Any] = self.client.get_iopub_msg(timeout=DEADLINE_S)
            if message["msg_type"] == "stream" and wanted in message["content"]["text"]:
                return

    def stop(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
