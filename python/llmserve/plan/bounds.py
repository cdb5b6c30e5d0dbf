"""Bounds on speed and cost: what bandwidth and arithmetic allow, never more.

Bytes, and bytes, operations or tokens a second. A multiply and an add are two operations.
"""

import math

from llmserve.errors import InvalidArgument


def decode_tokens_per_s(
    weight_bytes: float, bandwidth: float, batch: int = 1, kv_bytes: float = 0.0
) -> float:
    """Tokens a second of a decode step that is bound by reading memory, all users together:
    batch x bandwidth / (weight_bytes + batch x kv_bytes).

    A step reads every weight once and each user's KV cache (kv_bytes) once, and gives each of the
    batch one token. 140 GB of weights (70 G parameters of 2 bytes) at the 3.35 TB/s of an H100:

    >>> round(decode_tokens_per_s(140e9, 3.35e12), 1)
    23.9
    """
    _check_positive(weight_bytes=weight_bytes, bandwidth=bandwidth, batch=batch)
    return batch * bandwidth / (weight_bytes + batch * kv_bytes)


def batch_for_rate(
    tokens_per_s: float, weight_bytes: float, bandwidth: float, kv_bytes: float = 0.0
) -> int:
    """The smallest batch whose decode bound reaches a rate: `decode_tokens_per_s` solved for the
    batch, rate x weight_bytes / (bandwidth - rate x kv_bytes), rounded up.

    1,000 tokens a second from 140 GB at 3.35 TB/s take 42 users, and 70 when each user's KV cache
    of a 4,096-token context of Llama-2-70B is read too:

    >>> batch_for_rate(1000, 140e9, 3.35e12), batch_for_rate(1000, 140e9, 3.35e12, 1342177280)
    (42, 70)

    Raises InvalidArgument where no batch reaches it: reading the KV caches alone takes longer.
    """
    _check_positive(tokens_per_s=tokens_per_s, weight_bytes=weight_bytes, bandwidth=bandwidth)
    left = bandwidth - tokens_per_s * kv_bytes
    if left <= 0:
        raise InvalidArgument(
            f"no batch decodes {tokens_per_s:g} tokens/s: at {kv_bytes:g} bytes of KV cache a token"
            f" the bandwidth of {bandwidth:g} bytes/s allows less than {bandwidth / kv_bytes:.1f}"
        )
    return math.ceil(tokens_per_s * weight_bytes / left)


def prefill_tokens_per_s(num_params: float, flops: float) -> float:
    """Prompt tokens a second, bound by arithmetic: each parameter is multiplied and added once a
    token (attention's own products, small at ordinary lengths, are left out).

    >>> prefill_tokens_per_s(70e9, 989e12) // 1
    7064.0
    """
    _check_positive(num_params=num_params, flops=flops)
    return flops / (2 * num_params)


def cost_per_million_tokens(price_per_hour: float, tokens_per_s: float) -> float:
    """Price of a million tokens: price_per_hour / 3600 / tokens_per_s x 10^6, in the price's unit.

    >>> round(cost_per_million_tokens(3.0, 2500), 2)
    0.33
    """
    _check_positive(price_per_hour=price_per_hour, tokens_per_s=tokens_per_s)
    return price_per_hour / 3600 / tokens_per_s * 1e6


def transfer_s(num_bytes: float, bandwidth: float) -> float:
    """Seconds to move bytes over a link, its latency not counted: num_bytes / bandwidth.

    Handing over the KV cache of 8,192 tokens of Llama-3-70B (2.5 GiB) at 200 GB/s takes 13.4 ms:

    >>> round(transfer_s(2.5 * 2**30, 200e9) * 1e3, 1)
    13.4
    """
    _check_positive(num_bytes=num_bytes, bandwidth=bandwidth)
    return num_bytes / bandwidth


def hand_over_share(kv_bytes_per_token: float, link: float, prefill_tokens_per_s: float) -> float:
    """What handing a prompt over takes, as a share of computing it: where it is near 1 or above,
    prefill and decode apart do not pay. Neither depends on the prompt's length, attention's own
    products left out.

    Llama-3-8B in bf16 keeps 128 KiB a token. On a CPU that computes 1,000 tokens a second, over
    10 and over 1 Gbit/s:

    >>> [round(hand_over_share(2**17, bits / 8, 1000), 2) for bits in (10e9, 1e9)]
    [0.1, 1.05]
    """
    _check_positive(kv_bytes_per_token=kv_bytes_per_token, link=link)
    _check_positive(prefill_tokens_per_s=prefill_tokens_per_s)
    return kv_bytes_per_token / link * prefill_tokens_per_s


def crossover_ops_per_byte(flops: float, bandwidth: float) -> float:
    """Operations a byte above which arithmetic and no longer memory bounds a kernel: flops /
    bandwidth. The A100's 312 TFLOP/s of bf16 over 2 TB/s:

    >>> crossover_ops_per_byte(312e12, 2e12)
    156.0
    """
    _check_positive(flops=flops, bandwidth=bandwidth)
    return flops / bandwidth


def decode_ops_per_byte(
    batch: int, num_params: float, weight_bytes: float, kv_bytes: float = 0.0
) -> float:
    """Operations a byte of a decode step: 2 x num_params a user, over the bytes of
    `decode_tokens_per_s`. With 2-byte weights and short contexts it is the batch itself.

    >>> decode_ops_per_byte(32, 70e9, 140e9)
    32.0
    """
    _check_positive(batch=batch, num_params=num_params, weight_bytes=weight_bytes)
    return 2 * num_params * batch / (weight_bytes + batch * kv_bytes)


def roofline_flops(ops_per_byte: float, flops: float, bandwidth: float) -> float:
    """Operations a second that a kernel of this intensity can reach: the smaller of flops and
    bandwidth x ops_per_byte (Williams, Waterman and Patterson 2009).

    >>> roofline_flops(1, 312e12, 2e12), roofline_flops(1000, 312e12, 2e12)
    (2000000000000.0, 312000000000000.0)
    """
    _check_positive(ops_per_byte=ops_per_byte, flops=flops, bandwidth=bandwidth)
    return min(flops, bandwidth * ops_per_byte)


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not (value > 0 and math.isfinite(value)):
            raise InvalidArgument(f"{name} must be finite and above 0, got {value!r}")
