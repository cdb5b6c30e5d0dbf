"""Lines that the engine's thread writes to a socket itself, on a token oracle: what is written, and
how the connection comes back."""

from __future__ import annotations

import os
import resource
import select
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
from engine_requests import add_request
from hypothesis import given, settings
from hypothesis import strategies as st
from llmserve import _core, _core_testing
from llmserve.errors import ResourceExhausted

DEADLINE_S = 30.0  # tells a hang from an answer
NUM_TOKENS = 40
LETTERS = [bytes([i]) for i in range(97, 123)]


class Lending:
    """An engine whose first request has its first token and waits in the next step; others, which
    come while it runs, may have none yet."""

    def __init__(self, vocabulary: list[bytes] = LETTERS, *seeds: int, **fields: object) -> None:
        config = _core.EngineConfig(
            cache=_core.CacheConfig(num_blocks=512, block_size=8),
            scheduler=_core.SchedulerConfig(max_model_len=4096, max_num_seqs=16),
        )
        self.gate = _core_testing.StepGate(2)
        self.engine = _core_testing.oracle_engine(
            config,
            _core_testing.OracleOptions(vocab_size=len(vocabulary)),
            _core.Vocabulary(vocabulary, []),
            gate=self.gate,
        )
        self.ours, self.reader = socket.socketpair()
        self.reader.settimeout(DEADLINE_S)
        self.fields = {"max_tokens": NUM_TOKENS, **fields}
        self.ids = [
            add_request(self.engine, [1], _core.SamplingParams(**self.fields, seed=seed))
            for seed in seeds or (1,)
        ]
        self.events: list[_core.TokenEvent] = []
        self.gate.wait_until_held()
        self.events += self.engine.wait_events(DEADLINE_S)

    def connection(self, skips_empty: bool = False) -> _core.LentConnection:
        connection = _core.LentConnection(self.ours.fileno())
        for request_id in self.ids:
            line = _core.LineTemplate(b'data: {"text":"', b'"}\n\n', skips_empty)
            connection.add(request_id, 0, line)
        return connection

    def finish(self) -> None:
        """Takes events up to the last of each request."""
        open_ids = set(self.ids) - {e.request_id for e in self.events if e.is_request_finished}
        until = time.monotonic() + DEADLINE_S
        while open_ids:
            assert time.monotonic() < until, f"{open_ids} never ended"
            events = self.engine.wait_events(0.1)
            self.events += events
            open_ids -= {event.request_id for event in events if event.is_request_finished}

    def read_all(self, rest: bytes = b"") -> bytes:
        """What has been written to the socket, and `rest`, which could not."""
        pieces = []
        poll = select.poll()
        poll.register(self.reader, select.POLLIN)
        while poll.poll(0):
            pieces.append(self.reader.recv(2**20))
        return b"".join(pieces) + rest

    def alone(self, seed: int) -> _core.TokenEvent:
        """What a request that nobody streams gets, as one event."""
        params = _core.SamplingParams(**self.fields, seed=seed)
        request = add_request(self.engine, [1], params, is_streamed=False)
        events = []
        while not events:
            events = self.engine.wait_events(DEADLINE_S)
        (event,) = events
        assert event.request_id == request
        return event

    def close(self) -> None:
        self.gate.open()
        self.engine.close()
        self.ours.close()
        self.reader.close()


@contextmanager
def lending(vocabulary: list[bytes] = LETTERS, *seeds: int, **fields: object) -> Iterator[Lending]:
    made = Lending(vocabulary, *seeds, **fields)
    try:
        yield made
    finally:
        made.close()


def lines(data: bytes) -> list[bytes]:
    """The chunks of a body."""
    found = []
    while data:
        size, _, data = data.partition(b"\r\n")
        found.append(data[: int(size, 16)])
        assert data[len(found[-1]) :].startswith(b"\r\n")
        data = data[len(found[-1]) + 2 :]
    return found


def texts(data: bytes) -> list[str]:
    return [msgspec.json.decode(line[6:])["text"] for line in lines(data)]


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


pieces = st.one_of(
    st.text(min_size=1, max_size=4).map(str.encode),
    st.sampled_from('"\\/\b\f\n\r\t\0\x1f\x7f\u2028\ufeff😀é</script>').map(str.encode),
    st.binary(min_size=1, max_size=3),  # characters that several tokens make, and what none is
)


@settings(max_examples=60, deadline=None)
@given(vocabulary=st.lists(pieces, min_size=2, max_size=40), seed=st.integers(0, 2**32))
def test_what_goes_over_the_socket_is_worded_as_python_words_it(
    vocabulary: list[bytes], seed: int
) -> None:
    with lending(vocabulary, seed) as own:
        connection = own.connection()
        assert own.engine.lend(connection)
        own.gate.open()
        own.finish()
        written = own.engine.take_back(connection)
        body = own.read_all()
        first, last = own.events
        assert len(lines(body)) == own.engine.metrics().num_lines == NUM_TOKENS - 2
        for line, text in zip(lines(body), texts(body), strict=True):
            assert line == b"data: " + msgspec.json.encode({"text": text}) + b"\n\n"
        ((request_id, sample_idx, token_ids),) = written.samples
        alone = own.alone(seed)
        assert (request_id, sample_idx, written.rest) == (own.ids[0], 0, b"")
        assert [*first.token_ids, *token_ids, *last.token_ids] == alone.token_ids
        assert first.text + "".join(texts(body)) + last.text == alone.text


def test_an_event_without_text_has_no_line_where_it_is_to_have_none() -> None:
    with lending([b"\xf0", b"\x9f\x98\x80"], 3) as own:
        connection = own.connection(skips_empty=True)
        assert own.engine.lend(connection)
        own.gate.open()
        own.finish()
        ((_, _, token_ids),) = own.engine.take_back(connection).samples
        given = texts(own.read_all())
        assert "" not in given
        assert len(given) < len(token_ids) == NUM_TOKENS - 2


def test_the_first_stream_that_ends_brings_the_connection_back_for_all() -> None:
    with lending(LETTERS, 1, 2) as own:
        connection = own.connection()
        num_before = len(own.events)
        assert own.engine.lend(connection)
        own.engine.abort(own.ids[0])
        own.gate.open()
        own.finish()
        written = own.engine.take_back(connection)
        # In the step of the abort the other one may have come first; not in later ones.
        assert sum(len(token_ids) for _, _, token_ids in written.samples) <= 1
        (*_, aborted) = (e for e in own.events if e.request_id == own.ids[0])
        assert aborted.finish_reason == "abort"

        def text_of(events: list[_core.TokenEvent]) -> str:
            return "".join(e.text for e in events if e.request_id == own.ids[1])

        before, later = text_of(own.events[:num_before]), text_of(own.events[num_before:])
        got = "".join(texts(own.read_all()))
        assert before + got + later == own.alone(2).text


def test_a_socket_that_is_full_brings_the_connection_back_with_what_it_did_not_take() -> None:
    with lending(LETTERS, 5, max_tokens=3000) as own:
        own.ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        connection = own.connection()
        fds = num_descriptors()
        assert own.engine.lend(connection)
        own.gate.open()
        own.finish()  # nobody reads, and nobody waits
        assert num_descriptors() == fds - 1  # closed before anybody asked
        written = own.engine.take_back(connection)
        assert written.rest
        ((_, _, token_ids),) = written.samples
        assert 0 < len(token_ids) < 3000
        alone = own.alone(5)
        first, *later = own.events
        got = "".join(texts(own.read_all(written.rest)))
        assert first.text + got + "".join(event.text for event in later) == alone.text
        own_ids = [*first.token_ids, *token_ids, *(t for e in later for t in e.token_ids)]
        assert own_ids == alone.token_ids


def test_a_reader_that_is_gone_brings_the_connection_back_and_no_signal() -> None:
    with lending(LETTERS, 5) as own:
        connection = own.connection()
        assert own.engine.lend(connection)
        own.reader.close()
        own.gate.open()
        own.finish()
        written = own.engine.take_back(connection)
        ((_, _, token_ids),) = written.samples
        assert len(token_ids) == 1
        assert len(lines(written.rest)) == 1
        assert own.engine.metrics().num_lines == 0


def test_a_connection_is_not_lent_past_an_event_that_waits() -> None:
    with lending(LETTERS, 1) as own:
        own.gate.open()
        connection = own.connection()
        until = time.monotonic() + DEADLINE_S
        while own.engine.metrics().num_requests_running:
            assert time.monotonic() < until
        assert not own.engine.lend(connection)
        own.finish()
        assert own.read_all() == b""


def test_a_connection_that_was_taken_back_is_neither_written_to_nor_lent_again() -> None:
    with lending(LETTERS, 1) as own:
        connection = own.connection()
        assert own.engine.lend(connection)
        first = own.engine.take_back(connection)
        assert (first.samples, first.rest) == ([], b"")
        assert not own.engine.lend(connection)
        own.gate.open()
        own.finish()
        assert own.read_all() == b""
        again = own.engine.take_back(connection)
        assert (again.samples, again.rest, connection.last_us) == ([], b"", 0)


def test_an_engine_that_closes_lets_go_of_what_was_lent() -> None:
    with lending(LETTERS, 1) as own:
        fds = num_descriptors()
        connection = own.connection()
        assert num_descriptors() == fds + 1
        assert own.engine.lend(connection)
        own.gate.open()
        own.engine.close()
        assert not own.engine.lend(own.connection())
        own.engine.take_back(connection)
        del connection
        assert num_descriptors() < fds  # the engine's own is gone, too


def test_without_a_descriptor_left_it_says_so() -> None:
    ours, other = socket.socketpair()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ours, other:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            with pytest.raises(ResourceExhausted, match="close files or raise ulimit -n"):
                _core.LentConnection(ours.fileno())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
