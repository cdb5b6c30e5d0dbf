"""A link that is cut in the midst of a hand-over, between two network namespaces."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from far_link import FAR, SPACE, far_link, ip
from hand_over import counter
from processes import Start
from serving import DEADLINE_S

pytestmark = pytest.mark.long
KEY = ("--hand-over-key", "a key that both of them know")
SMALL = ("--num-threads", "1", "--kv-cache-memory-bytes", "16M")
PROMPT = "The fox ran to the moon, and the moon said to the fox: come in. " * 4
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 24, "seed": 5}


@pytest.fixture
def slow_link() -> Iterator[str]:
    """The near end of a link to a namespace of its own, which takes 50 kB a second."""
    with far_link("400kbit") as link:
        yield link


def post(host: str, path: str, body: object) -> Any:
    connection = http.client.HTTPConnection(host, 8000, timeout=DEADLINE_S)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    said = json.loads(answer.read())
    assert answer.status == 200, said
    return said


def wait_for(host: str) -> None:
    until = time.monotonic() + DEADLINE_S
    while True:
        try:
            http.client.HTTPConnection(host, 8000, timeout=1).connect()
            return
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.1)


def test_a_link_that_is_cut_is_noticed_and_costs_no_token(start: Start, slow_link: str) -> None:
    command = [sys.executable, "-m", "llmserve", "serve", *SMALL, "--role", "prefill", *KEY]
    command += ["--host", FAR, "--hand-over-address", f"{FAR}:0"]
    far = subprocess.Popen(["ip", "netns", "exec", SPACE, *command], stderr=subprocess.DEVNULL)
    try:
        wait_for(FAR)
        decode = start("--role", "decode", *KEY, "--hand-over-timeout", "2")
        expected = decode.request("POST", "/v1/completions", {**BODY, "cache_salt": "other"})[1]
        for is_cut in (False, True):
            salt = {"cache_salt": f"cut {is_cut}"}
            ticket = post(FAR, "/hand_over/tickets", {})["ticket"]
            more = {**BODY, **salt, "hand_over_ticket": ticket}
            post(FAR, "/v1/completions", {**more, "max_tokens": 1})
            got: list[Any] = []
            asking = threading.Thread(
                target=lambda more=more, got=got: got.append(  # type: ignore[misc]
                    decode.request("POST", "/v1/completions", more)[1]
                )
            )
            began = time.monotonic()
            asking.start()
            time.sleep(0.6)
            assert not got  # the blocks are on their way
            if is_cut:
                ip("link", "set", slow_link, "down")
                cut_at = time.monotonic()
            asking.join(DEADLINE_S)
            assert got[0]["choices"] == expected["choices"]
            if is_cut:
                assert time.monotonic() - cut_at < 5
            else:
                assert time.monotonic() - began > 0.6
        metrics = decode.request("GET", "/metrics")[1]
        assert counter(metrics, "llmserve:hand_overs_received_total") == 1
        assert counter(metrics, "llmserve:hand_overs_failed_total", cause="timeout") == 1
    finally:
        far.kill()
        far.wait(DEADLINE_S)
