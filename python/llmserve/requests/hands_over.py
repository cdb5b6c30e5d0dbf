"""What an LLM does to hand prompts over to other engines, or to take them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmserve import _core
from llmserve.common.arguments import number, text
from llmserve.errors import InvalidArgument
from llmserve.requests.blocks_of import BlocksOf

if TYPE_CHECKING:
    from llmserve.requests.hand_over import HandOver


class HandsOver(ABC):
    """A part of `LLM` and `AsyncLLM`."""

    _hand_over: "HandOver | None" = None

    @abstractmethod
    def _open_engine(self) -> _core.Engine:
        """Raises InvalidArgument once closed."""

    @property
    @abstractmethod
    def numerics_class(self) -> str:
        """A digest of what decides the tokens."""

    def open_hand_over(
        self,
        key: str,
        addresses: Sequence[str] = (),
        lease: float = 30.0,
        timeout: float = 5.0,
        max_share: float = 0.5,
    ) -> "HandOver":
        """Exchanges KV blocks with other engines from now on, once: `docs/disaggregation.md`.

        key: what all of them know, at least 16 characters. addresses: where others fetch from this
        one, "tcp:127.0.0.1:0" or "shm:NAME"; engines of one process need none, nor does one that
        only fetches. lease: seconds that blocks are kept for who does not fetch them. timeout:
        seconds in which a peer has to move on, or the prompt is computed here. max_share: of the
        KV cache that may be kept for others. Raises InvalidArgument."""
        if self._hand_over is not None:
            raise InvalidArgument("hand-over is open already; make a new engine to change it")
        engine = self._open_engine()
        place = engine.open_hand_over(
            text("key", key),
            self.numerics_class,
            [text("addresses", address) for address in addresses],
            number("lease", lease),
            number("timeout", timeout),
            number("max_share", max_share),
        )
        from llmserve.requests.hand_over import HandOver  # few need it

        self._hand_over = HandOver(engine, key, self.numerics_class, place)
        return self._hand_over

    @property
    def hand_over(self) -> "HandOver | None":
        """What `open_hand_over` gave."""
        return self._hand_over

    def take_hand_over_failure(self) -> str:
        """Why a prompt was last computed here that should have come from a peer, once; empty:
        nothing new."""
        return self._open_engine().take_hand_over_failure()

    def _blocks_of(self, ticket: str) -> BlocksOf | None:
        if not ticket:
            return None
        if self._hand_over is None:
            raise InvalidArgument(
                "hand_over_ticket: this engine hands over nothing; give the server a "
                "hand_over_key, or call open_hand_over()"
            )
        return self._hand_over.read(text("hand_over_ticket", ticket))
