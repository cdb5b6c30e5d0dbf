"""What a router is made of: replicas, their answers, and a request's place at one."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

from starlette.requests import Request

from llmserve.route.metrics import RouteMetrics
from llmserve.route.outgoing import Outgoing
from llmserve.route.prompts import PromptBlocks, PromptReader
from llmserve.route.settings import RouteSettings
from llmserve.route.upstream import Headers


class Answer(Protocol):
    """A replica's answer whose head has come."""

    @property
    def status(self) -> int:
        """Of HTTP."""

    @property
    def headers(self) -> Headers:
        """Names in lower case."""

    def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises ReplicaLost."""

    async def read(self, max_bytes: int) -> bytes:
        """The whole body. Raises ReplicaLost."""

    def close(self) -> None:
        """Reads no more."""


class Seat(Protocol):
    """A request's place at a replica."""

    @property
    def name(self) -> str:
        """The replica's, for logs and metrics."""

    def numerics_class(self, model: object) -> str:
        """Of a model there; empty if it is not known."""

    def reading(self, reply: Any) -> AbstractContextManager[None]:
        """Within it the reply is cut when its replica is lost."""

    def note_life(self) -> None:
        """Something has come from there."""

    def grew(self, num_tokens: int) -> None:
        """So many tokens have come."""

    async def check(self) -> None:
        """Something failed there: looks whether it lives."""


class Asked(Protocol):
    """A client's request, as far as a router reads it."""

    @property
    def request(self) -> Request:
        """Whose body has been read."""

    @property
    def body(self) -> dict[str, Any]:
        """What it says; empty for what is no object."""

    @property
    def prompt(self) -> PromptBlocks:
        """Of which blocks its prompt is made."""

    @property
    def model(self) -> object:
        """That the body names."""

    @property
    def failed(self) -> list[str]:
        """Replicas where it has failed, by their names."""

    @property
    def needed_class(self) -> str | None:
        """The numerics class that its answer has begun with."""

    @property
    def is_posted_prompt(self) -> bool:
        """Whether it asks for what follows a prompt, or a conversation."""

    def headers(self) -> Headers:
        """What goes to the replica."""


class Front(ABC):
    """One router. How a request comes to a replica is a subclass's."""

    def __init__(self, settings: RouteSettings) -> None:
        """Raises InvalidArgument, CorruptFile, NotSupported."""
        self.settings = settings
        self.prompts = PromptReader(settings.tokenizer)
        self.metrics = RouteMetrics()
        self.is_draining = False
        self.num_running = 0

    @abstractmethod
    async def start(self) -> None:
        """Before the first request."""

    @abstractmethod
    async def close(self) -> None:
        """After the last."""

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """Whether a replica takes requests."""

    @abstractmethod
    def described(self) -> list[dict[str, Any]]:
        """Where each replica stands."""

    @abstractmethod
    async def send(
        self, asked: Asked, own: ExitStack, outgoing: Outgoing
    ) -> tuple[Answer, Seat] | None:
        """To the replica that costs least, of those that the request has not failed at and of its
        numerics class. `own` leaves the place. None: there is none. Raises SendFailed."""

    async def drain(self, timeout_s: float) -> None:
        """Takes no more; waits for what runs."""
        self.is_draining = True
        until = time.monotonic() + timeout_s
        while self.num_running and time.monotonic() < until:
            await asyncio.sleep(0.02)


class SendFailed(Exception):
    """A replica failed before its answer began."""

    def __init__(self, seat: Seat, why: str) -> None:
        super().__init__(f"{seat.name}: {why}")
        self.seat = seat
