"""Which linear layers get more bits, so that a model keeps to a size and loses least.

Each group of layers is rounded alone, and what that changes of its decoder layer's output is
measured over a few sequences. Bits then go where a byte takes away the most of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmserve.errors import InvalidArgument
from llmserve.quantization.schemes import Scheme, find_scheme

NUM_SEQUENCES = 8  # that sensitivity is measured over: 4,096 tokens of 512 each

# What has more bits than a scheme, of the same kind of numbers.
_NEXT = {
    "int3": ("int4", "int8"),
    "int4": ("int8",),
    "int4-asym": ("int8",),
    "nvfp4": ("fp8",),
    "mxfp4": ("fp8",),
}


@dataclass(frozen=True, slots=True)
class GroupCost:
    """Of layers that get the same scheme: their names, rows and columns of each, and the relative
    error |dh|^2 / |h|^2 of the layer's output, a token on average, with the lowest scheme."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    error: float

    def num_bits(self, scheme: Scheme | None) -> float:
        """In a scheme, or, for None, in 16 bits."""
        return sum(
            n * k * (16 if scheme is None else scheme.grid.bits_per_weight(k))
            for n, k in self.shapes
        )

    def error_of(self, scheme: Scheme | None, lowest: Scheme) -> float:
        """Each bit more halves the step, and takes the error to a quarter."""
        if scheme is None:
            return 0.0
        return float(self.error * 4.0 ** (lowest.grid.bits - scheme.grid.bits))


def ladder(lowest: Scheme) -> list[Scheme | None]:
    """The schemes that a group may have, from the fewest bits on; None is 16 bits. Raises
    InvalidArgument for a scheme that nothing is above of."""
    above = _NEXT.get(lowest.name)
    if above is None:
        raise InvalidArgument(
            f"target_bits and target_size give some layers more bits than the scheme has, and are "
            f"for {', '.join(_NEXT)}, not for {lowest.name}"
        )
    return [lowest, *(find_scheme(name) for name in above), None]


def allocate(
    groups: Sequence[GroupCost], lowest: Scheme, max_bits: float
) -> Mapping[str, Scheme | None]:
    """A scheme for each layer by name, of at most max_bits in all. Steps up the ladder are taken by
    the error that they remove a bit, the largest first. Raises InvalidArgument if all at the lowest
    is too much."""
    steps = ladder(lowest)
    places = [0] * len(groups)
    used = sum(group.num_bits(lowest) for group in groups)
    if used > max_bits:
        count = sum(n * k for group in groups for n, k in group.shapes)
        raise InvalidArgument(
            f"the target is {max_bits / count:.3f} bits a weight of the linear layers, and all of "
            f"them in {lowest.name} take {used / count:.3f}; pass that or more, or a scheme of "
            f"fewer bits"
        )
    while True:
        best, chosen = 0.0, -1
        for i, group in enumerate(groups):
            if places[i] + 1 == len(steps):
                continue
            now, then = steps[places[i]], steps[places[i] + 1]
            more = group.num_bits(then) - group.num_bits(now)
            gain = (group.error_of(now, lowest) - group.error_of(then, lowest)) / more
            if used + more <= max_bits and gain > best:
                best, chosen = gain, i
        if chosen < 0:
            break
        used -= groups[chosen].num_bits(steps[places[chosen]])
        places[chosen] += 1
        used += groups[chosen].num_bits(steps[places[chosen]])
    return {
        name: steps[place]
        for group, place in zip(groups, places, strict=True)
        for name in group.names
    }
