"""Plays a stream to its end, over as many replicas as that takes."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from llmserve.route.replay import StreamRecord, events
from llmserve.route.upstream import ReplicaLost
from llmserve.server.http.events import DONE

# Lines that wait for a client who reads slowly, of all choices of a stream.
_MAX_WAITING = 256
_MAX_REPLAYS = 16  # of a choice


class OpenStream(Protocol):
    """A replica's answer of status 200, a stream."""

    def pieces(self) -> AsyncIterator[bytes]:
        """Its body as it comes. Raises ReplicaLost."""

    def note(self, num_tokens: int) -> None:
        """So many tokens have come with it."""

    def close(self) -> None:
        """Nobody reads on."""


class CannotGoOn(Exception):
    """Why a stream that broke off has to end."""


# Sends a body to a replica of the stream's numerics class, another than those that have failed.
# Raises CannotGoOn.
Reopen = Callable[[dict[str, Any]], Awaitable[OpenStream]]


@dataclass(slots=True)
class Player:
    """One stream. `is_replayable` False: it ends where its replica does."""

    record: StreamRecord
    reopen: Reopen
    is_replayable: bool = True
    num_replays: int = 0

    async def lines(self, first: OpenStream) -> AsyncGenerator[bytes, None]:
        """What the client gets. Raises CannotGoOn."""
        record = self.record
        async with aclosing(self._play(first, None)) as played:
            async for line in played:
                yield line
        if record.is_finished and self._lost_usage:
            yield record.usage_line()
        yield DONE

    @property
    def _lost_usage(self) -> bool:
        """The line of usage did not come, or was of one choice alone."""
        return self.record.wants_usage and not self.record.has_told_usage

    async def _play(self, stream: OpenStream, index: int | None) -> AsyncGenerator[bytes, None]:
        record = self.record
        while True:
            try:
                async with aclosing(self._read(stream, index)) as lines:
                    async for line in lines:
                        yield line
                return
            except ReplicaLost as error:
                left = record.unfinished() if index is None else [index]
                left = [one for one in left if not record.choices[one].is_finished]
                if not left or record.is_failed:
                    return
                if not (self.is_replayable and record.can_resume):
                    raise CannotGoOn(f"the replica was lost: {error}") from None
            self.num_replays += len(left)
            if self.num_replays > _MAX_REPLAYS * len(record.choices):
                raise CannotGoOn("it has broken off too often")
            if len(left) == 1 and len(record.choices) == 1:
                index = None
            if len(left) > 1:
                async with aclosing(self._play_apart(left)) as lines:
                    async for line in lines:
                        yield line
                return
            stream = await self.reopen(record.rest(left[0]))
            index = left[0] if len(record.choices) > 1 else None

    async def _read(self, stream: OpenStream, index: int | None) -> AsyncGenerator[bytes, None]:
        record = self.record
        try:
            async with aclosing(events(stream.pieces())) as told:
                async for event in told:
                    before = record.num_tokens
                    line = record.line(event, index)
                    stream.note(record.num_tokens - before)
                    if line:
                        yield line
            if not record.has_ended(index):
                raise ReplicaLost("the stream ended before its last line")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ReplicaLost(f"no stream: {error!r}") from None
        finally:
            stream.close()

    async def _play_apart(self, indices: list[int]) -> AsyncGenerator[bytes, None]:
        """Several choices, each by itself."""
        queue: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue(_MAX_WAITING)

        async def play(index: int) -> None:
            try:
                stream = await self.reopen(self.record.rest(index))
                async with aclosing(self._play(stream, index)) as lines:
                    async for line in lines:
                        await queue.put(line)
                await queue.put(None)
            except Exception as error:
                await queue.put(error)

        tasks = [asyncio.create_task(play(index)) for index in indices]
        try:
            num_left = len(tasks)
            while num_left:
                item = await queue.get()
                if item is None:
                    num_left -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
