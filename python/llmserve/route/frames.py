"""Streams of any protocol that outlive the replica that makes them.

A replica sends the events of such a stream in frames, with the tokens that they are made of. When
it dies, another one of the same numerics class gets the request with these tokens and words what
follows. The last events are given on together, so that no token is made after the end.
"""

import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

import msgspec

from llmserve.route.outgoing import Outgoing
from llmserve.route.replay import drawn_seed
from llmserve.route.streams import CannotGoOn, OpenStream
from llmserve.route.upstream import ReplicaLost
from llmserve.server.routes.relay import Frame

_MAX_REPLAYS = 16
_MAX_FRAME_BYTES = 2**26
_decoder = msgspec.json.Decoder(Frame)


class FrameRecord:
    """A stream's request, and what its client has been given."""

    def __init__(self, outgoing: Outgoing) -> None:
        self._outgoing = outgoing.relayed(
            seed=drawn_seed(),
            request_id=os.urandom(16).hex(),
            created=int(time.time()),
            has_frames=True,
        )
        self._token_ids: list[int] = []
        self._num_events = 0
        self.num_resumed = 0  # tokens that were not made again

    def request(self) -> Outgoing:
        """For the first replica."""
        return self._outgoing

    def rest(self) -> Outgoing:
        """For one that goes on."""
        if not self._token_ids:
            return self._outgoing
        self.num_resumed += len(self._token_ids)
        rest = self._outgoing.relayed(resume_token_ids=self._token_ids, num_events=self._num_events)
        return replace(rest, is_resumed=True)

    def note(self, frame: Frame) -> None:
        """Its events go to the client."""
        self._token_ids += frame.token_ids
        if not frame.is_sign_of_life:
            self._num_events += len(frame.events)


@dataclass(slots=True)
class FramePlayer:
    """One stream. `is_replayable` False: it ends where its replica does. reopen: sends it to a
    replica of the stream's numerics class, another than those that have failed; raises
    CannotGoOn."""

    record: FrameRecord
    reopen: Callable[[Outgoing], Awaitable[OpenStream]]
    is_replayable: bool = True
    num_replays: int = 0

    async def lines(self, first: OpenStream) -> AsyncGenerator[bytes, None]:
        """What the client gets. Raises CannotGoOn."""
        stream = first
        while True:
            try:
                async with aclosing(self._read(stream)) as lines:
                    async for line in lines:
                        yield line
                return
            except ReplicaLost as error:
                if not self.is_replayable:
                    raise CannotGoOn(f"the replica was lost: {error}") from None
            self.num_replays += 1
            if self.num_replays > _MAX_REPLAYS:
                raise CannotGoOn("it has broken off too often")
            stream = await self.reopen(self.record.rest())

    async def _read(self, stream: OpenStream) -> AsyncGenerator[bytes, None]:
        held = Frame()
        try:
            async with aclosing(frames(stream.pieces())) as told:
                async for frame in told:
                    stream.note(len(frame.token_ids))
                    if frame.is_end:
                        yield "".join([*held.events, *frame.events]).encode()
                        return
                    if frame.is_held:
                        held = frame
                        continue
                    self.record.note(frame)
                    if frame.events:
                        yield "".join(frame.events).encode()
            raise ReplicaLost("the stream ended before its last line")
        except ValueError as error:
            raise ReplicaLost(f"no stream: {error!r}") from None
        finally:
            stream.close()


async def frames(pieces: AsyncIterator[bytes]) -> AsyncGenerator[Frame, None]:
    """The frames of a stream; one that broke off is not given. Raises ValueError for what is
    none."""
    rest = b""
    async for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield _decoder.decode(line)
        if len(rest) > _MAX_FRAME_BYTES:
            raise ValueError(f"a frame of more than {_MAX_FRAME_BYTES} bytes")
