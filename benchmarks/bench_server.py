"""What serving costs beside the engine alone: the processor time of a streamed token, and the same
work through `llmserve serve`'s application and through AsyncLLM, on one engine and in turns.

The clients are another process, whose time is not counted; it takes its share of the machine.

Example:
    pytest benchmarks/bench_server.py --model ./TinyLlama-1.1B --results server.json
"""

import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
from bare_send import bare_send_us
from core_testing import testing
from llmserve import AsyncLLM, RequestOutputKind, SamplingParams, _core
from llmserve.checkpoint.model_files import demo_model_path
from llmserve.server.app import create_app
from llmserve.server.main import Server, listen
from llmserve.server.models import ServedModel
from llmserve.server.settings import ServerSettings

# argv: port, path, and a JSON list of bodies, each a stream. Prints how many events came.
CLIENT = """
import json, socket, sys, threading
print("ready", flush=True)
port, path, bodies = int(sys.argv[1]), sys.argv[2], json.load(sys.stdin)
counts = []
def read(body):
    data = json.dumps(body).encode()
    sock = socket.create_connection(("127.0.0.1", port))
    head = f"POST {path} HTTP/1.1\\r\\nHost: x\\r\\nContent-Type: application/json\\r\\n"
    sock.sendall(f"{head}Content-Length: {len(data)}\\r\\n\\r\\n".encode() + data)
    count, rest = 0, b""
    while b"data: [DONE]" not in rest:
        piece = sock.recv(65536)
        assert piece, rest
        count += (rest[-6:] + piece).count(b"data: {")
        rest = rest[-20:] + piece
    counts.append(count)
threads = [threading.Thread(target=read, args=(body,)) for body in bodies]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(counts) == len(bodies)
print(sum(counts))
"""


@contextmanager
def serving(llm):
    """The port of a server in a thread, and how to ask for that thread's processor time, in
    seconds."""
    settings = ServerSettings(port=0, request_timeout=0.0)
    sockets = listen(settings)
    server = Server(create_app([ServedModel(["model"], llm)], settings), settings)
    thread = threading.Thread(target=server.run, args=(sockets,), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server has not started"
        time.sleep(0.01)
    try:
        clock = time.pthread_getcpuclockid(thread.ident)
        yield sockets[0].getsockname()[1], partial(time.clock_gettime, clock)
    finally:
        server.should_exit = True
        thread.join()


def stream_all(port, path, bodies, clock=None):
    """How many events came. clock: runs once the clients are there."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", CLIENT, str(port), path]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as clients:
        assert clients.stdout.readline() == "ready\n"
        with clock or nullcontext():
            out, _ = clients.communicate(json.dumps(bodies))
    assert clients.returncode == 0
    return int(out)


class Clock:
    """Time, and this process' processor time, of a block."""

    def __enter__(self):
        self.wall_s, self.cpu_s = -time.perf_counter(), -time.process_time()
        return self

    def __exit__(self, *_):
        self.wall_s += time.perf_counter()
        self.cpu_s += time.process_time()


def body(path, idx, num_tokens, **more):
    given = {"max_tokens": num_tokens, "ignore_eos": True, "stream": True, "seed": idx, **more}
    if path.endswith("chat/completions"):
        return {"messages": [{"role": "user", "content": f"Story {idx}"}], **given}
    return {"prompt": [5, 6, 7 + idx], **given}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("num_streams", [1, 32])
def test_streamed_token(path, num_streams, board, repeats, monkeypatch):
    """On an engine without a model, whose steps take 5 ms and no processor time."""

    def engine(loading, vocabulary=None):
        options = testing.OracleOptions(vocab_size=len(vocabulary or ()), step_us=5000)
        return testing.oracle_engine(loading.config, options, vocabulary)

    monkeypatch.setattr(_core, "Engine", engine)
    num_tokens = 400
    llm = AsyncLLM(demo_model_path(), num_threads=1, kv_cache_memory_bytes=2**26)
    costs, num_events = [], 0
    with serving(llm) as (port, _):
        bodies = [body(path, idx, num_tokens) for idx in range(num_streams)]
        stream_all(port, path, bodies)
        for _ in range(repeats):
            clock = Clock()
            num_events += stream_all(port, path, bodies, clock)
            costs.append(clock.cpu_s * 1e6 / (num_streams * num_tokens))
    llm.close()
    num_all = num_streams * num_tokens * repeats
    assert num_events > num_all / 2
    figures = {"cpu_us_a_token": statistics.median(costs), "tokens_an_event": num_all / num_events}
    board.add(f"stream of {num_streams} x {num_tokens} from {path}", figures, {"runs_us": costs})


@pytest.mark.parametrize("num_tokens", [32, 128])
@pytest.mark.parametrize("num_streams", [1, 8, 32])
def test_server_beside_engine(num_streams, num_tokens, request, board, repeats, threads):
    """The same prompts streamed over HTTP, and generated by the engine with nobody looking; the
    event loop's processor time a request, and a line's of the engine's thread beside a send's by a
    program that does nothing else."""
    path = "/v1/completions"
    model = request.config.getoption("--model") or str(demo_model_path())
    llm = AsyncLLM(model, num_threads=threads, enable_prefix_caching=False)
    prompts = [[3 + (idx * 31 + i) % 250 for i in range(64)] for idx in range(num_streams)]
    params = SamplingParams(
        max_tokens=num_tokens,
        ignore_eos=True,
        temperature=0,
        detokenize=llm.has_tokenizer,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )

    async def generate(prompt):
        async for output in llm.generate({"prompt_token_ids": prompt}, params):
            assert len(output.outputs[0].token_ids) == num_tokens

    async def generate_all():
        await asyncio.gather(*map(generate, prompts))

    more = {"temperature": 0}
    bodies = [body(path, 0, num_tokens, **more) | {"prompt": prompt} for prompt in prompts]
    asyncio.run(generate_all())
    wall, cpu, loop, rates = [], [], [], []
    lines = llm.get_metrics()
    with serving(llm) as (port, loop_s):
        for _ in range(repeats):
            with Clock() as alone:
                asyncio.run(generate_all())
            served = Clock()
            loop_began_s = loop_s()
            stream_all(port, path, bodies, served)
            loop.append((loop_s() - loop_began_s) * 1e6 / num_streams)
            wall.append(served.wall_s / alone.wall_s - 1)
            cpu.append(served.cpu_s / alone.cpu_s - 1)
            rates.append(num_streams * num_tokens / served.wall_s)
    line_us = llm.get_metrics().line_us - lines.line_us
    num_lines = llm.get_metrics().num_lines - lines.num_lines
    llm.close()
    num_tokens_served = repeats * num_streams * num_tokens
    figures = {
        "tokens_per_s": statistics.median(rates),
        "share_more_time": statistics.median(wall),
        "share_more_cpu": statistics.median(cpu),
        "loop_us_a_request": statistics.median(loop),
        "us_a_line": line_us / num_lines,
        "us_a_bare_send": bare_send_us(num_streams, threads),
        "us_a_token": statistics.median(loop) / num_tokens + line_us / num_tokens_served,
    }
    name = f"serve {num_streams} x (64 + {num_tokens})"
    board.add(name, figures, {"wall": wall, "cpu": cpu, "loop": loop})
