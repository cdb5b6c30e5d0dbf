"""Prefill and decode apart, as processes: of whatever dies, a client sees no more than a pause."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hand_over import counter
from processes import Process, Start, replica_of

KEY = ("--hand-over-key", "a key that all of them know")
PREFILL = ("--role", "prefill", *KEY)
DECODE = ("--role", "decode", *KEY)
PROMPT = "The fox ran to the moon, and the moon said to the fox: come in. " * 4
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 24, "seed": 5, "logprobs": 1}),
    ("/v1/completions", {"prompt": "Once, " + PROMPT, "max_tokens": 9, "temperature": 0}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": PROMPT}],
            "max_completion_tokens": 16,
            "seed": 6,
            "top_logprobs": 1,
            "logprobs": True,
        },
    ),
    (
        "/v1/messages",
        {
            "model": "demo",
            "messages": [{"role": "user", "content": "Now, " + PROMPT}],
            "max_tokens": 16,
            "seed": 7,
        },
    ),
]


def route(start: Start, *servers: Process) -> Process:
    urls = [one.url for one in servers]
    return start("--replicas", *urls, "--hand-over-min-tokens", "16", command="route")


def answer(server: Process, path: str, body: dict[str, Any]) -> Any:
    status, said, _ = server.request("POST", path, body)
    assert status == 200, said
    if "content" in said:
        return said["content"], said["stop_reason"]
    return [{**choice, "index": 0} for choice in said["choices"]]


def streamed(server: Process, **more: Any) -> str:
    with server.openai() as client:
        chunks = client.completions.create(
            model="demo", prompt=PROMPT, stream=True, seed=5, **{"max_tokens": 24, **more}
        )
        return "".join(chunk.choices[0].text for chunk in chunks)


def metrics(server: Process) -> str:
    return str(server.request("GET", "/metrics")[1])


def received(server: Process) -> int:
    return counter(metrics(server), "llmserve:hand_overs_received_total")


def failed(server: Process, **labels: str) -> int:
    return counter(metrics(server), "llmserve:hand_overs_failed_total", **labels)


def handed_over(router: Process) -> tuple[int, int]:
    said = metrics(router)
    names = ("handed_over", "not_handed_over")
    done, not_done = (counter(said, f"llmserve_route_{name}_total") for name in names)
    return done, not_done


def ticket_for(server: Process, path: str, body: dict[str, Any]) -> str:
    """Of a prompt that the server has computed."""
    status, drawn, _ = server.request("POST", "/hand_over/tickets")
    assert status == 200
    asked = {**body, "max_tokens": 1, "hand_over_ticket": drawn["ticket"]}
    assert server.request("POST", path, asked)[0] == 200
    return str(drawn["ticket"])


def test_a_router_sends_prompts_to_one_server_and_answers_come_from_another(start: Start) -> None:
    prefill, decode = start(*PREFILL), start(*DECODE)
    router = route(start, prefill, decode)
    alone = start()
    rows = replica_of(router)
    assert (rows[prefill.url]["role"], rows[decode.url]["role"]) == ("prefill", "decode")
    for path, body in BODIES:
        assert answer(router, path, body) == answer(alone, path, body)
    assert streamed(router) == streamed(alone)
    # The stream's prompt was there already.
    assert handed_over(router) == (len(BODIES), 0)
    assert received(decode) == len(BODIES)
    assert failed(decode) == 0
    name = "llmserve:prefill_tokens_total"
    assert counter(metrics(decode), name) < 0.2 * counter(metrics(prefill), name)
    # What is no single sequence, or too short to pay, the decode server does by itself.
    for more in ({"n": 2}, {"prompt": "Hi"}, {"echo": True}):
        path, body = BODIES[0]
        assert answer(router, path, {**body, **more})
    assert handed_over(router) == (len(BODIES), 0)
    # Without the other, either does all of it.
    prefill.kill()
    path, body = BODIES[0]
    assert answer(router, path, {**body, "cache_salt": "new"}) == answer(alone, path, body)
    assert handed_over(router)[0] == len(BODIES)


def sockets_of(server: Process) -> set[str]:
    """Where it listens: addresses of the network, and "unix" for one of this machine."""
    inodes = set()
    for fd in Path(f"/proc/{server.process.pid}/fd").iterdir():
        with suppress(OSError):
            inodes.add(os.readlink(fd).removeprefix("socket:[").rstrip("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:  # listening
                found.add(fields[1].rpartition(":")[0])
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[6] in inodes and fields[3] == "00010000":  # accepts connections
            assert fields[7].startswith("@llmserve-kv-")  # which has no file
            found.add("unix")
    return found


def test_only_the_sockets_that_are_configured_are_open(start: Start) -> None:
    loopback = "0100007F"
    assert sockets_of(start()) == {loopback}
    assert sockets_of(start(*DECODE)) == {loopback}
    prefill = start(*PREFILL, "--hand-over-address", "127.0.0.2:0")
    assert sockets_of(prefill) == {loopback, "0200007F", "unix"}


def test_a_sender_killed_in_the_midst_of_a_hand_over_costs_no_token(start: Start) -> None:
    prefill, decode = start(*PREFILL), start(*DECODE, "--hand-over-timeout", "30")
    path, body = BODIES[0]
    expected = answer(prefill, path, {**body, "cache_salt": "other"})
    ticket = ticket_for(prefill, path, body)
    prefill.signal(signal.SIGSTOP)  # it has taken the connection, and says nothing
    got: list[Any] = []
    asked = {**body, "hand_over_ticket": ticket}
    waiting = threading.Thread(target=lambda: got.append(answer(decode, path, asked)))
    waiting.start()
    running = "llmserve:num_requests_running"
    decode.wait_until(lambda: counter(metrics(decode), running) == 1, "the request")
    assert failed(decode) == 0
    prefill.kill()
    waiting.join(20)
    assert got == [expected]
    assert failed(decode) == 1
    assert received(decode) == 0


@pytest.mark.long
def test_a_silent_sender_is_given_up(start: Start) -> None:
    prefill, decode = start(*PREFILL), start(*DECODE, "--hand-over-timeout", "0.5")
    path, body = BODIES[0]
    expected = answer(decode, path, {**body, "cache_salt": "other"})
    ticket = ticket_for(prefill, path, body)
    prefill.signal(signal.SIGSTOP)
    assert answer(decode, path, {**body, "hand_over_ticket": ticket}) == expected
    prefill.signal(signal.SIGCONT)
    assert failed(decode, cause="timeout") == 1
    # And is there again for the next.
    ticket = ticket_for(prefill, path, {**body, "cache_salt": "x"})
    more = {"cache_salt": "x", "hand_over_ticket": ticket}
    assert answer(decode, path, {**body, **more}) == expected
    assert received(decode) == 1


@pytest.mark.long
def test_a_decoder_that_dies_and_comes_back(start: Start) -> None:
    prefill = start(*PREFILL)
    decoders = [start(*DECODE), start(*DECODE)]
    router = route(start, prefill, *decoders)
    expected = streamed(prefill, max_tokens=300, extra_body={"ignore_eos": True})
    got: list[str] = []
    more = {"max_tokens": 300, "extra_body": {"ignore_eos": True}}
    asking = threading.Thread(target=lambda: got.append(streamed(router, **more)))
    asking.start()
    busy: list[Process] = []

    def is_generating() -> bool:
        busy[:] = [
            one for one in decoders if counter(metrics(one), "llmserve:generation_tokens_total") > 5
        ]
        return bool(busy)

    router.wait_until(is_generating, "tokens")
    port = busy[0].port
    busy[0].kill()
    asking.join(60)
    assert got == [expected]
    back = start(*DECODE, port=port)
    router.wait_until(lambda: replica_of(router)[back.url]["is_ready"], "the decoder")
    for i in range(4):
        answer(router, "/v1/completions", {"prompt": f"{i} {PROMPT}", "max_tokens": 2})
    router.wait_until(lambda: received(back) > 0, "a hand-over")
    assert handed_over(router)[1] == 0


def test_servers_that_do_not_fit_each_other_hand_nothing_over(start: Start) -> None:
    prefill = start(*PREFILL)
    path, body = BODIES[0]
    other_key = start("--role", "decode", "--hand-over-key", "quite another key than theirs")
    router = route(start, prefill, other_key)
    expected = answer(prefill, path, {**body, "cache_salt": "other"})
    assert answer(router, path, body) == expected
    assert handed_over(router) == (1, 1)
    other_class = start(*DECODE, "--dtype", "float32")
    router = route(start, prefill, other_class)
    assert answer(router, path, body)
    assert handed_over(router) == (0, 0)
    drawn = prefill.request("POST", "/hand_over/tickets")[1]["ticket"]
    status, said, _ = other_class.request("POST", path, {**body, "hand_over_ticket": drawn})
    assert status == 400
    assert "numerics class" in said["error"]["message"]
    status, said, _ = other_class.request("POST", "/hand_over/tickets")
    assert (status, said["error"]["code"]) == (400, "no_hand_over")
