"""`llmserve route` before real servers, of which some die."""

from __future__ import annotations

import http.client
import json
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from llmserve import demo_model_path
from processes import ADMIN, Process, Start, replica_of

SLOW = {"max_tokens": 400, "ignore_eos": True}


def stream(server: Process, into: list[Any], **body: Any) -> None:
    """Reads a stream of completions to its end; `into` has its chunks as they come."""
    body = {"model": "demo", "stream": True, "stream_options": {"include_usage": True}, **body}
    extra = {name: body.pop(name) for name in ("ignore_eos", "top_k") if name in body}
    with server.openai() as client:
        make: Any = client.chat.completions if "messages" in body else client.completions
        for chunk in make.create(extra_body=extra, **body):
            into.append(chunk)


def texts(chunks: list[Any]) -> dict[int, str]:
    found: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            text = choice.text if hasattr(choice, "text") else choice.delta.content
            found[choice.index] = found.get(choice.index, "") + (text or "")
    return found


def holder(router: Process, servers: list[Process]) -> Process:
    """The server that runs something."""
    rows = replica_of(router)
    (busy,) = (one for one in servers if rows[one.url].get("num_requests"))
    return busy


BODIES: dict[str, dict[str, Any]] = {
    "completion": {"prompt": "Once upon a time", "seed": 5, **SLOW},
    "chat": {"messages": [{"role": "user", "content": "Tell me."}], "seed": 6, **SLOW},
    "several": {"prompt": ["The fox", "The moon"], "n": 2, "seed": 7, **SLOW},
}


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)],
    ids=["killed", "stopped"],
)
def test_streams_whose_replica_dies_have_the_same_tokens(
    start: Start, number: signal.Signals
) -> None:
    servers = [start(), start()]
    router = start("--replicas", *(one.url for one in servers), command="route")
    expected: dict[str, list[Any]] = {name: [] for name in BODIES}
    for name, body in BODIES.items():
        stream(servers[0], expected[name], **body)
    # All of them at once on the first server, which dies in their midst.
    first = replica_of(router)
    assert all(row["is_ready"] for row in first.values())
    got: dict[str, list[Any]] = {name: [] for name in BODIES}
    threads = [
        threading.Thread(target=stream, args=(router, got[name]), kwargs=body)
        for name, body in BODIES.items()
    ]
    for thread in threads:
        thread.start()
    router.wait_until(lambda: all(len(chunks) > 1 for chunks in got.values()), "tokens")
    rows = replica_of(router)
    victim = max(servers, key=lambda one: rows[one.url]["num_requests"])
    began = time.monotonic()
    victim.signal(number)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert time.monotonic() - began < 60
    for name, chunks in got.items():
        assert texts(chunks) == texts(expected[name]), (name, router.lines)
        assert chunks[-1].usage.completion_tokens == expected[name][-1].usage.completion_tokens
        assert chunks[-1].usage.prompt_tokens == expected[name][-1].usage.prompt_tokens
        assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
        ends = [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason]
        assert ends == ["length"] * len(texts(chunks))
    _, metrics, _ = router.request("GET", "/metrics")
    replays = re.search(r"^llmserve_route_replays_total (\d+)", metrics, re.MULTILINE)
    assert replays is not None
    assert int(replays[1]) >= 1
    assert "llmserve_route_cut_streams_total 0" in metrics
    assert not replica_of(router)[victim.url]["is_ready"]
    victim.signal(signal.SIGCONT) if number is signal.SIGSTOP else None


def test_replicas_of_two_nodes_that_were_started_as_for_vllm_are_one_address(start: Start) -> None:
    """The lines of docs/ranks.md, on one machine: four replicas, of which two die."""
    shared = ("--data-parallel-size", "4", "--data-parallel-size-local", "2")
    shared += ("--data-parallel-hybrid-lb", "--num-threads", "2")
    second = ("--data-parallel-start-rank", "2", "--data-parallel-address", "127.0.0.1")
    servers = [start(*shared), start(*shared, *second)]
    router = start("--replicas", *(one.url for one in servers), command="route")
    alone = start()
    body = {"prompt": ["The fox", "The moon", "Once", "A"], "seed": 7, **SLOW}
    expected: list[Any] = []
    stream(alone, expected, **body)
    for one in servers:
        loads = one.request("GET", "/health")[1]["replicas"]
        assert [row["replica"] for row in loads] == [0, 1]
    got: list[Any] = []
    thread = threading.Thread(target=stream, args=(router, got), kwargs=body)
    thread.start()
    router.wait_until(lambda: len(got) > 4, "tokens")
    holder(router, servers).kill()
    thread.join(60)
    assert not thread.is_alive()
    assert texts(got) == texts(expected), router.lines


PACE = ("--pace", "default=60")  # so that what dies is in the midst of it
MESSAGES = [{"role": "user", "content": "Tell me a story of a fox and the moon."}]
OPTIONS = {"seed": 7, "num_predict": 60}
# The path, the body, and how an event's text is found.
OTHERS: dict[str, tuple[str, dict[str, Any], Callable[[Any], str]]] = {
    "messages": (
        "/v1/messages",
        {"model": "demo", "messages": MESSAGES, "max_tokens": 60, "seed": 7, "stream": True},
        lambda event: event.get("delta", {}).get("text", ""),
    ),
    "responses": (
        "/v1/responses",
        {"input": "Why?", "max_output_tokens": 60, "seed": 7, "stream": True},
        lambda event: event.get("delta", ""),
    ),
    "llama.cpp": (
        "/completion",
        {"prompt": "Once", "n_predict": 60, "seed": 7, "stream": True, "ignore_eos": True},
        lambda event: event["content"],
    ),
    "ollama chat": (
        "/api/chat",
        {"model": "demo:latest", "messages": MESSAGES, "options": OPTIONS},
        lambda event: event["message"]["content"],
    ),
    "ollama": (
        "/api/generate",
        {"model": "demo", "prompt": "Once", "raw": True, "options": OPTIONS},
        lambda event: event["response"],
    ),
}


def read_events(server: Process, name: str, into: list[Any]) -> None:
    """The events of a stream in another protocol's words, as they come."""
    path, body, _ = OTHERS[name]
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    for line in response:
        if (data := line.strip().removeprefix(b"data: ")).startswith(b"{"):
            into.append(json.loads(data))
    connection.close()


def test_streams_in_other_words_go_on_too(start: Start) -> None:
    servers = [start(*PACE), start(*PACE)]
    router = start("--replicas", *(one.url for one in servers), command="route")
    expected: dict[str, list[Any]] = {name: [] for name in OTHERS}
    got: dict[str, list[Any]] = {name: [] for name in OTHERS}
    threads = [
        threading.Thread(target=read_events, args=(server, name, into[name]))
        for name in OTHERS
        for server, into in ((servers[1], expected), (router, got))
    ]
    for thread in threads:
        thread.start()
    router.wait_until(lambda: all(len(events) > 8 for events in got.values()), "events")
    assert not any(has_ended(events) for events in got.values())
    # Whoever streams from the first one goes on at the second.
    rows = replica_of(router)
    assert rows[servers[0].url]["num_requests"] >= 2
    servers[0].kill()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for name, (_, _, text) in OTHERS.items():
        assert "".join(map(text, got[name])) == "".join(map(text, expected[name])) != "", name
        assert got[name][-1].keys() == expected[name][-1].keys()
    numbers = [event["sequence_number"] for event in got["responses"]]
    assert numbers == [*range(len(numbers))]
    final = got["responses"][-1]["response"]
    assert final["output"][0]["content"][0]["text"] in "".join(
        map(OTHERS["responses"][2], got["responses"])
    )
    assert {e["item_id"] for e in got["responses"] if "item_id" in e} == {final["output"][0]["id"]}
    _, metrics, _ = router.request("GET", "/metrics")
    replays = re.search(r"^llmserve_route_replays_total (\d+)", metrics, re.MULTILINE)
    assert replays is not None
    assert int(replays[1]) >= 2
    assert "llmserve_route_cut_streams_total 0" in metrics
    # What is not streamed is answered there, too; what one server alone knows is refused.
    for path, body, _ in OTHERS.values():
        assert router.request("POST", path, {**body, "stream": False})[0] == 200
    status, answer, _ = router.request(
        "POST", "/v1/responses", {"input": "x", "previous_response_id": "resp_1"}
    )
    assert (status, answer["error"]["param"]) == (400, "previous_response_id")
    assert router.request("GET", "/api/tags")[1]["models"][0]["name"]


def has_ended(events: list[Any]) -> bool:
    """Whether a stream's last event has come."""
    last = events[-1]
    return bool(last.get("done") or last.get("stop") or last.get("type") == "message_stop")


@pytest.mark.long
def test_prefixes_are_found_where_they_are(start: Start) -> None:
    servers = [start(), start()]
    path = str(demo_model_path())
    router = start(
        *("--replicas", *(one.url for one in servers)),
        *("--tokenizer", path, "--replica-admin-key", ADMIN),
        command="route",
    )
    router.wait_until(
        lambda: all(row["tells_blocks"] for row in replica_of(router).values()), "block events"
    )
    client = router.openai()
    users: list[list[Any]] = [
        [{"role": "user", "content": f"Story {i}: " + "the fox ran. " * 12}] for i in range(4)
    ]
    num_prompt = num_cached = 0
    for turn in range(4):
        for messages in users:
            answer = client.chat.completions.create(
                model="demo", messages=messages, max_tokens=24, temperature=0
            )
            assert answer.usage is not None
            if turn:
                num_prompt += answer.usage.prompt_tokens
                assert answer.usage.prompt_tokens_details is not None
                num_cached += answer.usage.prompt_tokens_details.cached_tokens or 0
            messages += [
                {"role": "assistant", "content": answer.choices[0].message.content},
                {"role": "user", "content": "Go on, what came then?"},
            ]
    assert num_cached > 0.7 * num_prompt
    rows = replica_of(router)
    assert all(row["num_routed"] >= 4 for row in rows.values())
    # What the router knows is what the servers hold: one that forgets says so.
    before = rows[servers[0].url]["num_blocks"]
    assert before > 0


@pytest.mark.long
def test_nothing_is_lost_while_servers_are_replaced_one_by_one(start: Start) -> None:
    servers = [start("--drain-timeout", "20"), start("--drain-timeout", "20")]
    router = start("--replicas", *(one.url for one in servers), command="route")
    statuses: list[int] = []
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            body = {"prompt": "The fox", "max_tokens": 16, "temperature": 0}
            status, answer, _ = router.request("POST", "/v1/completions", body)
            statuses.append(status)
            if status == 200:
                words.add(answer["choices"][0]["text"])

    words: set[str] = set()
    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for idx in range(2):
        num = len(statuses)
        router.wait_until(lambda num=num: len(statuses) > num + 5, "answers")  # type: ignore[misc]
        port = servers[idx].port
        assert servers[idx].stop() == 0
        servers[idx] = start(port=port)
        url = servers[idx].url
        router.wait_until(lambda url=url: replica_of(router)[url]["is_ready"], "ready")  # type: ignore[misc]
    is_over.set()
    for thread in threads:
        thread.join(60)
    assert set(statuses) == {200}
    assert len(words) == 1


def test_what_a_replica_refuses_is_refused_and_keys_are_its_own(start: Start) -> None:
    server = start("--api-key", "theirs", "--key-requests-per-minute", "3")
    router = start(
        *("--replicas", server.url, "--api-key", "ours", "--replica-key", "theirs"),
        command="route",
    )
    body = {"prompt": "The fox", "max_tokens": 2}
    ours = {"Authorization": "Bearer ours"}
    assert router.request("POST", "/v1/completions", body)[0] == 401
    wrong = {"Authorization": "Bearer theirs"}
    assert router.request("POST", "/v1/completions", body, wrong)[0] == 401
    status, answer, headers = router.request("POST", "/v1/completions", body, ours)
    assert status == 200
    assert answer["object"] == "text_completion"
    assert answer["id"].endswith(headers["x-request-id"])
    status, answer, _ = router.request("POST", "/v1/completions", {"prompt": 7}, ours)
    assert status == 400
    assert router.request("GET", "/v1/models", headers=ours)[1]["data"][0]["id"] == "demo"
    answers = [router.request("POST", "/v1/completions", body, ours) for _ in range(4)]
    assert answers[-1][0] == 429
    assert int(answers[-1][2]["retry-after"]) >= 1
    assert router.request("GET", "/nowhere", headers=ours)[0] == 404
    assert router.request("GET", "/health")[0] == 200
    assert router.request("POST", "/v1/completions", {"prompt": "x" * 2**23}, ours)[0] == 413
    server.kill()
    status, answer, _ = router.request("POST", "/v1/completions", body, ours)
    assert status == 503
    assert answer["error"]["code"] == "no_replica"
    assert router.request("GET", "/ready", headers=ours)[0] == 503
    assert router.stop() == 0


@pytest.mark.long
def test_a_stream_does_not_go_on_at_another_class(start: Start) -> None:
    servers = [start(), start("--dtype", "float32")]
    router = start("--replicas", *(one.url for one in servers), command="route")
    classes = {row["numerics_class"] for row in replica_of(router).values()}
    assert len(classes) == 2
    chunks: list[Any] = []
    errors: list[Exception] = []

    def read() -> None:
        try:
            stream(router, chunks, **BODIES["completion"])
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    router.wait_until(lambda: len(chunks) > 1, "tokens")
    holder(router, servers).kill()
    thread.join(60)
    (error,) = errors
    assert "no other one can go on" in str(error)
