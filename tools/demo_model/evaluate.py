"""Held-out perplexity, agreement of draft and model, and samples."""

import itertools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from .conversation import END_OF_TEXT
from .corpus import documents
from .data import HELD_OUT_SEED

NUM_HELD_OUT = 400
WINDOW = 1024
STORY_PROMPT = "Once upon a time"


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt and what the model made of it."""

    prompt: str
    text: str
    has_ended: bool


def held_out_windows(tokenizer: PreTrainedTokenizerFast, num_documents: int) -> torch.Tensor:
    """Return held-out documents end to end as [windows, WINDOW] int64 ids.

    They come from the generator with a seed that training never uses. Short questions can
    occur in both; stories practically never do.
    """
    texts = itertools.islice(documents(HELD_OUT_SEED), num_documents)
    encoded = tokenizer([text + END_OF_TEXT for text in texts])["input_ids"]
    ids = list(itertools.chain.from_iterable(encoded))
    usable = len(ids) // WINDOW * WINDOW
    return torch.tensor(ids[:usable]).view(-1, WINDOW)


@torch.no_grad()
def perplexity(model: LlamaForCausalLM, windows: torch.Tensor) -> float:
    """Return exp of the mean cross-entropy per token of `windows` [N, T]."""
    total = 0.0
    for row in windows.split(4):
        logits = model(input_ids=row[:, :-1], use_cache=False).logits.float()
        total += F.cross_entropy(logits.flatten(0, 1), row[:, 1:].flatten(), reduction="sum").item()
    return math.exp(total / (windows.shape[0] * (windows.shape[1] - 1)))


@torch.no_grad()
def agreement(draft: LlamaForCausalLM, model: LlamaForCausalLM, windows: torch.Tensor) -> float:
    """Return the share of positions at which both models rank the same token first."""
    hits = [
        (draft(input_ids=row).logits.argmax(-1) == model(input_ids=row).logits.argmax(-1)).float()
        for row in windows.split(4)
    ]
    return torch.cat(hits).mean().item()


@torch.no_grad()
def sample(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str, seed: int
) -> Sample:
    """Continue `prompt` with the sampling of the model's generation config."""
    torch.manual_seed(seed)
    inputs = tokenizer(prompt, return_tensors="pt")
    ids = model.generate(**inputs)[0, inputs["input_ids"].shape[1] :]
    stops = model.generation_config.eos_token_id
    return Sample(prompt, tokenizer.decode(ids, skip_special_tokens=True), ids[-1].item() in stops)


def chat_prompt(tokenizer: PreTrainedTokenizerFast, question: str) -> str:
    """Return the text of a chat that waits for the answer to `question`."""
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert isinstance(text, str)
    return text
