"""A server that has nothing to do sleeps: what it waits for wakes it, and no clock does."""

from __future__ import annotations

import asyncio
import email.utils
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from llmserve import AsyncLLM, _core_testing
from llmserve.server.running.alarms import Alarms
from serving import RunningServer, events, running_server

MakeOracle = Callable[..., AsyncLLM]

COMPLETIONS = "/v1/completions"
# How long nothing happens. Who looked at clocks twenty times a second would wake 30 times.
QUIET_S = 1.5
MAX_WAKE_UPS = 5

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="wake-ups are counted by Linux")


def loop_wake_ups(server: RunningServer, seconds: float) -> int:
    """How often the loop's thread has gone to sleep in a while: once for each time it woke."""
    (loop,) = (t for t in threading.enumerate() if t.name == f"server-{server.port}")

    def num_sleeps() -> int:
        status = Path(f"/proc/self/task/{loop.native_id}/status").read_text()
        (line,) = (x for x in status.splitlines() if x.startswith("voluntary_ctxt_switches"))
        return int(line.split()[1])

    before = num_sleeps()
    time.sleep(seconds)
    return num_sleeps() - before


def sleeps(server: RunningServer) -> bool:
    """Whether it comes to rest: what it had to do before may take a slow machine a while."""
    return any(loop_wake_ups(server, QUIET_S) <= MAX_WAKE_UPS for _ in range(5))


def test_an_idle_server_sleeps(demo: AsyncLLM) -> None:
    with running_server(demo) as server:
        assert server.post(COMPLETIONS, prompt=[5], max_tokens=4)[0] == 200
        assert sleeps(server)


def test_streams_that_wait_for_a_token_let_the_server_sleep(make_oracle: MakeOracle) -> None:
    gate = _core_testing.StepGate(2)
    with running_server(make_oracle(gate=gate)) as server:
        body = {"prompt": [5], "max_tokens": 6, "ignore_eos": True}
        streams = [events(server.open_stream(COMPLETIONS, stream=True, **body)) for _ in range(4)]
        next(streams[0])
        gate.wait_until_held()
        assert sleeps(server)
        gate.open()
        for stream in streams:
            assert list(stream)[-1] == "data: [DONE]"


def test_a_token_wakes_the_loop_once(make_oracle: MakeOracle) -> None:
    num_tokens = 40
    with running_server(make_oracle(20_000)) as server:
        body = {"prompt": [5], "max_tokens": num_tokens + 100, "ignore_eos": True}
        sock = server.open_stream(COMPLETIONS, stream=True, **body)
        next(events(sock))
        before = server.llm.get_metrics().num_generation_tokens
        num_wake_ups = loop_wake_ups(server, num_tokens * 0.02)
        num_came = server.llm.get_metrics().num_generation_tokens - before
        # The interpreter's lock, which this thread's may hold, is waited for once in a while.
        assert num_wake_ups <= 2 * num_came + MAX_WAKE_UPS
        sock.close()


def test_answers_are_dated(server: RunningServer) -> None:
    sent = email.utils.parsedate_to_datetime(server.request("GET", "/health")[2]["date"])
    assert abs(sent.timestamp() - time.time()) < 30


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_an_alarm_for_a_time_that_is_over_rings_at_once(loop: str) -> None:
    """A loaded machine may take longer to make a request ready than the request may take."""
    factory = (
        asyncio.new_event_loop
        if loop == "asyncio"
        else pytest.importorskip("uvloop").new_event_loop
    )
    rung: list[str] = []

    async def main() -> None:
        alarms = Alarms()
        now = asyncio.get_running_loop().time()
        alarms.set(lambda: rung.append("late"), now - 1.0)
        alarms.set(lambda: rung.append("later"), now + 0.01)
        await asyncio.sleep(0.1)

    running = factory()
    running.run_until_complete(main())
    running.close()
    assert rung == ["late", "later"]


def test_alarms_ring_in_order_and_none_that_was_dropped() -> None:
    rung: list[str] = []

    async def main() -> None:
        alarms = Alarms()
        begin = asyncio.get_running_loop().time()
        done = asyncio.Event()

        def first() -> None:
            rung.append("first")
            alarms.drop(dropped)
            alarms.set(again, begin + 0.06)

        def again() -> None:
            rung.append("again")
            alarms.set(last, begin + 0.07)

        def last() -> None:
            rung.append("last")
            done.set()

        def dropped() -> None:
            rung.append("dropped")

        alarms.set(dropped, begin + 0.03)
        alarms.set(first, begin + 10)
        alarms.set(first, begin + 0.03)
        alarms.set(first, begin + 0.02)
        assert first in alarms
        await asyncio.wait_for(done.wait(), 60)
        assert first not in alarms
        alarms.set(dropped, begin)
        alarms.clear()
        await asyncio.sleep(0.02)

    asyncio.run(main())
    assert rung == ["first", "again", "last"]
