"""Write a trained model into the package: bf16 weights, configs, tokenizer and card."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .evaluate import STORY_PROMPT, Sample
from .recipe import END_OF_TEXT_ID, MAX_POSITIONS, TURN_END_ID

_CARD = Path(__file__).with_name("card.md")


@dataclass(frozen=True, slots=True)
class Training:
    """What a training took."""

    steps: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Report:
    """What the card says about a trained model."""

    name: str
    role: str
    training: Training
    perplexity: float
    num_held_out: int
    samples: tuple[Sample, ...]


def save_weights(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> LlamaForCausalLM:
    """Write everything but the card and return the model as it loads again, in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        max_new_tokens=256,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=[END_OF_TEXT_ID, TURN_END_ID],
        pad_token_id=END_OF_TEXT_ID,
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        # The class name that transformers 4 and 5 both know.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "pad_token": tokenizer.pad_token,
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": tokenizer.chat_template,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def write_card(folder: Path, model: LlamaForCausalLM, report: Report) -> None:
    """Fill in the model card."""
    config = model.config
    text = _CARD.read_text(encoding="utf-8").format(
        name=report.name,
        role=report.role,
        num_parameters=f"{model.num_parameters():,}",
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        positions=config.max_position_embeddings,
        steps=f"{report.training.steps:,}",
        million_tokens=f"{report.training.tokens / 1e6:.1f}",
        minutes=f"{report.training.seconds / 60:.0f}",
        perplexity=f"{report.perplexity:.3f}",
        num_held_out=report.num_held_out,
        samples="\n\n".join(_quote(s) for s in report.samples),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def _quote(sample: Sample) -> str:
    text = sample.text
    if sample.prompt == STORY_PROMPT:
        text = sample.prompt + text
    else:
        question = sample.prompt.split("user\n")[1].split("<|im_end|>")[0]
        text = f"**{question}**\n\n{text}"
    return "\n".join(f"> {line}".rstrip() for line in text.split("\n"))
