"""The bounds of one deployment, as named figures: what `llmserve plan` prints below the users."""

from collections.abc import Iterator
from dataclasses import dataclass

from llmserve.errors import InvalidArgument
from llmserve.plan.bounds import (
    batch_for_rate,
    cost_per_million_tokens,
    crossover_ops_per_byte,
    decode_tokens_per_s,
    hand_over_share,
    prefill_tokens_per_s,
    transfer_s,
)
from llmserve.plan.capacity import Capacity, ModelShape

_BYTES = 2  # of a weight, and of an element of the KV cache
# Of the prefill's time. A hand-over that takes a quarter of it leaves decode steps three quarters
# of what they would wait for prompts; with one that takes as long, nobody gains.
_WORTH_IT = 0.25


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its name and unit."""

    name: str
    value: float
    unit: str

    def __str__(self) -> str:
        value = f"{self.value:.2f}" if self.value < 1 else f"{self.value:,.1f}"
        return f"{self.name}: {value.removesuffix('.0')} {self.unit}"


@dataclass(frozen=True, slots=True)
class Device:
    """What bounds a deployment; None where it is not known. Bytes and operations a second, tokens a
    second wanted, and a price an hour in any currency."""

    bandwidth: float | None = None
    flops: float | None = None
    rate: float | None = None
    price: float | None = None
    link: float | None = None


def figures(
    shape: ModelShape, device: Device, contexts: tuple[int, ...], capacity: Capacity | None
) -> tuple[Figure, ...]:
    """Every bound that what is known allows, the KV cache in two bytes an element. Raises
    InvalidArgument where something is known that allows none by itself.

    >>> shape = ModelShape.of(80, 8, 128, weight_bytes=140 * 10**9)
    >>> for figure in figures(shape, Device(bandwidth=3.35e12, rate=1000), (4096,), None):
    ...     print(figure)
    decode, one user, weights alone: 23.9 tok/s
    decode, one user at 4096: 23.7 tok/s
    users to reach 1000 tok/s, weights alone: 42 users
    users to reach 1000 tok/s at 4096: 70 users
    >>> for figure in figures(shape, Device(flops=989e12, link=200e9), (8192,), None):
    ...     print(figure)
    KV hand-over at 8192: 13.4 ms
    hand-over beside the prefill: 1.2 % of its time: prefill apart pays
    """
    if device.bandwidth is not None and shape.weight_bytes == 0:
        raise InvalidArgument("a decode bound needs the weights: pass their bytes (--weights)")
    if device.price is not None and device.rate is None:
        raise InvalidArgument("a price of tokens needs how many come a second (--rate)")
    if device.bandwidth is None and device.rate is not None and device.price is None:
        raise InvalidArgument("users for a rate need a bandwidth (--bandwidth), its cost a --price")
    if device.bandwidth is None and device.flops is not None and device.link is None:
        raise InvalidArgument("a crossover with arithmetic needs a bandwidth (--bandwidth)")
    return (
        *_decode(shape, device, contexts),
        *_batches(shape, device, contexts, capacity),
        *_others(shape, device, contexts),
    )


def _decode(shape: ModelShape, device: Device, contexts: tuple[int, ...]) -> Iterator[Figure]:
    if device.bandwidth is None:
        return
    bound = decode_tokens_per_s(shape.weight_bytes, device.bandwidth)
    yield Figure("decode, one user, weights alone", bound, "tok/s")
    for context in contexts:
        kv_bytes = shape.kv_bytes(context)
        bound = decode_tokens_per_s(shape.weight_bytes, device.bandwidth, 1, kv_bytes)
        yield Figure(f"decode, one user at {context}", bound, "tok/s")


def _batches(
    shape: ModelShape, device: Device, contexts: tuple[int, ...], capacity: Capacity | None
) -> Iterator[Figure]:
    if device.bandwidth is None or device.rate is None:
        return
    name = f"users to reach {device.rate:g} tok/s"
    batch = batch_for_rate(device.rate, shape.weight_bytes, device.bandwidth)
    yield Figure(f"{name}, weights alone", batch, "users")
    for context in contexts:
        kv_bytes = shape.kv_bytes(context)
        if device.rate * kv_bytes >= device.bandwidth:
            yield Figure(f"{name} at {context}: no number does; the KV reads allow less than",
                         device.bandwidth / kv_bytes, "tok/s")  # fmt: skip
            continue
        batch = batch_for_rate(device.rate, shape.weight_bytes, device.bandwidth, kv_bytes)
        fit = None if capacity is None else capacity.num_users(context)
        verdict = ""
        if fit is not None:
            verdict = f", {fit} fit" + ("" if fit >= batch else ": out of reach")
        yield Figure(f"{name} at {context}", batch, f"users{verdict}")


def _others(shape: ModelShape, device: Device, contexts: tuple[int, ...]) -> Iterator[Figure]:
    if device.flops is not None and device.bandwidth is not None:
        crossover = crossover_ops_per_byte(device.flops, device.bandwidth)
        yield Figure("arithmetic bounds above", crossover, "operations a byte")
    if device.price is not None and device.rate is not None:
        cost = cost_per_million_tokens(device.price, device.rate)
        yield Figure(f"a million tokens at {device.rate:g} tok/s", cost, "(as the price)")
    if device.link is not None:
        for context in contexts:
            seconds = transfer_s(shape.kv_bytes(context), device.link)
            yield Figure(f"KV hand-over at {context}", seconds * 1e3, "ms")
    if device.link is not None and device.flops is not None and shape.weight_bytes > 0:
        rate = prefill_tokens_per_s(shape.weight_bytes / _BYTES, device.flops)
        share = hand_over_share(shape.kv_bytes(1), device.link, rate)
        verdict = "prefill apart pays" if share < _WORTH_IT else "prefill apart does not pay"
        yield Figure("hand-over beside the prefill", share * 100, f"% of its time: {verdict}")
