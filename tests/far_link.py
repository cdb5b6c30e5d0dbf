"""A link between this network namespace and one of its own, which tests take down."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

SPACE = "llmserve-far"
NEAR, FAR = "10.231.77.1", "10.231.77.2"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def far_link(rate: str = "") -> Iterator[str]:
    """The near end. rate: of what comes from the far one, as tc has it; none: no bound. Skips the
    test where there are no namespaces to be had."""
    if shutil.which("ip") is None or (rate and shutil.which("tc") is None):
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
        if rate:
            slow = f"qdisc add dev lls-far root tbf rate {rate} burst 4kb latency 2s"
            ip(*inside, "tc", *slow.split())
        yield "lls-near"
    finally:
        ip("netns", "del", SPACE)
