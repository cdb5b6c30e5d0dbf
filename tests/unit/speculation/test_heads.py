"""Heads in the engine: they are asked and are right, change no token, and what is wrong with one is
told before anything runs, or switches it off."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from checkpoints import VOCAB_SIZE, checkpoint, make_checkpoint  # noqa: E402
from heads import (  # noqa: E402
    VOCAB,
    add_draft_layer,
    bigram_target,
    change_config,
    random_head,
    right_head,
)
from llmserve import (  # noqa: E402
    LLM,
    CorruptFile,
    InvalidArgument,
    NotSupported,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from llmserve.plan import MemoryPlan  # noqa: E402
from test_equality import NAMES, params_of, prompt_of, results  # noqa: E402

OPTIONS: dict[str, Any] = {
    "max_model_len": 256,
    "num_gpu_blocks_override": 128,
    "num_threads": 1,
    "dtype": "float32",
}


@functools.cache
def folder() -> Path:
    import tempfile

    return Path(tempfile.mkdtemp(prefix="heads-"))


@pytest.fixture(scope="module", autouse=True)
def clean() -> Iterator[None]:
    yield
    import shutil

    for cached in (plain, drafted, target, head, useless):
        cached.cache_clear()
    shutil.rmtree(folder())
    folder.cache_clear()


@functools.cache
def target() -> Path:
    return bigram_target(folder() / "target")


@functools.cache
def head(method: str) -> Path:
    return right_head(method, target(), folder() / method)


@functools.cache
def plain() -> LLM:
    return LLM(str(target()), **OPTIONS)


@functools.cache
def drafted(method: str, **options: Any) -> LLM:
    config = {"model": str(head(method)), "num_speculative_tokens": 4, "adaptive": False}
    return LLM(str(target()), speculative_config=config, **{**OPTIONS, **options})


def prompts(*lengths: int) -> list[dict[str, list[int]]]:
    return [
        {"prompt_token_ids": [(7 * i + 11 * j) % VOCAB for i in range(length)]}
        for j, length in enumerate(lengths)
    ]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(one.token_ids) for output in outputs for one in output.outputs]


def sampled(seed: int = 1, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.3, "seed": seed, "max_tokens": 40, **fields})


def rate(llm: LLM, run: Callable[[], Any]) -> float:
    """The share of guesses that were right."""
    before = llm.get_metrics()
    run()
    now = llm.get_metrics()
    drafts = now.num_draft_tokens - before.num_draft_tokens
    assert drafts > 0
    return (now.num_accepted_tokens - before.num_accepted_tokens) / drafts


def check_useless_heads(methods: Iterable[str], folder: Path, parallel: dict[str, Any]) -> None:
    """Guesses that are never right change no token, whatever is asked for, with the ranks given."""
    model = checkpoint("llama", eos_token_id=2)
    thinking = {"reasoning_start_str": "e", "reasoning_end_str": "ab"}
    options = {**OPTIONS, "reasoning_config": thinking}
    asked = [prompt_of(seed) for seed in range(len(NAMES))]
    params = [params_of(name, 24) for name in NAMES]
    with LLM(str(model), **options) as llm:
        plain = results(llm.generate(asked, params, use_tqdm=False))
    for method in methods:
        random_head(method, model, folder / method)
        config = {"model": str(folder / method), "num_speculative_tokens": 5, "adaptive": False}
        with LLM(str(model), speculative_config=config, **parallel, **options) as llm:
            assert results(llm.generate(asked, params, use_tqdm=False)) == plain
            assert llm.get_metrics().num_draft_tokens > 0


def check_right_head(
    llm: LLM,
    plan: MemoryPlan,
    asked: list[Any],
    params: list[SamplingParams],
    expected: list[list[int]],
    least: float,
) -> None:
    """Tokens are those that are expected and more than a share of the guesses right, after sleep,
    too; the memory in use is what was planned."""
    for level in (0, 2):
        found: list[list[int]] = []
        right = rate(
            llm,
            lambda: found.extend(tokens(llm.generate(asked, params, use_tqdm=False))),  # noqa: B023
        )
        assert found == expected
        assert right > least
        if level == 0:
            llm.sleep(2)
            llm.wake_up()
    assert plan.draft is not None
    use = llm.get_memory_use()
    assert use.weight_bytes == plan.weight_bytes + plan.draft.weight_bytes
    assert use.workspace_bytes == plan.workspace_bytes + plan.draft.workspace_bytes
    assert use.kv_cache_bytes == plan.kv_cache_bytes + plan.draft.kv_cache_bytes


@pytest.mark.parametrize("method", ["eagle3", "eagle", "medusa"])
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_a_head_that_fits_is_right_at_every_place(method: str, temperature: float) -> None:
    params = [sampled(seed, temperature=temperature) for seed in range(3)]
    asked = prompts(1, 20, 45)
    expected = tokens(plain().generate(asked, params, use_tqdm=False))
    found: list[list[int]] = []
    right = rate(
        drafted(method),
        lambda: found.extend(tokens(drafted(method).generate(asked, params, use_tqdm=False))),
    )
    assert found == expected
    if method == "medusa" and temperature > 0:
        assert right > 0.2  # its heads know the likely chain alone
    else:
        assert right > 0.93  # but for guesses behind a request's end, and rounding
    by_place = drafted(method).get_metrics().num_accepted_per_pos
    assert len([count for count in by_place if count > 0]) == (3 if method == "medusa" else 4)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 16, "max_num_seqs": 8},
        {"num_gpu_blocks_override": 17, "max_num_seqs": 8},
        {"enable_prefix_caching": False},
        {"num_threads": 2, "kv_cache_dtype": "bfloat16"},
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["eagle3", "eagle"])
def test_chunks_preemption_and_samples_leave_it_right(method: str, options: dict[str, Any]) -> None:
    params = [sampled(2, n=3), sampled(3), sampled(4, temperature=0), sampled(5, max_tokens=90)]
    asked = prompts(33, 20, 70, 5)
    same = {"kv_cache_dtype"} & set(options)
    reference = LLM(str(target()), **{**OPTIONS, **options}) if same else plain()
    expected = tokens(reference.generate(asked, params, use_tqdm=False))
    llm = drafted(method, **options)
    found: list[list[int]] = []
    right = rate(llm, lambda: found.extend(tokens(llm.generate(asked, params, use_tqdm=False))))
    assert found == expected
    assert right > 0.9


ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 16, "max_num_seqs": 8},
    "few blocks": {"num_gpu_blocks_override": 17, "max_num_seqs": 8},
    "bfloat16, fp8 cache": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
}


@functools.cache
def useless(method: str) -> Path:
    random_head(method, checkpoint("llama", eos_token_id=2), folder() / f"useless {method}")
    return folder() / f"useless {method}"


@pytest.mark.parametrize("engine", ENGINES)
def test_heads_of_no_use_change_no_token_whatever_is_asked_for(engine: str) -> None:
    model = str(checkpoint("llama", eos_token_id=2))
    thinking = {"reasoning_start_str": "e", "reasoning_end_str": "ab"}
    options = {**OPTIONS, **ENGINES[engine], "reasoning_config": thinking}
    asked = [prompt_of(seed) for seed in range(len(NAMES))]
    params = [params_of(name, 24) for name in NAMES]
    with LLM(model, **options) as llm:
        expected = results(llm.generate(asked, params, use_tqdm=False))
    for method in ("eagle3", "eagle", "medusa"):
        config = {"model": str(useless(method)), "num_speculative_tokens": 5, "adaptive": False}
        with LLM(model, speculative_config=config, **options) as llm:
            assert results(llm.generate(asked, params, use_tqdm=False)) == expected
            assert results(llm.generate(asked, params, use_tqdm=False)) == expected
            assert llm.get_metrics().num_draft_tokens > 0


@pytest.mark.parametrize("method", ["eagle3", "eagle"])
def test_guesses_are_of_what_the_grammar_allows_next(method: str) -> None:
    """Its masks are made for the guesses, too: a head that fits is right under them."""
    params = [
        SamplingParams(
            temperature=temperature,
            seed=seed,
            max_tokens=40,
            structured_outputs=StructuredOutputsParams(regex=regex),
        )
        for temperature in (0.0, 1.3)
        for seed, regex in enumerate(["(a|th|[x-z]e)+", "[0-9]{30}", "(ab|cd)*", "[a-z ]{60}"])
    ]
    asked = prompts(*range(3, 3 + len(params)))
    expected = tokens(plain().generate(asked, params, use_tqdm=False))
    llm = drafted(method)
    before = llm.get_metrics()
    assert tokens(llm.generate(asked, params, use_tqdm=False)) == expected
    now = llm.get_metrics()
    num_drafted = now.num_draft_tokens - before.num_draft_tokens
    num_wrong = num_drafted - (now.num_accepted_tokens - before.num_accepted_tokens)
    assert num_drafted > 100
    # Guesses that are a text's end, or behind it, are not counted among those that are right.
    assert num_wrong <= 5 * len(params)
    assert num_wrong < 0.2 * num_drafted


def test_a_prefix_that_the_target_found_is_found_by_the_head_or_looked_over() -> None:
    llm = drafted("eagle3")
    (asked,) = prompts(64)
    longer = {"prompt_token_ids": asked["prompt_token_ids"] + [5, 6, 7]}
    for prompt in (asked, longer, asked):
        (found,) = llm.generate([prompt], sampled(6), use_tqdm=False)
        expected = plain().generate([prompt], sampled(6), use_tqdm=False)
        assert tokens([found]) == tokens(expected)
        assert found.metrics.num_accepted_tokens > 0.9 * found.metrics.num_draft_tokens
    assert found.num_cached_tokens == 48


def test_guessing_goes_on_after_it_was_off() -> None:
    """More steps without a guess than states are kept of."""
    config = {
        "model": str(head("eagle3")),
        "num_speculative_tokens": 4,
        "adaptive": False,
        "num_speculative_tokens_per_batch_size": [[1, 1, 4]],
    }
    options = {"max_num_batched_tokens": 32, "max_num_seqs": 4}
    with LLM(str(target()), speculative_config=config, **{**OPTIONS, **options}) as llm:
        params = [sampled(7, max_tokens=200), sampled(8, max_tokens=100)]
        asked = prompts(9, 14)
        found = llm.generate(asked, params, use_tqdm=False)
        assert tokens(found) == tokens(plain().generate(asked, params, use_tqdm=False))
        metrics = found[0].metrics
        assert 20 < metrics.num_draft_tokens < 120
        assert metrics.num_accepted_tokens > 0.9 * metrics.num_draft_tokens


def test_a_layer_of_the_models_own_file(tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_checkpoint(model, "glm4_moe", num_hidden_layers=2, eos_token_id=None)
    add_draft_layer(model, 2, VOCAB_SIZE)
    with LLM(str(model), **OPTIONS) as llm:
        expected = tokens(llm.generate(prompts(20, 3), sampled(), use_tqdm=False))
    config = {"method": "glm4_moe_mtp", "num_speculative_tokens": 3, "adaptive": False}
    with LLM(str(model), speculative_config=config, **OPTIONS) as llm:
        assert tokens(llm.generate(prompts(20, 3), sampled(), use_tqdm=False)) == expected
        assert llm.get_metrics().num_draft_tokens > 0
    with pytest.raises(InvalidArgument, match='method "mtp" guesses with a layer of the model'):
        LLM(str(target()), speculative_config=config, **OPTIONS)


def test_the_plan_knows_the_head_and_the_engine_holds_no_more() -> None:
    for method in ("eagle3", "medusa"):
        config = {"model": str(head(method)), "num_speculative_tokens": 4}
        plan = LLM.plan(str(target()), speculative_config=config, **OPTIONS)
        assert plan.draft is not None
        use = drafted(method).get_memory_use()
        assert use.weight_bytes == plan.weight_bytes + plan.draft.weight_bytes
        assert use.workspace_bytes == plan.workspace_bytes + plan.draft.workspace_bytes
        assert use.kv_cache_bytes == plan.kv_cache_bytes + plan.draft.kv_cache_bytes
        assert (plan.draft.kv_cache_bytes > 0) == (method == "eagle3")


def test_it_sleeps_and_wakes() -> None:
    llm = drafted("eagle3", max_num_seqs=3)
    before = tokens(llm.generate(prompts(30), sampled(), use_tqdm=False))
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up()
        again: list[list[int]] = []
        right = rate(
            llm,
            lambda: again.extend(tokens(llm.generate(prompts(30), sampled(), use_tqdm=False))),  # noqa: B023
        )
        assert again == before
        assert right > 0.9


def test_it_does_not_wake_with_another_head(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tiny = checkpoint("llama")
    random_head("eagle3", tiny, tmp_path)
    file = tmp_path / "model.safetensors"
    short = load_file(file)
    whole = {name: t for name, t in short.items() if name not in ("d2t", "t2d")}
    whole["lm_head.weight"] = torch.randn(VOCAB_SIZE, short["lm_head.weight"].shape[1]) / 7
    draft_vocab_size = len(short["d2t"])

    def put(tensors: dict[str, Any], size: int) -> None:
        save_file(tensors, tmp_path / "new.safetensors")
        (tmp_path / "new.safetensors").replace(file)
        change_config(tmp_path, draft_vocab_size=size)

    put(whole, VOCAB_SIZE)
    config = {"model": str(tmp_path), "num_speculative_tokens": 3, "adaptive": False}
    with LLM(str(tiny), speculative_config=config, **OPTIONS) as llm:
        expected = tokens(llm.generate(prompts(20), sampled(), use_tqdm=False))
        llm.sleep(2)
        put(short, draft_vocab_size)
        with pytest.raises(InvalidArgument, match="holds another head"):
            llm.wake_up()
        put(whole, VOCAB_SIZE)
        llm.wake_up()
        assert tokens(llm.generate(prompts(20), sampled(), use_tqdm=False)) == expected


@pytest.mark.parametrize("max_positions", [256, 16])
def test_a_head_whose_file_is_shortened_is_switched_off_if_it_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, max_positions: int
) -> None:
    """Its embedding is read in place; and not for texts that are too long for it."""
    from safetensors.torch import load_file, save_file

    tiny = checkpoint("llama")
    random_head("eagle3", tiny, tmp_path)
    change_config(tmp_path, max_position_embeddings=max_positions)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    size = state["norm.weight"].shape[0]
    save_file({**state, "embed_tokens.weight": torch.randn(VOCAB_SIZE, size)}, file)
    config = {"model": str(tmp_path), "num_speculative_tokens": 3, "adaptive": False}
    with LLM(str(tiny), speculative_config=config, **OPTIONS) as llm:
        expected = tokens(llm.generate(prompts(20), sampled(), use_tqdm=False))
        assert (llm.get_metrics().num_draft_tokens > 0) == (max_positions > 16)
        os.truncate(file, 0)
        assert tokens(llm.generate(prompts(20), sampled(), use_tqdm=False)) == expected
    told = [line for line in caplog.messages if "is switched off" in line]
    assert len(told) == (1 if max_positions > 16 else 0)
    assert all("model.safetensors: was shortened" in line for line in told)


def test_a_folder_says_what_it_is(tmp_path: Path) -> None:
    from llmserve.checkpoint.draft_folders import read_draft_folder

    tiny = checkpoint("llama")
    for method in ("eagle3", "eagle", "medusa"):
        random_head(method, tiny, tmp_path / method)
        assert read_draft_folder(tmp_path / method).method == method
    random_head("eagle3", tiny, tmp_path / "speculators", speculators=True)
    found = read_draft_folder(tmp_path / "speculators")
    assert (found.method, found.num_tokens) == ("eagle3", 3)
    # EAGLE's authors name Llama; then the tensors tell.
    change_config(tmp_path / "eagle", architectures=["LlamaForCausalLM"])
    change_config(tmp_path / "eagle3", architectures=["LlamaForCausalLM"])
    assert read_draft_folder(tmp_path / "eagle").method == "eagle"
    assert read_draft_folder(tmp_path / "eagle3").method == "eagle3"
    assert read_draft_folder(tiny).method == "draft_model"
    change_config(tmp_path / "speculators", speculators_model_type="dflash")
    with pytest.raises(NotSupported, match="speculators_model_type 'dflash' is not supported"):
        read_draft_folder(tmp_path / "speculators")
    change_config(tmp_path / "medusa", architectures=["DFlashDraftModel"])
    with pytest.raises(NotSupported, match="DFlashDraftModel"):
        read_draft_folder(tmp_path / "medusa")
    with pytest.raises(InvalidArgument, match="is for method 'eagle3'"):
        LLM(str(tiny), speculative_config={"method": "draft_model", "model": str(head("eagle3"))})


def fields(**changes: object) -> Callable[[Path], None]:
    return lambda path: change_config(path, **changes)


def tensor(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        from safetensors.torch import load_file, save_file

        file = path / "model.safetensors"
        state = load_file(file)
        changed = change(state.pop(name))
        save_file(state if changed is None else {**state, name: changed}, file)

    return damage


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (fields(vocab_size=VOCAB_SIZE + 1), InvalidArgument, "vocab_size.*another model"),
        (fields(target_hidden_size=64), InvalidArgument, "target_hidden_size.*another model"),
        (fields(num_hidden_layers=2), NotSupported, "num_hidden_layers.*heads of one layer"),
        (fields(eagle_aux_hidden_state_layer_ids=[0, 1, 3]), InvalidArgument, "got layer 3"),
        (fields(eagle_config=None), InvalidArgument, "layers 2, n/2 and n-3 are not there"),
        (fields(draft_vocab_size=50), CorruptFile, '"d2t": expected 50 ids'),
        (tensor("d2t", lambda x: x + VOCAB_SIZE), CorruptFile, "outside the target's"),
        (tensor("d2t", lambda x: -torch.arange(len(x))), CorruptFile, "there twice"),
        (tensor("d2t", lambda x: None), CorruptFile, '"d2t" is missing'),
        (tensor("fc.weight", lambda x: x[:, :-1].clone()), CorruptFile, "fc.weight"),
        (tensor("midlayer.hidden_norm.weight", lambda x: None), CorruptFile, "hidden_norm"),
        (tensor("norm.weight", lambda x: x * float("nan")), CorruptFile, "norm.weight"),
        (tensor("lm_head.weight", lambda x: None), CorruptFile, '"lm_head.weight" is missing'),
        (
            tensor("d2t", lambda x: x.index_fill(0, torch.tensor([1]), 2**63 - 1)),
            CorruptFile,
            "outside the target's",
        ),
        (fields(norm_before_fc=True, fc_norm=True), NotSupported, "norm_before_fc.*fc_norm"),
    ],
)
def test_what_is_wrong_with_a_head_is_told_before_anything_runs(
    tmp_path: Path, damage: Callable[[Path], None], error: type[Exception], message: str
) -> None:
    tiny = checkpoint("llama")
    random_head("eagle3", tiny, tmp_path)
    damage(tmp_path)
    with pytest.raises(error, match=message):
        LLM(str(tiny), speculative_config={"model": str(tmp_path)}, **OPTIONS)


def test_a_head_whose_logits_are_not_finite_is_switched_off_and_hurts_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny = checkpoint("llama")
    random_head("eagle3", tiny, tmp_path)
    tensor("lm_head.weight", lambda x: x * 0 + 3e38)(tmp_path)
    config = {"model": str(tmp_path), "adaptive": False}
    asked, params = prompts(20, 5), sampled()
    with LLM(str(tiny), **OPTIONS) as llm:
        expected = tokens(llm.generate(asked, params, use_tqdm=False))
    with LLM(str(tiny), speculative_config=config, **OPTIONS) as llm:
        assert tokens(llm.generate(asked, params, use_tqdm=False)) == expected
        assert tokens(llm.generate(asked, params, use_tqdm=False)) == expected
    told = [line for line in caplog.messages if "is switched off" in line]
    assert len(told) == 1
    assert "the head's logits of position" in told[0]


def test_generate_takes_a_head_as_its_draft(capsys: pytest.CaptureFixture[str]) -> None:
    from llmserve.cli import main

    flags = ["--num-threads", "1", "--max-tokens", "20", "--temperature", "0"]
    flags += ["--max-model-len", "256"]
    assert main(["generate", "ab", "--model", str(target()), *flags]) == 0
    plain_text = capsys.readouterr().out
    drafts = ["--draft", str(head("eagle3"))]
    assert main(["generate", "ab", "--model", str(target()), *flags, *drafts]) == 0
    captured = capsys.readouterr()
    assert captured.out == plain_text
    assert " guesses right" in captured.err
    assert json.loads((head("eagle3") / "config.json").read_text())["draft_vocab_size"] == VOCAB
