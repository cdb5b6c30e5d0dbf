"""Checkpoints of models that see images run as the text models within them.

test_architectures.py compares each with transformers; here are the files' layouts, what of them is
left out, and what the config and the head say of each other.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import (
    FAMILIES,
    VOCAB_SIZE,
    WRAPPED,
    checkpoint,
    copy_checkpoint,
    edit_config,
    make_checkpoint,
)
from llmserve import LLM, CorruptFile, NotSupported, _core
from model_runner import PagedRunner
from safetensors.numpy import load_file, save_file

Tensors = dict[str, np.ndarray]
# As tests/checkpoints.py has their text models by themselves.
BY_ITSELF = [family for family in WRAPPED if family.partition(":")[2] in FAMILIES]
# What stands before the text model's "model." and "lm_head.", and before the other parts.
LAYOUTS = {
    "transformers 5": ("model.language_model.", "lm_head.", "model."),
    "transformers 4": ("language_model.model.", "language_model.lm_head.", ""),
    "flat": ("model.", "lm_head.", ""),
    "idefics": ("model.text_model.", "lm_head.", "model."),
}
TOKENS = np.random.default_rng(3).integers(3, VOCAB_SIZE, 24).tolist()


def split(path: Path) -> tuple[Tensors, Tensors]:
    """The text model's tensors, as they are called by itself, and the others."""
    text: Tensors = {}
    others: Tensors = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        for model, head, _ in LAYOUTS.values():
            if name.startswith(head):
                text["lm_head." + name.removeprefix(head)] = tensor
                break
            rest = name.removeprefix(model)
            if name.startswith(model) and rest.startswith(("layers.", "embed_tokens.", "norm.")):
                text["model." + rest] = tensor
                break
        else:
            others[name.removeprefix("model.")] = tensor
    return text, others


def rewrite(path: Path, change: Callable[[Tensors], Tensors]) -> None:
    save_file(change(load_file(path / "model.safetensors")), path / "model.safetensors")


def logits(path: Path) -> np.ndarray:
    return PagedRunner(path).run(TOKENS)


def test_every_wrapper_of_the_registry_has_a_case() -> None:
    configs = [json.loads((checkpoint(case) / "config.json").read_text()) for case in WRAPPED]
    names = {config["architectures"][0] for config in configs}
    published = {"KimiK25ForConditionalGeneration"}  # which transformers spells otherwise
    assert names | published == {name for name, _ in _core.supported_wrappers()}


@pytest.mark.parametrize("case", BY_ITSELF)
def test_the_text_part_is_the_text_model_by_itself(case: str, tmp_path: Path) -> None:
    path = checkpoint(case)
    config = json.loads((path / "config.json").read_text())
    alone = {**config["text_config"], "tie_word_embeddings": False, "dtype": config["dtype"]}
    (tmp_path / "config.json").write_text(json.dumps(alone))
    text, others = split(path)
    save_file(text, tmp_path / "model.safetensors")
    assert others
    assert np.array_equal(logits(path), logits(tmp_path))
    whole, part = (_core.inspect_checkpoint(str(p)) for p in (path, tmp_path))
    assert whole["plan"] == part["plan"]
    assert whole["config"] == {
        **part["config"],
        "text_part_of": config["architectures"][0],
        "bos_token_ids": whole["config"]["bos_token_ids"],
    }
    names = ("name", "shape", "num_bytes")
    assert [[tensor[key] for key in names] for tensor in whole["tensors"]] == [
        [tensor[key] for key in names] for tensor in part["tensors"]
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", ["gemma3:gemma3_text", "qwen2_5_vl:qwen2_5_vl_text"])
def test_every_layout_of_names_gives_the_same_bits(case: str, layout: str, tmp_path: Path) -> None:
    path = copy_checkpoint(checkpoint(case), tmp_path / "renamed")
    text, others = split(path)
    model, head, other = LAYOUTS[layout]
    renamed = {other + name: tensor for name, tensor in others.items()}
    for name, tensor in text.items():
        first, _, rest = name.partition(".")
        renamed[(head if first == "lm_head" else model) + rest] = tensor
    save_file(renamed, path / "model.safetensors")
    assert np.array_equal(logits(path), logits(checkpoint(case)))
    assert _core.inspect_checkpoint(str(path))["plan"]["unused_tensors"] == []


def test_other_parts_are_not_read(tmp_path: Path) -> None:
    path = copy_checkpoint(checkpoint("llava_next:granite"), tmp_path / "nan")
    parts = ("vision_tower.", "multi_modal_projector.", "image_newline")

    def spoil(tensors: Tensors) -> Tensors:
        return {n: t * np.nan if n.startswith(parts) else t for n, t in tensors.items()}

    rewrite(path, spoil)
    assert np.isnan(load_file(path / "model.safetensors")["image_newline"]).all()
    assert np.isfinite(logits(path)).all()


def test_what_is_in_no_known_part_is_unused_as_ever(tmp_path: Path) -> None:
    path = copy_checkpoint(checkpoint("mistral3:mistral"), tmp_path / "more")
    more = ("language_model.model.layers.0.self_attn.sinks", "model.audio_tower.a", "visualizer.a")
    rewrite(path, lambda tensors: {**tensors, **{name: np.ones(3, np.float32) for name in more}})
    unused = _core.inspect_checkpoint(str(path))["plan"]["unused_tensors"]
    assert unused == ["model.audio_tower.a", "model.layers.0.self_attn.sinks", "visualizer.a"]


def test_a_head_in_the_file_is_used_whatever_the_config_says(tmp_path: Path) -> None:
    path = copy_checkpoint(checkpoint("mistral3:mistral"), tmp_path / "head")
    edit_config(path, tie_word_embeddings=True)
    assert np.array_equal(logits(path), logits(checkpoint("mistral3:mistral")))
    edit_config(path, remove=("tie_word_embeddings",))
    assert np.array_equal(logits(path), logits(checkpoint("mistral3:mistral")))


def test_a_file_without_a_head_is_tied_unless_the_config_says_no(tmp_path: Path) -> None:
    tied = checkpoint("gemma3:gemma3_text", tie_word_embeddings=True)
    assert not any("lm_head" in name for name in load_file(tied / "model.safetensors"))
    path = copy_checkpoint(tied, tmp_path / "unsaid")
    for text in (True, None):  # said by the text config alone, by nobody
        config = json.loads((path / "config.json").read_text())["text_config"]
        edit_config(
            path,
            remove=("tie_word_embeddings",),
            text_config={**config, "tie_word_embeddings": text},
        )
        assert np.array_equal(logits(path), logits(tied))
    edit_config(path, tie_word_embeddings=False)
    with pytest.raises(CorruptFile, match=r'tensor "lm_head.weight" \[320, 48\] is absent'):
        logits(path)


def test_shards_give_the_bits_of_the_single_file(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "gemma3:gemma3_text", max_shard_size="40KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert np.array_equal(logits(tmp_path), logits(checkpoint("gemma3:gemma3_text")))


@pytest.mark.parametrize("case", ["gemma3:gemma3_text", "mistral3:mistral"])
def test_a_config_by_itself_has_the_plan_of_its_folder(case: str) -> None:
    path = checkpoint(case)
    whole, config = (LLM.plan(str(p), max_model_len=64) for p in (path, path / "config.json"))
    assert config.weight_bytes == whole.weight_bytes
    assert config.kv_bytes_per_token == whole.kv_bytes_per_token
    assert config.architecture == whole.architecture


def test_the_folder_ends_samples_and_tokenizes_as_it_says(tmp_path: Path) -> None:
    path = copy_checkpoint(checkpoint("gemma3:gemma3_text"), tmp_path / "generation")
    (path / "generation_config.json").unlink()
    edit_config(path, eos_token_id=[5, 6])
    with LLM(str(path), num_gpu_blocks_override=64) as llm:
        assert llm.get_tokenizer().encode("fox")
        assert {5, 6} <= set(llm._config.scheduler.eos_token_ids)
    said = {"eos_token_id": [7], "top_k": 11}
    (path / "generation_config.json").write_text(json.dumps(said))
    with LLM(str(path), num_gpu_blocks_override=64) as llm:
        assert llm.get_default_sampling_params().top_k == 11
        assert 7 in llm._config.scheduler.eos_token_ids


def test_a_text_model_that_does_not_run_is_named(tmp_path: Path) -> None:
    path = copy_checkpoint(checkpoint("llava:llama"), tmp_path / "dbrx")
    config: dict[str, Any] = json.loads((path / "config.json").read_text())["text_config"]
    edit_config(path, text_config={**config, "model_type": "dbrx"})
    with pytest.raises(NotSupported) as error:
        LLM(str(path))
    assert str(error.value).startswith(
        f'{path}/config.json: text_config.model_type: architecture "dbrx" is not supported'
    )
    shutil.rmtree(path)


def test_a_wrapper_is_known_by_its_published_name(tmp_path: Path) -> None:
    path = checkpoint("kimi_k25:deepseek_v3")
    copy_checkpoint(path, tmp_path)
    config = json.loads((path / "config.json").read_text())
    text = {**config["text_config"], "model_type": "kimi_k2"}
    edit_config(tmp_path, architectures=["KimiK25ForConditionalGeneration"], text_config=text)
    assert np.array_equal(logits(path), logits(tmp_path))


def test_stacked_experts_lie_either_way_round(tmp_path: Path) -> None:
    """transformers 5 writes [X, N, K], published files have [X, K, N]."""
    path = checkpoint("qwen3_vl_moe:qwen3_vl_moe_text")
    copy_checkpoint(path, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    stacked = [name for name in tensors if ".mlp.experts." in name]
    assert stacked
    for name in stacked:
        tensors[name] = np.ascontiguousarray(tensors[name].swapaxes(1, 2))
    save_file(tensors, tmp_path / "model.safetensors")
    assert np.array_equal(logits(path), logits(tmp_path))
