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
    windows_per_step: int = 16
    # Every sixth step reads whole contexts, so that all positions are trained.
    long_every: int = 6
    # Early on, this share of the windows of a step repeats shuffled tokens: see data.repeat.
    copy_share: float = 0.25
    copy_until: float = 0.4  # share of the steps
    head_dim: int = 32
    warmup: float = 0.02  # share of the steps
    decay: float = 0.5  # share of the steps over which the rate falls to zero, at the end
    max_grad_norm: float = 1.0

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one batch; long and short steps hold the same number."""
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
        if step % self.long_every == self.long_every - 1:
            return stream.windows(step, self.tokens_per_step // MAX_POSITIONS, MAX_POSITIONS)
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
    """Return an untrained float32 model; its weights depend on INIT_SEED alone."""
    torch.manual_seed(INIT_SEED)
    return LlamaForCausalLM(recipe.config())


def next_token_loss(
    model: LlamaForCausalLM, ids: torch.Tensor, teacher: LlamaForCausalLM | None = None
) -> torch.Tensor:
    """Return the mean cross-entropy in nats against the next token of `ids` [B, T].

    With a `teacher`, the target is the teacher's distribution: a draft is worth what it agrees
    with its target, not with the text.
    """
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits.flatten(0, 1)
    if teacher is None:
        return F.cross_entropy(logits, ids[:, 1:].flatten())
    with torch.no_grad():
        wanted = teacher(input_ids=ids[:, :-1], use_cache=False).logits.flatten(0, 1).softmax(-1)
    return F.cross_entropy(logits, wanted)
