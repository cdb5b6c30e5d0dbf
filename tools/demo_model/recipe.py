"""The shapes of the two models, and how each is trained."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from .data import TokenStream, repeat
from .muon import Muon
from .tokenizer import VOCAB_SIZE

MAX_POSITIONS = 2048
INIT_SEED = 3
NAME_WEIGHT = 4.0  # a story of 170 tokens names someone about 15 times
OUTPUT_GAIN = 0.1  # keeps the sum of the heads near the size of the embeddings
# Ids of <|endoftext|> (ends a text) and <|im_end|> (ends a turn); see tokenizer.SPECIAL_TOKENS.
END_OF_TEXT_ID, TURN_END_ID = 0, 2


@dataclass(frozen=True, slots=True)
class Recipe:
    """A model's shape and training. The learning rates are peaks."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    matrix_lr: float
    other_lr: float
    window: int = 256
    windows_per_step: int = 12
    # After the first half, every fourth step reads whole contexts, so that all positions are
    # trained; not earlier, because they cost nearly twice as much a token.
    long_every: int = 4
    long_windows: int = 2
    long_from: float = 0.5  # share of the steps
    # Early on, this share of the windows of a step repeats shuffled tokens: see data.repeat.
    copy_share: float = 0.25
    copy_until: float = 0.3  # share of the steps
    head_dim: int = 32
    warmup: float = 0.02  # share of the steps
    decay: float = 0.5  # share of the steps over which the rate falls to zero, at the end
    max_grad_norm: float = 1.0

    @property
    def tokens_per_step(self) -> int:
        """Tokens in a batch of short windows; the long ones hold somewhat more."""
        return self.window * self.windows_per_step

    def config(self) -> LlamaConfig:
        """Return the architecture as transformers spells it."""
        return LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=MAX_POSITIONS,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            bos_token_id=END_OF_TEXT_ID,
            eos_token_id=[END_OF_TEXT_ID, TURN_END_ID],
            pad_token_id=END_OF_TEXT_ID,
        )

    def schedule(self, progress: float) -> float:
        """Return the factor of the learning rate: warm up, hold, fall in a straight line."""
        if progress < self.warmup:
            return (progress + 1e-3) / (self.warmup + 1e-3)
        return min(1.0, (1.0 - progress) / self.decay)

    def batch(self, stream: TokenStream, step: int, num_steps: int) -> torch.Tensor:
        """Return the ids of one step, [windows, length] int64."""
        is_late = step >= self.long_from * num_steps
        if is_late and step % self.long_every == 0:
            return stream.windows(step, self.long_windows, MAX_POSITIONS)
        ids = stream.windows(step, self.windows_per_step, self.window)
        if step < self.copy_until * num_steps:
            num_copies = int(self.copy_share * self.windows_per_step)
            ids[-num_copies:] = repeat(ids[-num_copies:], step)
        return ids

    def optimizers(self, model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
        """Muon for the matrices inside the layers, AdamW for embedding and norms.

        Muon: Jordan et al., 2024, "Muon: an optimizer for hidden layers in neural networks".
        """
        matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
        chosen = {id(p) for p in matrices}
        others = [p for p in model.parameters() if id(p) not in chosen]
        optimizers: list[torch.optim.Optimizer] = [
            Muon(matrices, lr=self.matrix_lr, weight_decay=0.05, momentum=0.95),
            torch.optim.AdamW(others, lr=self.other_lr, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["initial_lr"] = group["lr"]
        return optimizers


TARGET = Recipe(
    "model",
    hidden_size=256,
    intermediate_size=512,
    num_layers=5,
    num_heads=8,
    num_kv_heads=2,
    matrix_lr=0.02,
    other_lr=4e-3,
)
DRAFT = Recipe(
    "draft",
    hidden_size=64,
    intermediate_size=384,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    matrix_lr=0.02,
    other_lr=6e-3,
)


def build(recipe: Recipe) -> LlamaForCausalLM:
    """Return an untrained float32 model; its weights depend on INIT_SEED alone.

    Each head's output projection starts as the transpose of its value projection, so that
    attending to a token raises its logit: the model need only learn where to look. After
    Trockman and Kolter, 2023, "Mimetic initialization of self-attention layers".
    """
    torch.manual_seed(INIT_SEED)
    model = LlamaForCausalLM(recipe.config())
    group = recipe.num_heads // recipe.num_kv_heads
    for layer in model.model.layers:
        attention = layer.self_attn
        torch.nn.init.orthogonal_(attention.v_proj.weight)
        values = attention.v_proj.weight.detach().view(-1, recipe.head_dim, recipe.hidden_size)
        copies = values.repeat_interleave(group, dim=0).flatten(0, 1).T
        attention.o_proj.weight.data = OUTPUT_GAIN * copies.contiguous()
    return model


def next_token_loss(
    model: LlamaForCausalLM,
    ids: torch.Tensor,
    teacher: LlamaForCausalLM | None = None,
    names: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the mean cross-entropy in nats against the next token of `ids` [B, T].

    `names` [V] bool marks the tokens that are names: one that was said before counts more,
    because a story stands or falls with who is who, and few of its tokens say so.

    With a `teacher`, the target is the teacher's distribution: a draft is worth what it agrees
    with its target, not with the text.
    """
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits.flatten(0, 1)
    if teacher is None:
        losses = F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
        weights = torch.ones_like(losses) if names is None else _weights(ids, names)
        return (losses * weights).sum() / weights.sum()
    with torch.no_grad():
        wanted = teacher(input_ids=ids[:, :-1], use_cache=False).logits.flatten(0, 1).softmax(-1)
    return F.cross_entropy(logits, wanted)


def _weights(ids: torch.Tensor, names: torch.Tensor) -> torch.Tensor:
    """Return what each next token of `ids` [B, T] counts, flat: [B * (T - 1)] float32."""
    weights = torch.ones(ids.shape)
    for row, counts in zip(ids, weights, strict=True):
        at = names[row].nonzero().flatten()
        mentions = row[at]
        is_known = (mentions[:, None] == mentions[None, :]).tril(-1).any(1)
        counts[at[is_known]] = NAME_WEIGHT
    return weights[:, 1:].flatten()
