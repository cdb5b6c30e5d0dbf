"""The frozen target, and the text it is asked about."""

import itertools
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from .heads import Shape, Target

DATA_SEED = 5


class TargetModel:
    """A causal language model of transformers' that is read and never trained."""

    def __init__(self, folder: str) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32
        ).eval()
        self.model.requires_grad_(False)
        config = self.model.config
        num_heads = config.num_attention_heads
        self.num_layers: int = config.num_hidden_layers
        rope = getattr(config, "rope_parameters", None) or {}
        self.shape = Shape(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=num_heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
            vocab_size=config.vocab_size,
            rms_norm_eps=getattr(config, "rms_norm_eps", 1e-5),
            rope_theta=float(rope.get("rope_theta", getattr(config, "rope_theta", 10000.0))),
        )

    @property
    def head(self) -> Tensor:
        """[V, H]"""
        return self.model.get_output_embeddings().weight.detach()

    def default_layers(self) -> tuple[int, int, int]:
        """The layers whose input EAGLE-3 reads: early, middle, late, and all different."""
        n = self.num_layers
        layers = (2, n // 2, n - 3)
        return layers if layers[0] < layers[1] < layers[2] else (1, max(2, n // 2), n - 1)

    @torch.no_grad()
    def read(self, ids: Tensor, layers: tuple[int, ...]) -> Target:
        """Run the target over ids [B, T]. Layer L's input is what `layers` names L."""
        out = self.model(input_ids=ids, output_hidden_states=True, use_cache=False)
        return Target(
            ids=ids,
            embeddings=self.model.get_input_embeddings()(ids),
            entering=tuple(out.hidden_states[layer] for layer in layers),
            hidden=out.hidden_states[-1],
            logits=out.logits.float(),
        )


class Windows:
    """Windows of a tokenized text. Which ones a step reads depends on the step alone, so that a
    training that goes on sees the same data."""

    def __init__(self, tokens: Tensor, length: int) -> None:
        """`tokens` [N] int64."""
        if len(tokens) <= length:
            raise SystemExit(f"the text has {len(tokens)} tokens; a window takes {length}")
        self.tokens = tokens
        self.length = length

    def batch(self, step: int, num_windows: int) -> Tensor:
        source = torch.Generator().manual_seed(DATA_SEED * 1_000_003 + step)
        last = len(self.tokens) - self.length
        begins = torch.randint(last, (num_windows,), generator=source)
        return torch.stack([self.tokens[begin : begin + self.length] for begin in begins])


def encode_text(folder: str, path: Path | None, max_tokens: int) -> Tensor:
    """Ids [N] of a text file, or, without one, of the corpus of the demo model."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if path is not None:
        text = path.read_text(encoding="utf-8")
        return torch.tensor(tokenizer(text)["input_ids"][:max_tokens])
    from ..demo_model.conversation import END_OF_TEXT
    from ..demo_model.corpus import documents

    ids: list[int] = []
    stream = documents(DATA_SEED)
    while len(ids) < max_tokens:
        batch = [text + END_OF_TEXT for text in itertools.islice(stream, 500)]
        for encoded in tokenizer(batch)["input_ids"]:
            ids.extend(encoded)
    return torch.tensor(ids[:max_tokens])


def most_frequent(tokens: Tensor, vocab_size: int, count: int) -> Tensor:
    """The `count` most frequent ids of a text, increasing; of those that are as frequent, the
    lower ones."""
    counts = torch.bincount(tokens, minlength=vocab_size)
    order = torch.sort(counts, descending=True, stable=True).indices
    return order[:count].sort().values
