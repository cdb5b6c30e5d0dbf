"""A Llama or Qwen3 of random weights as a reader of PyTorch's documentation would write it: what
the same GPU does without an engine. Fused projections, `scaled_dot_product_attention`, a cache of
whole rows; decoding one row at a time as a CUDA graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class TorchModel:
    """`config` is one of random_models.SHAPES; all of it lies on `device`, in bf16."""

    def __init__(
        self, config: dict[str, Any], device: str, max_batch: int, max_context: int
    ) -> None:
        self.config, self.device = config, device
        width, ffn, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        generator = torch.Generator(device).manual_seed(0)

        def weight(rows: int, columns: int) -> Tensor:
            w = torch.empty(rows, columns, device=device, dtype=torch.bfloat16)
            return w.normal_(0, columns**-0.5, generator=generator)

        def ones(n: int) -> Tensor:
            return torch.ones(n, device=device, dtype=torch.bfloat16)

        self.embedding = weight(config["vocab_size"], width)
        self.head = (
            self.embedding if config["tie_word_embeddings"] else weight(config["vocab_size"], width)
        )
        self.final_norm = ones(width)
        self.layers = [
            {
                "norm": ones(width),
                "qkv": weight((self.heads + 2 * self.kv_heads) * dim, width),
                "q_norm": ones(dim) if config["model_type"] == "qwen3" else None,
                "k_norm": ones(dim) if config["model_type"] == "qwen3" else None,
                "out": weight(width, self.heads * dim),
                "mlp_norm": ones(width),
                "gate_up": weight(2 * ffn, width),
                "down": weight(width, ffn),
            }
            for _ in range(config["num_hidden_layers"])
        ]
        shape = (2, max_batch, self.kv_heads, max_context, dim)
        self.cache = [torch.zeros(shape, device=device, dtype=torch.bfloat16) for _ in self.layers]
        powers = torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim
        self.frequencies = config["rope_theta"] ** -powers

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor, positions: Tensor, places: Tensor, context: int, mask: Tensor | None
    ) -> Tensor:
        """Logits [B, V] of the last of tokens [B, t]. positions [B, t] turn; keys and values go to
        places [t] of the rows; attention sees the first `context` of them, as the mask has it, or
        causally from the first place on without one."""
        batch, count = tokens.shape
        dim = self.config["head_dim"]
        eps = self.config.get("rms_norm_eps", 1e-6)
        angles = positions[:, None, :, None] * self.frequencies  # [B, 1, t, dim / 2]
        cosine, sine = angles.cos().bfloat16(), angles.sin().bfloat16()

        def turn(x: Tensor) -> Tensor:
            a, b = x.chunk(2, -1)
            return torch.cat((a * cosine - b * sine, b * cosine + a * sine), -1)

        x = F.embedding(tokens, self.embedding)
        for layer, cache in zip(self.layers, self.cache, strict=True):
            h = F.rms_norm(x, x.shape[-1:], layer["norm"], eps)
            heads = F.linear(h, layer["qkv"]).view(batch, count, -1, dim).transpose(1, 2)
            q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), 1)
            if layer["q_norm"] is not None:
                q = F.rms_norm(q, (dim,), layer["q_norm"], eps)
                k = F.rms_norm(k, (dim,), layer["k_norm"], eps)
            cache[0, :batch].index_copy_(2, places, turn(k))
            cache[1, :batch].index_copy_(2, places, v)
            seen = cache[:, :batch, :, :context]
            attended = F.scaled_dot_product_attention(
                turn(q), seen[0], seen[1], mask, is_causal=mask is None, enable_gqa=True
            )
            x = x + F.linear(attended.transpose(1, 2).reshape(batch, count, -1), layer["out"])
            h = F.rms_norm(x, x.shape[-1:], layer["mlp_norm"], eps)
            gate, up = F.linear(h, layer["gate_up"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer["down"])
        last = F.rms_norm(x[:, -1], x.shape[-1:], self.final_norm, eps)
        return F.linear(last, self.head)

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def integers(self, *values: int) -> Tensor:
        return torch.tensor(values, device=self.device)


@torch.inference_mode()
def prefill_seconds(model: TorchModel, num_tokens: int) -> float:
    """One prompt, the best of three after one that is not timed."""
    tokens = torch.arange(num_tokens, device=model.device)[None] % model.config["vocab_size"]
    places = torch.arange(num_tokens, device=model.device)
    best = float("inf")
    for _ in range(4):
        model.synchronize()
        start = time.perf_counter()
        model.forward(tokens, places[None], places, num_tokens, None)
        model.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


@torch.inference_mode()
def decode_seconds(model: TorchModel, start: int, num_steps: int) -> float:
    """A greedy step of one row whose context grows from `start`: a CUDA graph where there is CUDA,
    over a cache that is as wide as the last step needs."""
    width = start + num_steps
    token, place = model.integers(1)[None], model.integers(start)
    columns = torch.arange(width, device=model.device)

    def step() -> None:
        mask = (columns <= place)[None, None, None]
        logits = model.forward(token, place[None], place, width, mask)
        token.copy_(logits.argmax(-1, keepdim=True))
        place.add_(1)

    run: Callable[[], object] = step
    if model.device == "cuda":
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            step()
        model.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
    best = float("inf")
    for _ in range(3):
        place.fill_(start)
        model.synchronize()
        begin = time.perf_counter()
        for _ in range(num_steps):
            run()
        model.synchronize()
        best = min(best, (time.perf_counter() - begin) / num_steps)
    return best


@torch.inference_mode()
def generate_seconds(
    model: TorchModel,
    prompts: list[list[int]],
    max_tokens: list[int],
    batch: int,
    temperature: float,
) -> float:
    """Batches of `batch` requests one after another, longest outputs first: prompts filled up at
    the left, and every row drawn until the batch's longest is done."""
    order = sorted(range(len(prompts)), key=lambda i: -max_tokens[i])
    model.synchronize()
    start = time.perf_counter()
    for begin in range(0, len(order), batch):
        chosen = order[begin : begin + batch]
        width = max(len(prompts[i]) for i in chosen)
        steps = max(max_tokens[i] for i in chosen)
        fill = torch.tensor([width - len(prompts[i]) for i in chosen], device=model.device)
        rows = [[0] * (width - len(prompts[i])) + prompts[i] for i in chosen]
        tokens = torch.tensor(rows, device=model.device)
        columns = torch.arange(width + steps, device=model.device)
        is_there = (columns >= fill[:, None])[:, None, None]  # [B, 1, 1, L]
        places = columns[:width]
        positions = (places - fill[:, None]).clamp(min=0)
        # Rows that fill up see themselves, since a row that sees nothing is NaN.
        causal = places[:, None] >= places
        mask = causal & is_there[..., :width] | torch.eye(width, device=model.device).bool()
        logits = model.forward(tokens, positions, places, width, mask)
        for step in range(steps):
            weights = (logits.float() / temperature).softmax(-1)
            tokens = torch.multinomial(weights, 1)
            if step == steps - 1:
                break
            place = columns[width + step : width + step + 1]
            context = width + step + 1
            logits = model.forward(
                tokens, place - fill[:, None], place, context, is_there[..., :context]
            )
        tokens.tolist()  # somebody wants them
    model.synchronize()
    return time.perf_counter() - start


def attention_seconds(
    device: str, batch: int, heads: int, kv_heads: int, dim: int, context: int, queries: int = 1
) -> float:
    """Attention over contiguous keys and values, of a token a sequence or, causal, of all of them;
    the best of a few rounds of calls."""
    shape = (batch, kv_heads, context, dim)
    keys, values = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(batch, heads, queries, dim, device=device, dtype=torch.bfloat16)
    is_prompt = queries > 1
    count = 20 if device == "cuda" else 1
    best = float("inf")
    with torch.inference_mode():
        for _ in range(4):
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                F.scaled_dot_product_attention(
                    q, keys, values, is_causal=is_prompt, enable_gqa=True
                )
            if device == "cuda":
                torch.cuda.synchronize()
            best = min(best, (time.perf_counter() - start) / count)
    return best
