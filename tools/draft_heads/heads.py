"""The heads, as they are trained and as their published layouts name their tensors.

Shapes: B sequences, T tokens, H the target's width, V its vocabulary, D the draft vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    """What a head takes over from its target, and its own attention and feed-forward."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float


@dataclass(frozen=True, slots=True)
class Target:
    """What the frozen target says of a batch `ids` [B, T], all float32."""

    ids: Tensor  # [B, T] int64
    embeddings: Tensor  # [B, T, H]
    entering: tuple[Tensor, ...]  # [B, T, H] each: the residual that enters the wanted layers
    hidden: Tensor  # [B, T, H], behind the final norm
    logits: Tensor  # [B, T, V]


class RmsNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    """Causal attention over what is certain, and over a chain of drafts behind each position.

    Pass 0 reads the target's features at all positions. Pass s goes on from pass s - 1: what stands
    at index i is then s positions behind i and sees the certain ones up to i and its own chain, as
    when drafting. `past` are keys and values of the earlier passes, [B, heads, T, D] each.
    """

    def __init__(self, shape: Shape, in_features: int) -> None:
        super().__init__()
        self.shape = shape
        out = shape.num_heads * shape.head_dim
        kv = shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(in_features, out, bias=False)
        self.k_proj = nn.Linear(in_features, kv, bias=False)
        self.v_proj = nn.Linear(in_features, kv, bias=False)
        self.o_proj = nn.Linear(out, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        shape = self.shape
        batch, length, _ = x.shape

        def heads(y: Tensor, count: int) -> Tensor:
            return y.view(batch, length, count, shape.head_dim).transpose(1, 2)

        positions = torch.arange(length) + len(past)
        q = rotate(heads(self.q_proj(x), shape.num_heads), positions, shape.rope_theta)
        k = rotate(heads(self.k_proj(x), shape.num_kv_heads), positions, shape.rope_theta)
        v = heads(self.v_proj(x), shape.num_kv_heads)
        past.append((k, v))
        group = shape.num_heads // shape.num_kv_heads
        keys = [key.repeat_interleave(group, 1) for key, _ in past]
        values = [value.repeat_interleave(group, 1) for _, value in past]
        certain = q @ keys[0].transpose(-1, -2)  # [B, heads, T, T]
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = [certain.masked_fill(later, float("-inf"))]
        scores += [(q * key).sum(-1, keepdim=True) for key in keys[1:]]
        weights = (torch.cat(scores, -1) * shape.head_dim**-0.5).softmax(-1)
        out = weights[..., :length] @ values[0]
        for i, value in enumerate(values[1:]):
            out = out + weights[..., length + i, None] * value
        return self.o_proj(out.transpose(1, 2).flatten(2))


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Turn the halves of the last dimension of x [B, heads, T, D] by their positions [T]."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class GatedMlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Eagle3Layer(nn.Module):
    """A decoder layer whose attention reads an embedding beside a feature, each normed."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = RmsNorm(size, eps)
        self.hidden_norm = RmsNorm(size, eps)
        self.self_attn = Attention(shape, 2 * size)
        self.post_attention_layernorm = RmsNorm(size, eps)
        self.mlp = GatedMlp(shape)

    def forward(
        self, embedding: Tensor, feature: Tensor, past: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        read = torch.cat([self.input_layernorm(embedding), self.hidden_norm(feature)], -1)
        x = feature + self.self_attn(read, past)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3(nn.Module):
    """Li et al. 2025, "EAGLE-3". Features of three layers, an output vocabulary of its own, and
    training on its own recycled outputs."""

    def __init__(self, shape: Shape, draft_tokens: Tensor) -> None:
        """`draft_tokens` [D] int64: the target's ids that can be drafted, increasing."""
        super().__init__()
        size = shape.hidden_size
        self.fc = nn.Linear(3 * size, size, bias=False)
        self.midlayer = Eagle3Layer(shape)
        self.norm = RmsNorm(size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(size, len(draft_tokens), bias=False)
        t2d = torch.zeros(shape.vocab_size, dtype=torch.bool)
        t2d[draft_tokens] = True
        self.register_buffer("d2t", draft_tokens - torch.arange(len(draft_tokens)))
        self.register_buffer("t2d", t2d)

    @property
    def draft_tokens(self) -> Tensor:
        return self.d2t + torch.arange(len(self.d2t))

    def passes(self, target: Target, num_passes: int) -> list[Tensor]:
        """Logits over the draft vocabulary, [B, T - 1 - s, D] of pass s: what is drafted for the
        token s + 2 behind each index."""
        feature = self.fc(torch.cat(target.entering, -1))
        past: list[tuple[Tensor, Tensor]] = []
        all_logits = []
        for s in range(num_passes):
            embedding = shifted(target.embeddings, s + 1)
            feature = self.midlayer(embedding, feature, past)
            logits = self.lm_head(self.norm(feature))
            all_logits.append(logits[:, : target.ids.shape[1] - 1 - s])
        return all_logits

    def loss(self, target: Target, num_passes: int) -> Tensor:
        """Cross-entropy against the target's distribution over the draft vocabulary; a later pass
        counts 0.8 of the one before."""
        wanted = target.logits[..., self.draft_tokens].softmax(-1)
        total = torch.zeros(())
        for s, logits in enumerate(self.passes(target, num_passes)):
            losses = -(wanted[:, 1 + s :] * logits.log_softmax(-1)).sum(-1)
            total = total + 0.8**s * losses.mean()
        return total

    def drafted(self, target: Target, num_passes: int) -> list[Tensor]:
        return [self.draft_tokens[x.argmax(-1)] for x in self.passes(target, num_passes)]


class EagleLayer(nn.Module):
    """A decoder layer without a norm before its attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape, shape.hidden_size)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = GatedMlp(shape)

    def forward(self, x: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        x = x + self.self_attn(x, past)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle(nn.Module):
    """Li et al. 2024, "EAGLE": goes on in the target's features and reads them with its head."""

    def __init__(self, shape: Shape, head: Tensor) -> None:
        """`head` [V, H] is the target's, which is not trained and not written."""
        super().__init__()
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=True)
        self.layers = nn.ModuleList([EagleLayer(shape)])
        self.register_buffer("head", head, persistent=False)

    def features(self, target: Target, num_passes: int) -> list[Tensor]:
        """[B, T - 1 - s, H] of pass s: the target's feature s + 1 behind each index, as guessed."""
        feature = target.hidden
        past: list[tuple[Tensor, Tensor]] = []
        found = []
        for s in range(num_passes):
            embedding = shifted(target.embeddings, s + 1)
            feature = self.layers[0](self.fc(torch.cat([embedding, feature], -1)), past)
            found.append(feature[:, : target.ids.shape[1] - 1 - s])
        return found

    def loss(self, target: Target, num_passes: int) -> Tensor:
        """Smooth L1 of the features, and a tenth of the cross-entropy of what the head reads in
        them; a later pass counts 0.8 of the one before."""
        wanted = target.logits.softmax(-1)
        total = torch.zeros(())
        for s, feature in enumerate(self.features(target, num_passes)):
            regression = F.smooth_l1_loss(feature, target.hidden[:, 1 + s :])
            logits = (feature @ self.head.T).log_softmax(-1)
            classes = -(wanted[:, 1 + s :] * logits).sum(-1).mean()
            total = total + 0.8**s * (regression + 0.1 * classes)
        return total

    def drafted(self, target: Target, num_passes: int) -> list[Tensor]:
        return [(x @ self.head.T).argmax(-1) for x in self.features(target, num_passes)]


class MedusaBlock(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class Medusa(nn.Module):
    """Cai et al. 2024, "Medusa": a head for each of the next tokens but one, all of the same
    feature. A head begins as the target's own."""

    def __init__(self, shape: Shape, head: Tensor, num_heads: int, num_layers: int = 1) -> None:
        super().__init__()
        self.heads = nn.ModuleList()
        for _ in range(num_heads):
            blocks = [MedusaBlock(shape.hidden_size) for _ in range(num_layers)]
            out = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
            out.weight.data.copy_(head)
            self.heads.append(nn.Sequential(*blocks, out))

    def loss(self, target: Target, num_passes: int) -> Tensor:
        """Cross-entropy against the target's distribution; a later head counts 0.8 of the one
        before."""
        wanted = target.logits.softmax(-1)
        total = torch.zeros(())
        for s, head in enumerate(self.heads[:num_passes]):
            logits = head(target.hidden[:, : -1 - s]).log_softmax(-1)
            total = total - 0.8**s * (wanted[:, 1 + s :] * logits).sum(-1).mean()
        return total

    def drafted(self, target: Target, num_passes: int) -> list[Tensor]:
        heads = list(self.heads[:num_passes])
        return [head(target.hidden[:, : -1 - s]).argmax(-1) for s, head in enumerate(heads)]


def shifted(x: Tensor, by: int) -> Tensor:
    """x [B, T, ...] with index i holding what stood at i + by; the end is filled with zeros, and
    nothing that is kept reads it."""
    return torch.cat([x[:, by:], torch.zeros_like(x[:, :by])], 1)


@torch.no_grad()
def acceptance(head: nn.Module, target: Target, num_passes: int) -> list[float]:
    """Share of positions, by draft, at which a draft is the target's most probable token, of those
    at which all drafts before it were and the text so far is the target's own choice."""
    choices = target.logits.argmax(-1)
    rates = []
    still: Tensor | None = None
    for s, drafted in enumerate(head.drafted(target, num_passes)):
        # The text goes on as the target chose up to the draft, or its context would not come up.
        usual = choices[:, s : target.ids.shape[1] - 1] == target.ids[:, 1 + s :]
        before = usual if still is None else still[:, : usual.shape[1]] & usual
        right = drafted == choices[:, 1 + s :]
        rates.append(right[before].float().mean().item() if before.any() else 0.0)
        still = before & right
    return rates
