"""A link that is cut in the midst of a hand-over, between two network namespaces."""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hand_over import counter
from processes import Start
from serving import DEADLINE_S

pytestmark = pytest.mark.long
SPACE = "llmserve-far"
NEAR, FAR = "10.231.77.1", "10.231.77.2"
KEY = ("--hand-over-key", "a key that both of them know")
SMALL = ("--num-threads", "1", "--kv-cache-memory-bytes", "16M")
PROMPT = "The fox ran to the moon, and the moon said to the fox: come in. " * 4
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 24, "seed": 5}


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def far_link() -> Iterator[str]:
    """The near end of a link to a namespace of its own, which takes 50 kB a second."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("needs ip and tc")
    try:
        ip("netns", "add", SPACE)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr!r}")
    try:
        ip("link", "add", "lls-near", "type", "veth", "peer", "name", "lls-far")
        ip("link", "set", "lls-far", "netns", SPACE)
        ip("addr", "add", f"{NEAR}/30", "dev", "lls-near")
        ip("link", "set", "lls-near", "up")
        inside = ("netns", "exec", SPACE)
        ip(*inside, "ip", "addr", "add", f"{FAR}/30", "dev", "lls-far")
        ip(*inside, "ip", "link", "set", "lls-far", "up")
        ip(*inside, "ip", "link", "set", "lo", "up")
        slow = "qdisc add dev lls-far root tbf rate 400kbit burst 4kb latency 2s"
        ip(*inside, "tc", *slow.split())
        yield "lls-near"
    finally:
        ip("netns", "del", SPACE)


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


def test_a_link_that_is_cut_is_noticed_and_costs_no_token(start: Start, far_link: str) -> None:
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
                ip("link", "set", far_link, "down")
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
