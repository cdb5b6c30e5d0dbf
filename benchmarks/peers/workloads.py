"""What the systems are given, and the least time that it can take."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from llmserve.bench.machine import Rates
from llmserve.plan import active_experts
from random_models import tensors_of

# Those of GGUF files that llmserve and llama.cpp both read, in blocks of 32 or 256 weights.
# Of mixes, some tensors take more: Q5_K or Q6_K.
# Which llama.cpp knows how to mix; MXFP4 of experts, beside Q8_0.
GGUF_MIXES = {"Q4_K_M": 144 / 256, "IQ4_XS": 136 / 256, "MXFP4": 17 / 32}
# What such files have beside experts.
_BESIDE_EXPERTS = {"MXFP4": 34 / 32}
GGUF_FORMATS = {"Q8_0": 34 / 32, "Q4_0": 18 / 32, **GGUF_MIXES}
# Bytes a weight, at least: int4 has a float16 scale for 128 of them.
FORMATS = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.5 + 2 / 128, **GGUF_FORMATS}


@dataclass(frozen=True)
class Workload:
    """Prompts of these lengths, all there at the start, and tokens generated for each.

    The prompts share their first `num_shared` tokens. `is_decode`: timed from the first token on.
    """

    name: str
    prompt_lens: tuple[int, ...]
    max_tokens: tuple[int, ...]
    num_shared: int = 0
    is_decode: bool = False

    def job(self, vocab_size: int, seed: int) -> str:
        """For a worker. Each work and seed has prompts of its own, so that no system finds them
        cached."""
        draw = random.Random(f"{self.name}, {seed}")
        shared = [draw.randrange(vocab_size) for _ in range(self.num_shared)]
        prompts = [
            shared + [draw.randrange(vocab_size) for _ in range(n - self.num_shared)]
            for n in self.prompt_lens
        ]
        return json.dumps({"prompts": prompts, "max_tokens": self.max_tokens})

    def seconds(self, answer: dict[str, Any]) -> float:
        elapsed_s: float = answer["elapsed_s"]
        return elapsed_s - answer["first_s"] if self.is_decode else elapsed_s

    @property
    def num_tokens(self) -> int:
        """Tokens that a rate counts: those generated; the prompt's where only one is generated."""
        if max(self.max_tokens) == 1:
            return sum(self.prompt_lens)
        return sum(self.max_tokens) - (1 if self.is_decode else 0)

    def bound_s(self, config: dict[str, Any], form: str, rates: Rates) -> float:
        """Seconds that no program beats: the larger of the bytes at the read rate and of the
        operations at the best rate of a matrix product in that format."""
        return rates.bound_s(*self.demand(config, form), form)

    def demand(self, config: dict[str, Any], form: str) -> tuple[float, float]:
        """Bytes to read and operations to do, two a multiply-add.

        The weights are read once a step, all prompts being one step, the cache once a token that is
        generated after the first; a shared prefix is computed once.
        """
        parts = {name: int(np.prod(dims)) for name, dims in tensors_of(config)}
        head = parts.pop("lm_head.weight", None) or parts["model.embed_tokens.weight"]
        experts = sum(size for name, size in parts.items() if ".experts." in name)
        body = sum(parts.values()) - parts["model.embed_tokens.weight"] - experts
        layers = config["num_hidden_layers"]
        requests = list(zip(self.prompt_lens, self.max_tokens, strict=True))
        # Positions that the tokens run in decode steps attend to, and those of the prompts.
        decoded = sum((n - 1) * p + n * (n - 1) // 2 for p, n in requests)
        prefilled = sum(p * (p + 1) // 2 for p in self.prompt_lens)
        prefilled -= (len(requests) - 1) * self.num_shared * (self.num_shared + 1) // 2
        if "sliding_window" in config:  # behind which every other layer sees next to nothing
            decoded, prefilled = decoded / 2, prefilled / 2
        tokens = sum(n - 1 for _, n in requests)
        prompts = sum(self.prompt_lens) - (len(requests) - 1) * self.num_shared
        heads = sum(self.max_tokens)
        steps = max(self.max_tokens)
        if self.is_decode:
            prompts, prefilled, heads, steps = 0, 0, heads - 1, steps - 1
        num_experts, each = config.get("num_experts", 1), config.get("num_experts_per_tok", 1)
        is_float = form in ("float32", "bfloat16")
        element = FORMATS[form] if is_float else 2
        kv_bytes = layers * _cached_elements(config) * element
        beside = _BESIDE_EXPERTS.get(form, FORMATS[form])
        num_bytes = beside * (body + head) * steps + kv_bytes * decoded

        def expert_bytes(rows: int) -> float:
            """Of a step of so many tokens, whose experts are drawn evenly."""
            share = active_experts(num_experts, each, rows) / num_experts if rows else 0.0
            return FORMATS[form] * experts * share

        decode_steps = steps if self.is_decode else steps - 1
        num_bytes += expert_bytes(prompts) + decode_steps * expert_bytes(len(requests))
        body += experts * each / num_experts
        attention = 2 * layers * config["num_attention_heads"] * _head_elements(config)
        attention *= prefilled + decoded
        num_ops = 2 * (body * (prompts + tokens) + head * heads) + attention
        return num_bytes, num_ops


def _cached_elements(config: dict[str, Any]) -> int:
    """What a layer keeps of a token."""
    if "kv_lora_rank" in config:
        return int(config["kv_lora_rank"] + config["qk_rope_head_dim"])
    return int(2 * config["num_key_value_heads"] * config["head_dim"])


def _head_elements(config: dict[str, Any]) -> int:
    """Multiply-adds of a head, a query and a position; of latent attention those that it has where
    keys and values are made of the latents first."""
    if "kv_lora_rank" in config:
        dims = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        return int(sum(config[dim] for dim in dims))
    return int(2 * config["head_dim"])


def drawn(seed: int, count: int, low: int, high: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randint(low, high) for _ in range(count))


WORKLOADS = (
    Workload("prefill of 512", (512,), (1,)),
    Workload("prefill of 2,048", (2048,), (1,)),
    Workload("decode of 128 after 512", (512,), (128,), is_decode=True),
    Workload("32 requests, 64-256 in, 32-128 out", drawn(1, 32, 64, 256), drawn(2, 32, 32, 128)),
    Workload("16 requests, 512 shared + 32 in, 32 out", (544,) * 16, (32,) * 16, num_shared=512),
)


def chosen(parts: list[str]) -> list[Workload]:
    """The workloads whose names hold one of the parts."""
    found = [work for work in WORKLOADS if any(part in work.name for part in parts)]
    if not found:
        raise SystemExit(f"no work is named like {parts}; there is: {[w.name for w in WORKLOADS]}")
    return found
