"""A server whose engine is several replicas."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from llmserve import AsyncLLM, demo_model_path
from serving import RunningServer, http_request, openai_client, running_server

ENGINE = {"num_threads": 2, "kv_cache_memory_bytes": 2**22, "seed": 3}
ADMIN = {"Authorization": "Bearer admin-key"}


@pytest.fixture(scope="module")
def replicas() -> Iterator[RunningServer]:
    llm = AsyncLLM(demo_model_path(), data_parallel_size=2, **ENGINE)
    try:
        with running_server(llm, ["demo"], admin_key="admin-key") as server:
            yield server
    finally:
        llm.close()


def complete(server: RunningServer, prompt: str, **options: Any) -> str:
    client = openai_client(server.port)
    chunks = client.completions.create(
        model="demo", prompt=prompt, max_tokens=24, temperature=0, stream=True, **options
    )
    return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)


def test_streams_of_replicas_are_those_of_one_engine(
    replicas: RunningServer, server: RunningServer
) -> None:
    prompts = [f"Once upon a time, {word}" for word in ("a fox", "a dog", "the sea", "two cats")]
    expected = [complete(server, prompt) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda prompt: complete(replicas, prompt), prompts * 4))
    assert answers == expected * 4
    text = http_request(replicas.port, "GET", "/metrics")[1]
    for replica in "01":
        labels = f'{{model_name="demo",replica="{replica}"}}'
        assert f"llmserve:replica_up{labels} 1.0" in text
        (line,) = [x for x in text.splitlines() if f"replica_routed_total{labels}" in x]
        assert float(line.split()[-1]) > 0
    page = Path(__file__).parents[2] / "docs" / "observability.md"
    names = re.findall(r"`(replica_\w+)`", page.read_text("utf-8"))
    assert len(names) == 8
    assert all(f"llmserve:{name}{{" in text for name in names)


def test_an_answer_of_several_prompts_and_samples_comes_from_all_replicas(
    replicas: RunningServer, server: RunningServer
) -> None:
    body = {"model": "demo", "prompt": ["The fox", "The dog", "A cat"], "n": 2, "seed": 5}
    body |= {"max_tokens": 9}
    answers = [
        http_request(one.port, "POST", "/v1/completions", body) for one in (server, replicas)
    ]
    assert answers[0][0] == answers[1][0] == 200
    texts = [[choice["text"] for choice in answer["choices"]] for _, answer, _ in answers]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 6


def test_health_load_and_block_events_name_the_replica(replicas: RunningServer) -> None:
    status, health, _ = http_request(replicas.port, "GET", "/health")
    assert status == 200
    assert health["status"] == "ok"
    assert [(row["replica"], row["status"]) for row in health["replicas"]] == [(0, "ok"), (1, "ok")]
    _, load, _ = http_request(replicas.port, "GET", "/load")
    assert len(load["models"]["demo"]["replicas"]) == 2

    def events(query: str) -> tuple[int, Any]:
        path = f"/debug/block_events?{query}"
        return http_request(replicas.port, "GET", path, headers=ADMIN)[:2]

    for word in ("one", "two", "three"):
        complete(replicas, f"A story that is long enough to fill a few blocks: {word} " * 4)
    held = []
    for query in ("", "replica=0", "replica=1"):
        status, told = events(query)
        assert status == 200
        hashes = base64.b64decode(told["snapshot"]["hashes"])
        held.append({hashes[i : i + 32] for i in range(0, len(hashes), 32)})
    assert held[0] == held[1] | held[2]
    assert held[1]
    assert held[2]
    assert events("replica=2")[0] == 400
    assert events("replica=x")[0] == 400
    told = http_request(replicas.port, "GET", "/replica", headers=ADMIN)[1]
    assert told["models"][0]["num_replicas"] == 2


def test_the_life_of_a_request_names_its_replica(replicas: RunningServer) -> None:
    body = {"model": "demo", "prompt": "The fox", "max_tokens": 3}
    _, answer, _ = http_request(replicas.port, "POST", "/v1/completions", body)
    path = f"/debug/requests/{answer['id']}"
    status, life, _ = http_request(replicas.port, "GET", path, headers=ADMIN)
    assert status == 200
    assert life["replica"] in (0, 1)
    assert f"replica {life['replica']}, " in life["explanation"][0]
