"""Prefill and decode apart: one engine computes a prompt, and another one goes on with it.

The KV blocks of a prompt are handed over by a ticket. The engine that computes the prompt draws it
(`HandOver.ticket`). The request that it runs names the ticket, and so does the request to the
engine that goes on, which fetches the blocks. An engine knows by whose ticket it is which of the
two it is asked for.
"""

import base64
import hashlib
import hmac
import secrets

import msgspec

from llmserve import _core
from llmserve.errors import InvalidArgument
from llmserve.requests.blocks_of import BlocksOf

_VERSION = 1
_MAX_TICKET_LENGTH = 4096


class _Ticket(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    addresses: list[str]
    epoch: int
    lease: int
    numerics_class: str


class HandOver:
    """An engine that hands over: see `AsyncLLM.open_hand_over`."""

    def __init__(
        self,
        engine: _core.Engine,
        key: str,
        numerics_class: str,
        place: tuple[list[str], int],
    ) -> None:
        self._engine = engine
        # Another key than that of the frames: what signs one thing signs nothing else.
        self._key = hmac.digest(key.encode(), b"ticket", hashlib.sha256)
        self._class = numerics_class
        self.addresses, self._epoch = place

    def ticket(self) -> str:
        """A new one, for one prompt of this engine."""
        ticket = _Ticket(_VERSION, self.addresses, self._epoch, secrets.randbits(63), self._class)
        body = msgspec.json.encode(ticket)
        return f"{_encode(body)}.{_encode(self._sign(body))}"

    def read(self, ticket: str) -> BlocksOf:
        """What a request with this ticket, an own one or a peer's, does. Raises InvalidArgument for
        one that no engine with this key has drawn, and for one of another numerics class."""
        try:
            body_text, code_text = ticket[:_MAX_TICKET_LENGTH].split(".")
            body, code = _decode(body_text), _decode(code_text)
        except ValueError:
            raise InvalidArgument("hand_over_ticket: this is no ticket") from None
        if not hmac.compare_digest(self._sign(body), code):
            raise InvalidArgument(
                "hand_over_ticket: no engine with this hand_over_key has drawn it; give all "
                "servers the same key"
            )
        try:
            read = msgspec.json.decode(body, type=_Ticket)
        except msgspec.MsgspecError as error:
            raise InvalidArgument(f"hand_over_ticket: of another version: {error}") from None
        if read.epoch == self._epoch:
            return BlocksOf(send_to=read.lease)
        if read.numerics_class != self._class:
            raise InvalidArgument(
                f"hand_over_ticket: it is of numerics class {read.numerics_class[:12]}, and this "
                f"engine of {self._class[:12]}: its tokens would not be the same; leave it out"
            )
        peer = self._engine.add_peer(read.addresses, read.epoch)
        return BlocksOf(receive_from=(peer, read.lease))

    def has_begun(self, ticket: str) -> bool:
        """Whether blocks are kept under this own ticket: from the first that its request has
        computed until all have been fetched. Raises InvalidArgument for what is no own ticket."""
        blocks_of = self.read(ticket)
        if blocks_of.send_to is None:
            raise InvalidArgument("hand_over_ticket: another engine has drawn it")
        return self._engine.has_begun_hand_over(blocks_of.send_to)

    def _sign(self, body: bytes) -> bytes:
        return hmac.digest(self._key, body, hashlib.sha256)


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    """Raises ValueError."""
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
