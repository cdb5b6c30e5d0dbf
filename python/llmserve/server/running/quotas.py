"""What one key may ask for in a minute: requests and tokens, each a bucket that fills steadily."""

import time
from collections.abc import Callable, Iterator

from llmserve.server.http.errors import ApiError
from llmserve.server.settings import ServerSettings

_MINUTE_S = 60.0


class _Bucket:
    """Full at first; what is taken comes back at the rate of a whole one a minute."""

    def __init__(self, size: int, now: float) -> None:
        self._size = size
        self._left = float(size)
        self._at = now

    def wait_s(self, amount: int, now: float) -> float:
        """How long until so much is there; what is larger than the bucket waits until it is full.
        Takes nothing."""
        self._left = min(self._size, self._left + (now - self._at) * self._size / _MINUTE_S)
        self._at = now
        missing = min(amount, self._size) - self._left
        return max(missing, 0.0) * _MINUTE_S / self._size

    def take(self, amount: int) -> None:
        """Below zero for what is larger than the bucket: the next one waits longer. A negative
        amount comes back."""
        self._left -= amount


class Quotas:
    """Of every key; off where the settings say 0. Used on the loop's thread."""

    def __init__(
        self, settings: ServerSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        limits = (settings.key_requests_per_minute, settings.key_tokens_per_minute)
        self._limits = {
            what: limit for what, limit in zip(("requests", "tokens"), limits, strict=True) if limit
        }
        self._clock = clock
        self._buckets: dict[tuple[str, str], _Bucket] = {}
        self.num_refused = 0

    def check(self, key_name: str, num_tokens: int) -> None:
        """Raises ApiError (429) that says when to come again, where this key has less left than a
        request of so many tokens takes. Counts nothing."""
        now = self._clock()
        for what, amount, bucket in self._amounts(key_name, num_tokens):
            if (wait_s := bucket.wait_s(amount, now)) > 0:
                self.num_refused += 1
                raise ApiError(
                    429,
                    f"this key may ask for {self._limits[what]} {what} a minute; try again later",
                    code="rate_limit_exceeded",
                    retry_after=wait_s,
                )

    def take(self, key_name: str, num_tokens: int) -> None:
        """Counts a request that passed `check`, once nothing refuses it any more."""
        for _, amount, bucket in self._amounts(key_name, num_tokens):
            bucket.take(amount)

    def give_back(self, key_name: str, num_tokens: int) -> None:
        """Of those that a request took, what it has not used."""
        if bucket := self._buckets.get((key_name, "tokens")):
            bucket.take(-num_tokens)

    def _amounts(self, key_name: str, num_tokens: int) -> Iterator[tuple[str, int, _Bucket]]:
        """What a request takes of which bucket."""
        for what, limit in self._limits.items():
            amount = num_tokens if what == "tokens" else 1
            if amount:  # what runs nothing is no matter of the tokens that are owed
                bucket = self._buckets.setdefault((key_name, what), _Bucket(limit, self._clock()))
                yield what, amount, bucket
