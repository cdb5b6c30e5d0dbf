"""llmserve on a Ray cluster of this machine: replicas that die, prefixes, updates, batches."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llmserve import LLM, SamplingParams
from ray_calls import (
    DEADLINE_S,
    ENGINE,
    MODEL,
    PATIENCE,
    answers,
    config,
    counter,
    replica_processes,
    request,
    stream,
    text_of,
)

pytest.importorskip("ray", reason="Ray is not installed: pip install 'llmserve[ray]'")
pytest.importorskip("psutil")

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Of an application that runs."""
    os.environ.update(PATIENCE)
    import ray
    from llmserve.ray import build_app
    from ray import serve

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        number = sock.getsockname()[1]
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 * 2**20)
    serve.start(http_options={"host": "127.0.0.1", "port": number})
    serve.run(build_app(config()), name="demo")
    yield number
    serve.shutdown()
    ray.shutdown()


def test_prefixes_are_found_as_often_as_by_one_engine_with_all_the_cache(port: int) -> None:
    def talk(ask: Any) -> tuple[int, int]:
        users = [
            [{"role": "user", "content": f"{i} " + "tell me of the fox. " * 8}] for i in range(6)
        ]
        num_prompt = num_cached = 0
        for _ in range(4):
            for messages in users:
                prompt, cached, content = ask(messages)
                num_prompt, num_cached = num_prompt + prompt, num_cached + cached
                messages += [
                    {"role": "assistant", "content": content},
                    {"role": "user", "content": "And then?"},
                ]
        return num_prompt, num_cached

    def over_http(messages: Any) -> tuple[int, int, str]:
        body = {"messages": messages, "max_tokens": 12, "temperature": 0}
        status, answer = request(port, "/v1/chat/completions", body)
        assert status == 200
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return usage["prompt_tokens"], cached, answer["choices"][0]["message"]["content"]

    with LLM(MODEL, **{**ENGINE, "kv_cache_memory_bytes": 2**25}) as llm:
        params = SamplingParams(max_tokens=12, temperature=0)

        def by_one(messages: Any) -> tuple[int, int, str]:
            (output,) = llm.chat(messages, params, use_tqdm=False)
            return len(output.prompt_token_ids), output.num_cached_tokens, output.outputs[0].text

        of_one, hits_of_one = talk(by_one)
    before = answers(port)
    of_all, hits = talk(over_http)
    # Each of the two, which are new, had its share.
    shares = answers(port) - before
    assert len(shares) == 2
    assert "" not in shares
    assert min(shares.values()) >= 4
    assert of_all == of_one
    assert hits >= 0.9 * hits_of_one > 0


def test_a_replica_that_is_killed_loses_no_stream_and_changes_no_token(port: int) -> None:
    bodies = [
        {"prompt": f"Story {i}: once upon a time", "max_tokens": 300, "seed": i, "ignore_eos": True}
        for i in range(8)
    ]
    with LLM(MODEL, **ENGINE) as llm:
        own = llm.get_default_sampling_params()  # what a request leaves out
        params = [replace(own, max_tokens=300, seed=i, ignore_eos=True) for i in range(8)]
        outputs = llm.generate([body["prompt"] for body in bodies], params, use_tqdm=False)
        expected = [output.outputs[0].text for output in outputs]
    before = counter(port, "replays")
    chunks: list[list[Any]] = [[] for _ in bodies]
    threads = [
        threading.Thread(target=stream, args=(port, into, body))
        for into, body in zip(chunks, bodies, strict=True)
    ]
    for thread in threads:
        thread.start()
    until = time.monotonic() + DEADLINE_S
    while not all(chunks):
        assert time.monotonic() < until
        time.sleep(0.01)
    processes = replica_processes()
    assert len(processes) == 2
    processes[0].send_signal(signal.SIGKILL)
    for thread in threads:
        thread.join(DEADLINE_S)
    assert [text_of(into) for into in chunks] == expected
    assert all(into[-1] is None for into in chunks)
    assert counter(port, "replays") > before
    assert counter(port, "cut_streams") == 0


def test_an_update_replaces_replicas_without_an_error(port: int) -> None:
    from llmserve.ray import build_app
    from ray import serve

    statuses: list[int] = []
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            body = {"prompt": "The fox", "max_tokens": 24, "temperature": 0}
            statuses.append(request(port, "/v1/completions", body)[0])

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    before = {one.pid for one in replica_processes()}
    engine = {**ENGINE, "kv_cache_memory_bytes": 2**23}
    serve.run(build_app(config(engine=engine)), name="demo")
    is_over.set()
    for thread in threads:
        thread.join(DEADLINE_S)
    after = {one.pid for one in replica_processes()}
    assert not before & after
    assert len(statuses) > 10
    assert set(statuses) == {200}


def test_a_batch_that_was_cut_computes_what_is_missing(port: int, tmp_path: Path) -> None:
    import pyarrow.parquet
    import ray
    from llmserve.ray import batch

    rows = [{"id": i, "prompt": f"Story {i}:"} for i in range(40)]
    sampling = {"max_tokens": 8, "temperature": 0}
    engine = {**ENGINE, "kv_cache_memory_bytes": 2**22}
    with LLM(MODEL, **engine) as llm:
        outputs = llm.generate(
            [r["prompt"] for r in rows], SamplingParams(**sampling), use_tqdm=False
        )
        expected = [output.outputs[0].text for output in outputs]

    def run(some: list[dict[str, Any]], folder: str) -> None:
        prompts = tmp_path / f"prompts-{folder}"
        prompts.mkdir()
        for first in range(0, len(some), 8):
            ids, texts = zip(
                *((r["id"], r["prompt"]) for r in some[first : first + 8]), strict=True
            )
            table = pyarrow.table({"id": ids, "prompt": texts})
            pyarrow.parquet.write_table(table, prompts / f"{first}.parquet")
        made = batch(
            ray.data.read_parquet(str(prompts)),
            MODEL,
            engine=engine,
            sampling=sampling,
            batch_size=8,
            checkpoint=str(tmp_path / "checkpoint"),
            num_cpus=0.2,
        )
        made.write_parquet(str(tmp_path / folder))

    run(rows[:16], "first")  # as far as a run that was cut has come
    run(rows, "second")
    first = ray.data.read_parquet(str(tmp_path / "first")).take_all()
    second = ray.data.read_parquet(str(tmp_path / "second")).take_all()
    assert sorted(row["id"] for row in first) == list(range(16))
    assert sorted(row["id"] for row in second) == list(range(16, 40))
    assert [r["text"] for r in sorted([*first, *second], key=lambda r: r["id"])] == expected
