"""Which replicas of a deployment serve, and which stand by: started, with their weights in place,
and without requests until one that serves is gone or the load wants them."""

from collections.abc import Iterable

# Of the seats of those that serve by right: below it a stand-by that helped out stands by again.
_CALM = 0.5


class Standby:
    """Of one router, which keeps to its choice: caches are where requests went. `num_serving`
    replicas serve; 0: all."""

    def __init__(self, num_serving: int) -> None:
        self._num_serving = num_serving
        self.serving: list[str] = []  # in the order in which they began

    def update(self, here: Iterable[str]) -> None:
        """These are there: where one is gone, another one serves in its place."""
        names = set(here)
        self.serving = [name for name in self.serving if name in names]
        waiting = sorted(names.difference(self.serving))
        number = len(waiting) if not self._num_serving else self._num_serving - len(self.serving)
        self.serving += waiting[: max(number, 0)]

    def balance(self, num_requests: dict[str, int], num_seats: int) -> None:
        """num_requests: of each that is there. num_seats: of one; 0 where it is not known. With all
        seats taken one more serves, with few of them no more than by right."""
        if not self._num_serving or num_seats <= 0:
            return
        if all(num_requests.get(name, 0) >= num_seats for name in self.serving):
            waiting = sorted(set(num_requests).difference(self.serving))
            self.serving += waiting[:1]
            return
        is_calm = sum(num_requests.values()) <= _CALM * num_seats * self._num_serving
        if len(self.serving) > self._num_serving and is_calm:
            self.serving.pop()
