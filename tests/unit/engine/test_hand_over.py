"""A prompt that one engine computes and another one goes on with: the same tokens, bit for bit, and
if anything fails on the way, too."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from hand_over import (
    DEADLINE_S,
    KEY,
    ONE,
    PROMPT,
    SAMPLED,
    check_idle,
    failures,
    hand_over,
    hand_over_at_once,
    make_llm,
    open_both,
    run,
    wait_until,
    words,
)
from llmserve import LLM
from llmserve.errors import InvalidArgument


@pytest.fixture
def made() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("transport", ["local", "shm", "tcp", "tcp6"])
def test_tokens_are_those_of_one_engine_and_nothing_is_computed_twice(
    made: ExitStack, transport: str
) -> None:
    one, sender, receiver = (made.enter_context(make_llm()) for _ in range(3))
    open_both(sender, receiver, transport)
    expected = words(run(one, PROMPT, SAMPLED))
    assert words(hand_over(sender, receiver, PROMPT, SAMPLED)) == expected
    metrics = receiver.get_metrics()
    assert metrics.num_prefill_tokens == 1  # the last, which gives logits
    assert metrics.num_hand_overs_received == 1
    assert failures(receiver) == {}
    sent = sender.get_metrics()
    assert sent.num_prefill_tokens == len(PROMPT)
    wait_until(lambda: sender.get_metrics().num_hand_overs_sent == 1)
    assert metrics.hand_over_received_bytes == sender.get_metrics().hand_over_sent_bytes > 0
    check_idle(sender, receiver)
    # What came is in the prefix cache: nothing of it comes again.
    longer = [*PROMPT, 5, 6, 7]
    assert words(hand_over(sender, receiver, longer, SAMPLED)) == words(run(one, longer, SAMPLED))
    more = receiver.get_metrics()
    assert more.hand_over_received_bytes < metrics.hand_over_received_bytes * 1.5
    assert more.num_prefill_tokens == 2


# Windows, keys without values, one KV head, panels and rows of keys, numbers with scales.
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gemma3_text", {}),
        ("deepseek_v2", {}),
        ("llama", {"kv_cache_dtype": "fp8"}),
        ("llama", {"kv_cache_dtype": "bfloat16"}),
        ("llama", {"block_size": 8}),
        ("gemma3_text", {"kv_cache_dtype": "fp8", "block_size": 32}),
    ],
)
def test_whatever_the_cache_holds(made: ExitStack, family: str, options: dict[str, Any]) -> None:
    one, sender, receiver = (made.enter_context(make_llm(family, **options)) for _ in range(3))
    open_both(sender, receiver)
    for prompt in (PROMPT, PROMPT[:64], PROMPT[:5], PROMPT[:2]):
        expected = words(run(one, prompt, SAMPLED))
        assert words(hand_over(sender, receiver, prompt, SAMPLED)) == expected
    assert receiver.get_metrics().num_hand_overs_received == 4
    assert failures(receiver) == {}
    check_idle(sender, receiver)


def test_several_at_once_with_little_room(made: ExitStack) -> None:
    one = made.enter_context(make_llm())
    sender = made.enter_context(make_llm(num_gpu_blocks_override=24))
    receiver = made.enter_context(make_llm(num_gpu_blocks_override=24))
    open_both(sender, receiver, timeout=1)
    prompts = [[3 + (i * 11 + j * 5) % 60 for j in range(20 + 9 * i)] for i in range(8)]
    expected = [words(run(one, prompt, SAMPLED)) for prompt in prompts]
    assert hand_over_at_once(sender, receiver, prompts, SAMPLED) == expected
    check_idle(receiver)
    # What was kept when there was too much of it has made room, and was computed by the receiver.
    metrics = receiver.get_metrics()
    assert metrics.num_hand_overs_received + sum(failures(receiver).values()) == len(prompts)


def test_blocks_of_other_tokens_are_not_taken(made: ExitStack) -> None:
    one, sender, receiver = (made.enter_context(make_llm()) for _ in range(3))
    open_both(sender, receiver)
    assert sender.hand_over is not None
    others = [[*PROMPT[:-20], 9, *PROMPT[-19:]], PROMPT[:-4], [*PROMPT, 4]]
    for other in others:
        ticket = sender.hand_over.ticket()
        run(sender, other, ONE, ticket)
        assert words(run(receiver, PROMPT, SAMPLED, ticket)) == words(run(one, PROMPT, SAMPLED))
        receiver.reset_prefix_cache()
    # A prompt that goes further than what is asked for has all of it.
    assert failures(receiver) == {"gone": 2}
    assert receiver.get_metrics().num_hand_overs_received == 1
    check_idle(receiver)


def test_a_ticket_is_good_for_one_prompt(made: ExitStack) -> None:
    one, sender, receiver = (made.enter_context(make_llm()) for _ in range(3))
    open_both(sender, receiver, timeout=1.5)
    assert sender.hand_over is not None
    ticket = sender.hand_over.ticket()
    expected = words(run(one, PROMPT, SAMPLED))
    run(sender, PROMPT, ONE, ticket)
    for _ in range(2):
        assert words(run(receiver, PROMPT, SAMPLED, ticket)) == expected
        receiver.reset_prefix_cache()
    # And one that was never used is waited for, and given up.
    assert words(run(receiver, PROMPT, SAMPLED, sender.hand_over.ticket())) == expected
    assert failures(receiver) == {"gone": 2}
    assert receiver.take_hand_over_failure() == "the peer refuses: the sender has no such blocks"
    assert receiver.take_hand_over_failure() == ""


def test_the_receiver_may_come_first(made: ExitStack) -> None:
    one, sender, receiver = (made.enter_context(make_llm()) for _ in range(3))
    open_both(sender, receiver)
    assert sender.hand_over is not None
    ticket = sender.hand_over.ticket()
    got: list[object] = []
    waiting = threading.Thread(target=lambda: got.append(run(receiver, PROMPT, SAMPLED, ticket)))
    waiting.start()
    wait_until(lambda: receiver.get_metrics().num_requests_running == 1)
    run(sender, PROMPT, ONE, ticket)
    waiting.join(DEADLINE_S)
    assert words(got[0]) == words(run(one, PROMPT, SAMPLED))  # type: ignore[arg-type]
    assert receiver.get_metrics().num_hand_overs_received == 1


def test_a_ticket_that_is_used_twice_keeps_the_second_ones_blocks(made: ExitStack) -> None:
    one, sender, receiver = (made.enter_context(make_llm()) for _ in range(3))
    open_both(sender, receiver)
    assert sender.hand_over is not None
    ticket = sender.hand_over.ticket()
    run(sender, [9, *PROMPT], ONE, ticket)
    run(sender, PROMPT, ONE, ticket)
    wait_until(lambda: sender.get_metrics().num_leased_blocks == 5)
    assert words(run(receiver, PROMPT, SAMPLED, ticket)) == words(run(one, PROMPT, SAMPLED))
    assert failures(receiver) == {}
    wait_until(lambda: sender.get_metrics().num_leased_blocks == 0)
    check_idle(sender)
    other = receiver.hand_over
    assert other is not None
    with pytest.raises(InvalidArgument, match="another engine has drawn it"):
        other.has_begun(sender.hand_over.ticket())


def test_a_receiver_that_takes_nothing_holds_up_nobody(made: ExitStack) -> None:
    one, sender, receiver = (made.enter_context(make_llm()) for _ in range(3))
    open_both(sender, receiver, max_share=0.25)
    assert sender.hand_over is not None
    held, gate = threading.Event(), threading.Event()

    def hold(num: int, data: bytes) -> bytes:
        if num > 2000:  # in the first block
            held.set()
            gate.wait(DEADLINE_S)
        return data

    between = Between(sender, hold)
    place = sender.hand_over
    tickets = [place.ticket() for _ in range(5)]
    run(sender, PROMPT, ONE, tickets[0])
    own, place.addresses = place.addresses, [f"tcp:127.0.0.1:{between.port}"]
    moved = _moved(tickets[0], place)
    place.addresses = own
    got: list[Any] = []
    receiving = threading.Thread(target=lambda: got.append(run(receiver, PROMPT, SAMPLED, moved)))
    receiving.start()
    assert held.wait(DEADLINE_S)
    for i, ticket in enumerate(tickets[1:]):  # others go on, and what is kept has its bound
        run(sender, [30 + i, *PROMPT[1:]], ONE, ticket)
        assert sender.get_metrics().num_leased_blocks <= 16
    gate.set()
    receiving.join(DEADLINE_S)
    assert words(got[0]) == words(run(one, PROMPT, SAMPLED))
    metrics = receiver.get_metrics()
    assert metrics.num_hand_overs_received + sum(failures(receiver).values()) == 1
    check_idle(receiver)


@pytest.mark.parametrize("transport", ["local", "shm", "tcp"])
def test_a_sender_that_ends_or_starts_anew_is_done_without(made: ExitStack, transport: str) -> None:
    one, receiver = (made.enter_context(make_llm()) for _ in range(2))
    expected = words(run(one, PROMPT, SAMPLED))
    with make_llm() as sender:
        open_both(sender, receiver, transport)
        assert sender.hand_over is not None
        ticket = sender.hand_over.ticket()
        run(sender, PROMPT, ONE, ticket)
    assert words(run(receiver, PROMPT, SAMPLED, ticket)) == expected
    assert failures(receiver) == {"unreachable": 1}
    if transport != "tcp":
        return
    # Another one at the same address: its epoch is another.
    address = sender.hand_over.addresses[0]
    with make_llm() as sender:
        sender.open_hand_over(KEY, [address])
        receiver.reset_prefix_cache()
        assert words(run(receiver, PROMPT, SAMPLED, ticket)) == expected
    assert failures(receiver) == {"unreachable": 1, "gone": 1}


def test_blocks_that_nobody_fetches_are_given_back(made: ExitStack) -> None:
    sender, receiver = (made.enter_context(make_llm()) for _ in range(2))
    open_both(sender, receiver, lease=0.3, timeout=0.5)
    assert sender.hand_over is not None
    ticket = sender.hand_over.ticket()
    run(sender, PROMPT, ONE, ticket)
    wait_until(lambda: sender.get_metrics().num_leased_blocks == 5)
    assert sender.get_metrics().num_blocks_used == 5
    wait_until(lambda: sender.get_metrics().num_leased_blocks == 0)
    check_idle(sender)
    assert sender.get_metrics().num_hand_overs_lapsed == 1
    run(receiver, PROMPT, SAMPLED, ticket)
    assert failures(receiver) == {"gone": 1}


def test_what_is_kept_for_others_is_bounded(made: ExitStack) -> None:
    sender, receiver = (made.enter_context(make_llm()) for _ in range(2))
    open_both(sender, receiver, max_share=0.2, timeout=0.5)  # 12 blocks
    assert sender.hand_over is not None
    tickets = [sender.hand_over.ticket() for _ in range(4)]
    for i, ticket in enumerate(tickets):
        run(sender, [3 + i, *PROMPT[1:]], ONE, ticket)
    wait_until(lambda: sender.get_metrics().num_hand_overs_lapsed == 2)
    wait_until(lambda: sender.get_metrics().num_leased_blocks == 10)
    run(receiver, [3, *PROMPT[1:]], SAMPLED, tickets[0])
    run(receiver, [6, *PROMPT[1:]], SAMPLED, tickets[3])
    assert failures(receiver) == {"gone": 1}
    assert receiver.get_metrics().num_hand_overs_received == 1


def test_sleep_lets_go_of_what_is_kept(made: ExitStack) -> None:
    one, sender, receiver = (made.enter_context(make_llm()) for _ in range(3))
    open_both(sender, receiver, timeout=1)
    assert sender.hand_over is not None
    ticket = sender.hand_over.ticket()
    run(sender, PROMPT, ONE, ticket)
    sender.sleep(level=1)
    sender.wake_up()
    expected = words(run(one, PROMPT, SAMPLED))
    assert words(run(receiver, PROMPT, SAMPLED, ticket)) == expected
    assert failures(receiver) == {"gone": 1}
    receiver.reset_prefix_cache()
    assert words(hand_over(sender, receiver, PROMPT, SAMPLED)) == expected
    check_idle(sender, receiver)


def test_another_key_is_refused(made: ExitStack) -> None:
    one, sender, receiver = (made.enter_context(make_llm()) for _ in range(3))
    place = sender.open_hand_over(KEY, ["tcp:127.0.0.1:0"])
    place.addresses = place.addresses[1:]
    other = receiver.open_hand_over("another key of some length")
    with pytest.raises(InvalidArgument, match="no engine with this hand_over_key has drawn it"):
        run(receiver, PROMPT, SAMPLED, place.ticket())
    # Nor do frames go through, whatever the ticket says.
    other._key = place._key
    ticket = place.ticket()
    run(sender, PROMPT, ONE, ticket)
    assert words(run(receiver, PROMPT, SAMPLED, ticket)) == words(run(one, PROMPT, SAMPLED))
    assert failures(receiver) == {"refused": 1}
    assert "same key" in receiver.take_hand_over_failure()


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_another_numerics_class_is_refused(made: ExitStack, transport: str) -> None:
    sender = made.enter_context(make_llm())
    receiver, one = (made.enter_context(make_llm(dtype="bfloat16")) for _ in range(2))
    open_both(sender, receiver, transport)
    assert sender.hand_over is not None
    assert receiver.hand_over is not None
    with pytest.raises(InvalidArgument, match=r"of numerics class .*; leave it out"):
        run(receiver, PROMPT, SAMPLED, sender.hand_over.ticket())
    receiver.hand_over._class = sender.hand_over._class
    assert words(hand_over(sender, receiver, PROMPT, SAMPLED)) == words(run(one, PROMPT, SAMPLED))
    assert failures(receiver) == {"refused": 1}


def test_blocks_of_another_size_are_refused(made: ExitStack) -> None:
    one, sender = (made.enter_context(make_llm()) for _ in range(2))
    receiver = made.enter_context(make_llm(block_size=32))
    open_both(sender, receiver)
    assert words(hand_over(sender, receiver, PROMPT, SAMPLED)) == words(run(one, PROMPT, SAMPLED))
    assert failures(receiver) == {"refused": 1}
    assert "give both the same block_size" in receiver.take_hand_over_failure()


@pytest.mark.parametrize(
    "ticket", ["", ".", "a.b", "ä.ö", "e30.e30", "x" * 5000, "eyJ2ZXJzaW9uIjoxfQ.AAAA"]
)
def test_what_is_no_ticket_is_refused(made: ExitStack, ticket: str) -> None:
    receiver = made.enter_context(make_llm())
    if not ticket:
        with pytest.raises(InvalidArgument, match="hands over nothing"):
            receiver._blocks_of("a.b")
        return
    receiver.open_hand_over(KEY)
    with pytest.raises(InvalidArgument, match="hand_over_ticket: "):
        receiver._blocks_of(ticket)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key": "short"}, "key has 5 characters"),
        ({"addresses": ["127.0.0.1:80"]}, "its scheme is not known"),
        ({"addresses": ["tcp:localhost:80"]}, "no number of an IP address"),
        ({"addresses": ["tcp:127.0.0.1"]}, "it has no port"),
        ({"addresses": ["tcp:127.0.0.1:66000"]}, "its port is none"),
        ({"addresses": ["shm:"]}, "1 to 106 characters"),
        ({"addresses": ["tcp:192.0.2.1:0"]}, "cannot listen on"),
        ({"lease": 0}, "lease_s must be above 0"),
        ({"timeout": float("nan")}, "timeout"),
        ({"max_share": 1.5}, "max_share must be above 0 and at most 1"),
    ],
)
def test_what_cannot_be_opened_is_told(
    made: ExitStack, options: dict[str, Any], message: str
) -> None:
    llm = made.enter_context(make_llm())
    with pytest.raises(InvalidArgument, match=message):
        llm.open_hand_over(**{"key": KEY, **options})
    llm.open_hand_over(KEY)  # and nothing is open yet
    with pytest.raises(InvalidArgument, match="open already"):
        llm.open_hand_over(KEY)


def test_what_is_more_than_one_sequence_is_refused(made: ExitStack) -> None:
    llm = made.enter_context(make_llm())
    place = llm.open_hand_over(KEY)
    for more in ({"n": 2}, {"prompt_logprobs": 1}):
        params = SAMPLED.clone()
        for name, value in more.items():
            setattr(params, name, value)
        with pytest.raises(InvalidArgument, match="one sequence of token ids is handed over"):
            run(llm, PROMPT, params, place.ticket())


def connect(llm: LLM) -> socket.socket:
    assert llm.hand_over is not None
    port = int(llm.hand_over.addresses[0].rpartition(":")[2])
    sock = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
    return sock


def test_garbage_ends_its_connection_and_nothing_else(made: ExitStack) -> None:
    one, sender, receiver = (made.enter_context(make_llm()) for _ in range(3))
    open_both(sender, receiver, timeout=1)
    head = struct.pack("<IBBHIIQ32s", 0x31564B4C, 1, 0, 0, 1000, 0, 0, b"x" * 32)
    for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n" * 9, b"\0" * 500, head, head + b"y" * 1000):
        sock = connect(sender)
        sock.sendall(garbage)
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(100) == b""  # not a byte to who has shown no key
        sock.close()
    # More that say nothing than are served at once: they are let go after the timeout.
    silent = [connect(sender) for _ in range(70)]
    assert silent[0].recv(1) == b""
    wait_until(lambda: silent[-1].recv(1) == b"")
    for sock in silent:
        sock.close()
    assert words(hand_over(sender, receiver, PROMPT, SAMPLED)) == words(run(one, PROMPT, SAMPLED))
    assert failures(receiver) == {}


class Between:
    """Somebody on the wire, who may change, hold back or repeat what a receiver is sent."""

    def __init__(self, sender: LLM, change: Any) -> None:
        self._sender = sender
        self._change = change
        self._listener = socket.create_server(("127.0.0.1", 0))
        assert sender.hand_over is not None
        self.port = self._listener.getsockname()[1]
        self.recorded = b""  # of the receiver
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        near, _ = self._listener.accept()
        far = connect(self._sender)
        threading.Thread(target=self._copy, args=(near, far), daemon=True).start()
        num = 0
        with suppress(OSError):
            while data := far.recv(1000):
                changed = self._change(num, data)
                num += len(data)
                if changed is None:
                    near.shutdown(socket.SHUT_RDWR)
                    return
                near.sendall(changed)

    def _copy(self, near: socket.socket, far: socket.socket) -> None:
        with suppress(OSError):
            while data := near.recv(1000):
                self.recorded += data
                far.sendall(data)
        far.close()


def flipped(num: int, data: bytes) -> bytes:
    place = 5000 - num
    if not 0 <= place < len(data):
        return data
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (flipped, "corrupt"),
        (lambda num, data: data if num < 5000 else None, "unreachable"),
        (lambda num, data: data if num < 5000 else b"", "timeout"),
        (lambda num, data: data * 2 if num >= 5000 else data, "corrupt"),
    ],
    ids=["changed", "cut", "silent", "repeated"],
)
def test_what_happens_on_the_wire_changes_no_token(
    made: ExitStack, change: Any, cause: str
) -> None:
    one, sender, receiver = (made.enter_context(make_llm()) for _ in range(3))
    open_both(sender, receiver, timeout=0.5)
    between = Between(sender, change)
    ticket_place = sender.hand_over
    assert ticket_place is not None
    ticket = ticket_place.ticket()
    run(sender, PROMPT, ONE, ticket)
    own, ticket_place.addresses = ticket_place.addresses, [f"tcp:127.0.0.1:{between.port}"]
    moved = _moved(ticket, ticket_place)
    ticket_place.addresses = own
    assert words(run(receiver, PROMPT, SAMPLED, moved)) == words(run(one, PROMPT, SAMPLED))
    assert failures(receiver) == {cause: 1}
    # What was said once opens nothing a second time.
    with connect(sender) as sock:
        sock.sendall(between.recorded)
        answer = b""
        while data := sock.recv(1000):
            answer += data
    assert len(answer) < 500  # a greeting, and no block
    check_idle(receiver)


def _moved(ticket: str, place: Any) -> str:
    """The same lease by other addresses."""
    import msgspec
    from llmserve.requests.hand_over import _decode, _encode, _Ticket

    read = msgspec.json.decode(_decode(ticket.split(".")[0]), type=_Ticket)
    read.addresses = place.addresses
    body = msgspec.json.encode(read)
    return f"{_encode(body)}.{_encode(place._sign(body))}"
