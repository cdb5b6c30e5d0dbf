"""Several layers behind a model's own, of which each guesses a place: the second reads what the
first gave and the token two behind, and so on, as DeepSeek-V3 was trained (section 2.2)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from checkpoints import VOCAB_SIZE, make_checkpoint  # noqa: E402
from heads import (  # noqa: E402
    SIZE,
    VOCAB,
    add_draft_layer,
    change_config,
    next_tokens,
    token_table,
)
from llmserve import LLM, NotSupported, SamplingParams, _core_testing  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from test_equality import NAMES, params_of, prompt_of, results  # noqa: E402

NUM_LAYERS = 3
OPTIONS: dict[str, Any] = {
    "max_model_len": 128,
    "num_gpu_blocks_override": 64,
    "num_threads": 1,
    "dtype": "float32",
}
IDS = [5, 17, 200, 33, 8, 91, 64, 300, 12, 77]


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_each_layer_computes_what_torch_does(tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM

    target = make_checkpoint(tmp_path / "target", family, num_hidden_layers=2)
    add_draft_layer(tmp_path / "target", 2, VOCAB_SIZE, count=NUM_LAYERS)
    tensors = load_file(tmp_path / "target" / "model.safetensors")
    (tmp_path / "twin").mkdir()
    for name in ("config.json", "generation_config.json"):
        (tmp_path / "twin" / name).write_bytes((tmp_path / "target" / name).read_bytes())
    change_config(tmp_path / "twin", num_hidden_layers=2 + NUM_LAYERS, mlp_layer_types=None)
    save_file(tensors, tmp_path / "twin" / "model.safetensors", metadata={"format": "pt"})
    twin = AutoModelForCausalLM.from_pretrained(
        tmp_path / "twin", attn_implementation="eager", dtype=torch.float32
    ).eval()

    probe = _core_testing.DraftHead(str(tmp_path / "target"), "mtp", "")
    found = [probe.read(IDS), *(probe.read_next() for _ in range(NUM_LAYERS - 1))]
    ids = torch.tensor([IDS])
    with torch.no_grad():
        features = target.model(ids).last_hidden_state
        for place in range(NUM_LAYERS):
            own = f"model.layers.{2 + place}."

            def norm(x: torch.Tensor, name: str, own: str = own) -> torch.Tensor:
                weight = tensors[f"{own}{name}.weight"]
                return torch.nn.functional.rms_norm(
                    x, x.shape[-1:], weight, twin.config.rms_norm_eps
                )

            embedded = tensors[f"{own}embed_tokens.weight"][ids[:, 1 + place :]].clone()
            embedded[:, 0] = 0
            features = features[:, : embedded.shape[1]]
            read = torch.cat([norm(embedded, "enorm"), norm(features, "hnorm")], -1)
            x = read @ tensors[f"{own}eh_proj.weight"].T
            positions = torch.arange(x.shape[1])[None]
            features = twin.model.layers[2 + place](
                x,
                attention_mask=torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)[
                    None, None
                ],
                position_ids=positions,
                position_embeddings=twin.model.rotary_emb(x, positions),
            )
            answer = norm(features, "shared_head.norm")
            logits = answer @ tensors[f"{own}shared_head.head.weight"].T
            np.testing.assert_allclose(found[place], logits[0], rtol=1e-3, atol=1e-3)


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that draws each token by the one before alone, with three layers that are right."""
    folder = tmp_path_factory.mktemp("layers") / "right"
    make_checkpoint(
        folder,
        "glm4_moe",
        num_hidden_layers=2,
        vocab_size=VOCAB,
        hidden_size=SIZE,
        eos_token_id=None,
        max_position_embeddings=512,
    )
    add_draft_layer(folder, 2, VOCAB, count=NUM_LAYERS)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name.endswith("norm.weight"):
            tensor.fill_(1.0)
        elif name.endswith("eh_proj.weight"):
            tensor.copy_(torch.cat([torch.eye(SIZE), torch.zeros(SIZE, SIZE)], 1))
        elif name.endswith("embed_tokens.weight"):
            tensor.copy_(token_table())
        elif name.endswith(("shared_head.head.weight", "lm_head.weight")):
            tensor.copy_(next_tokens())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def plain(right: Path) -> Iterator[LLM]:
    with LLM(str(right), **OPTIONS) as llm:
        yield llm


def accepted(model: Path, plain: LLM, **options: Any) -> list[float]:
    """The share of steps whose guess at each place was right; tokens are those of plain steps."""
    prompts = [prompt_of(seed) for seed in range(4)]
    params = [
        SamplingParams(temperature=0.5 * (seed % 2), seed=seed, max_tokens=60) for seed in range(4)
    ]
    expected = results(plain.generate(prompts, params, use_tqdm=False))
    config = {"method": "mtp", "adaptive": False, "num_speculative_tokens": 8}
    with LLM(str(model), **{"speculative_config": config, **OPTIONS, **options}) as llm:
        assert results(llm.generate(prompts, params, use_tqdm=False)) == expected
        metrics = llm.get_metrics()
        return [count / metrics.num_drafts for count in metrics.num_accepted_per_pos if count]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 8},
        {"num_gpu_blocks_override": 17},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
def test_each_layer_guesses_its_place(right: Path, plain: LLM, options: dict[str, Any]) -> None:
    rates = accepted(right, plain, **options)
    assert len(rates) == NUM_LAYERS  # as many as there are layers, and all of them right
    assert rates[-1] > 0.85


@pytest.mark.parametrize("wrong", range(NUM_LAYERS))
def test_a_layer_that_is_wrong_is_so_at_its_place(
    tmp_path: Path, right: Path, plain: LLM, wrong: int
) -> None:
    for file in right.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"model.layers.{2 + wrong}.shared_head.head.weight"].neg_()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    rates = accepted(tmp_path, plain)
    assert len(rates) == wrong
    assert all(rate > 0.85 for rate in rates)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_layers_of_no_use_change_no_token_whatever_is_asked_for(
    tmp_path: Path, family: str
) -> None:
    make_checkpoint(tmp_path, family, num_hidden_layers=2, eos_token_id=2)
    add_draft_layer(tmp_path, 2, VOCAB_SIZE, count=2)
    thinking = {"reasoning_start_str": "e", "reasoning_end_str": "ab"}
    options = {**OPTIONS, "reasoning_config": thinking}
    asked = [prompt_of(seed) for seed in range(len(NAMES))]
    params = [params_of(name, 20) for name in NAMES]
    with LLM(str(tmp_path), **options) as llm:
        expected = results(llm.generate(asked, params, use_tqdm=False))
    for k in (1, 2):
        config = {"method": "mtp", "num_speculative_tokens": k, "adaptive": False}
        with LLM(str(tmp_path), speculative_config=config, **options) as llm:
            assert results(llm.generate(asked, params, use_tqdm=False)) == expected
            assert results(llm.generate(asked, params, use_tqdm=False)) == expected
            assert llm.get_metrics().num_draft_tokens > 0


def test_the_plan_knows_the_layers(right: Path) -> None:
    options = {**OPTIONS, "speculative_config": {"method": "mtp"}}
    plan = LLM.plan(str(right), **options)
    assert plan.draft is not None
    with LLM(str(right), **options) as engine:
        use = engine.get_memory_use()
    assert use.weight_bytes == plan.weight_bytes + plan.draft.weight_bytes
    assert use.workspace_bytes == plan.workspace_bytes + plan.draft.workspace_bytes
    assert use.kv_cache_bytes == plan.kv_cache_bytes + plan.draft.kv_cache_bytes
    assert plan.draft.kv_cache_bytes * 2 == NUM_LAYERS * plan.kv_cache_bytes  # of two layers


def test_trees_are_refused(right: Path) -> None:
    config = {"method": "mtp", "speculative_eagle_topk": 2}
    with pytest.raises(NotSupported, match="3 layers of this model, of which each guesses a place"):
        LLM(str(right), speculative_config=config, **OPTIONS)
