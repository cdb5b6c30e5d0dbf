"""The table of options: what is made from it says the same, and each option reaches the core."""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llmserve import (
    LLM,
    AsyncLLM,
    InvalidArgument,
    PoolingParams,
    ResourceExhausted,
    SamplingParams,
    _core,
    demo_model_path,
)
from llmserve.cli import bench, chat, generate, plan, serve
from llmserve.cli import inspect as inspect_command
from llmserve.cli.command_parser import CommandParser
from llmserve.common.units import json_object, token_count
from llmserve.common.vllm_arguments import NOT_HERE
from llmserve.config import CompilationConfig, PoolerConfig
from llmserve.options.engine_options import (
    ENGINE_OPTIONS,
    EngineOptions,
    argument_names,
    options_of,
)
from llmserve.options.option import EngineOption
from llmserve.options.page import page

PAGE = Path(__file__).parents[3] / "docs" / "engine-options.md"
OF_CORE = [option for option in ENGINE_OPTIONS if option.core is not None]
INTEGERS = [option for option in OF_CORE if isinstance(option.default, int | None)]
_OTHERS = (bool, float, str, token_count, json_object)
INTEGERS = [option for option in INTEGERS if option.kind not in _OTHERS]
COMMANDS = [
    (generate, "run", ("generate",)),
    (chat, "run", ("chat",)),
    (plan, "plan", ("plan",)),
    (serve, "serve", ("serve",)),
    (inspect_command, "inspect", ("inspect",)),
    (bench, "bench", ("bench", "latency")),
]


def by_name(option: EngineOption) -> str:
    return option.name


def test_the_page_is_what_the_table_says() -> None:
    command = "python -m llmserve.options.page > docs/engine-options.md"
    assert PAGE.read_text(encoding="utf-8") == page(), command


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_the_signature_has_the_tables_names_types_and_defaults(kind: type) -> None:
    parameters = inspect.signature(kind).parameters
    assert list(parameters) == [*argument_names(), "unknown"]
    assert parameters["unknown"].kind is inspect.Parameter.VAR_KEYWORD
    for option in ENGINE_OPTIONS:
        assert parameters[option.name].default == option.default
        assert f"{option.name}: {option.help}" in str(kind.__init__.__doc__)
    assert parameters["max_num_seqs"].annotation == int | None


def test_vllms_arguments_are_here_or_not_and_never_both() -> None:
    here = {option.name for option in ENGINE_OPTIONS}
    assert not here & NOT_HERE.keys()
    for name in {*argument_names()} - here - {"model"}:
        values, _ = NOT_HERE[name]
        default = inspect.signature(LLM).parameters[name].default
        assert default in values or (default is None and None in values), name


@pytest.mark.parametrize("option", OF_CORE, ids=by_name)
def test_the_core_takes_an_option_by_its_name(option: EngineOption) -> None:
    samples: dict[Any, object] = {bool: True, float: 0.5, str: "auto"}
    samples[json_object] = {"method": "ngram"}
    value = samples.get(option.kind, max(option.minimum, 1))
    EngineOptions("model", **{option.name: value}).to_request("model")
    assert option.checked(value) is not None


def test_the_core_refuses_a_name_that_it_does_not_know_and_a_value_of_another_type() -> None:
    with pytest.raises(TypeError, match="there is no setting max_num_sequences"):
        _core.ConfigRequest(max_num_sequences=3)
    with pytest.raises(TypeError, match="max_num_seqs cannot be 'many'"):
        _core.SchedulerConfig(max_num_seqs="many")


@pytest.mark.parametrize("option", INTEGERS, ids=by_name)
def test_a_number_out_of_range_is_refused_by_its_name(option: EngineOption) -> None:
    least = 0 if option.convert is not None else option.minimum
    with pytest.raises(InvalidArgument, match=f"^{option.name} must be between {least} and "):
        EngineOptions("model", **{option.name: least - 1}).to_request("model")
    with pytest.raises(InvalidArgument, match=f"^{option.name} must be an integer, got '7'"):
        EngineOptions("model", **{option.name: "7"}).to_request("model")


@pytest.mark.parametrize(("module", "command", "words"), COMMANDS, ids=lambda x: str(x)[-20:])
def test_a_command_has_a_flag_for_each_of_its_options(
    module: Any, command: str, words: tuple[str, ...]
) -> None:
    parser: Any = CommandParser()
    module.add_parser(parser.add_subparsers())
    for word in words:
        (kinds,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        parser = kinds.choices[word]
    assert len(options_of(command)) > 3
    for option in options_of(command):
        action = parser._option_string_actions["--" + option.name.replace("_", "-")]
        assert (action.help, action.dest) == (option.help, option.name)
        assert not option.alias or parser._option_string_actions[option.alias] is action


def test_what_an_option_says_is_text_for_a_table() -> None:
    for option in ENGINE_OPTIONS:
        assert option.help
        assert option.help[-1] != "."
        assert "|" not in option.description
        assert set(option.commands.split()) <= {"run", "serve", "plan", "bench", "inspect"}


def checked(name: str, value: object) -> object:
    (option,) = (option for option in ENGINE_OPTIONS if option.name == name)
    return option.checked(value)


@pytest.mark.parametrize(
    ("value", "num_tokens"),
    [(256, 256), ("256", 256), ("1k", 1000), ("1K", 1024), ("1.5k", 1500), ("auto", -1), (-1, -1)],
)
def test_max_model_len_is_a_number_or_what_people_write(value: object, num_tokens: int) -> None:
    assert checked("max_model_len", value) == num_tokens


@pytest.mark.parametrize("value", [1, -2, "", "many", "1 k", "1kk", "-1k", 1.5])
def test_a_max_model_len_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(InvalidArgument, match=r"^max_model_len must be "):
        checked("max_model_len", value)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("float", "float32"),
        (np.float32, "float32"),
        (np.dtype("float32"), "float32"),
        ("bfloat16", "bfloat16"),
    ],
)
def test_a_dtype_may_be_an_object_of_numpy(value: object, name: str) -> None:
    assert checked("dtype", value) == name


def test_a_dtype_may_be_an_object_of_torch() -> None:
    torch = pytest.importorskip("torch")
    assert checked("dtype", torch.bfloat16) == "bfloat16"
    assert checked("dtype", torch.float32) == "float32"


@pytest.mark.parametrize("value", ["half", "float16", np.float16])
def test_float16_runs_as_bfloat16_with_one_warning(
    value: object, caplog: pytest.LogCaptureFixture
) -> None:
    given: Any = {"dtype": value, "max_model_len": "auto", "kv_cache_memory_bytes": 2**18}
    with LLM(demo_model_path(), **given) as llm:
        assert llm.model_config.dtype == "bfloat16"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "runs as bfloat16: nothing is computed in float16" in caplog.text


CHANGES_NOTHING = [
    ({"tokenizer_mode": "slow"}, "tokenizer_mode='slow' changes nothing: the tokenizers library"),
    ({"load_format": "safetensors"}, "load_format='safetensors' changes nothing: there is one way"),
    ({"load_format": "gguf"}, "load_format='gguf' changes nothing: there is one way to load"),
    ({"compilation_config": 3}, "compilation_config=3 changes nothing: nothing is compiled"),
    ({"swap_space": 8}, "swap_space=8 changes nothing"),
    ({"limit_mm_per_prompt": {"image": 1}}, "changes nothing: models take text alone"),
    ({"distributed_executor_backend": "mp"}, "changes nothing: ranks are threads of a process"),
    ({"structured_outputs_config": {"backend": "xgrammar"}}, "nothing: llguidance makes the masks"),
    ({"compilation_config": CompilationConfig(3)}, "changes nothing: nothing is compiled"),
]


@pytest.mark.parametrize(("given", "message"), CHANGES_NOTHING)
def test_an_argument_that_changes_nothing_is_taken_with_one_warning(
    given: dict[str, object], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(demo_model_path(), max_model_len=64, **given):  # type: ignore[arg-type]
        pass
    assert len(caplog.records) == 1
    assert message in caplog.text


def test_max_model_len_auto_takes_what_the_kv_cache_holds(checkpoint: Path) -> None:
    # 384 bytes a token, in blocks of 16: five and a third, of which whole ones count
    with LLM(checkpoint, kv_cache_memory_bytes=2**15, max_model_len="auto") as llm:
        assert llm.max_model_len == 80
        outputs = llm.generate([[5] * 76], use_tqdm=False)
        assert len(outputs[0].outputs[0].token_ids) == 4
    with LLM(checkpoint, kv_cache_memory_bytes=2**22, max_model_len=-1) as llm:
        assert llm.max_model_len == 256
    with pytest.raises(ResourceExhausted, match="KV cache"):
        LLM(checkpoint, kv_cache_memory_bytes=2, max_model_len=-1)


def test_a_seed_of_none_is_drawn_and_told(checkpoint: Path) -> None:
    with LLM(checkpoint, seed=None) as one, LLM(checkpoint, seed=None) as other:
        assert one.model_config.seed != other.model_config.seed
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        drawn = one.generate([[5, 6]], params, use_tqdm=False)
        with LLM(checkpoint, seed=one.model_config.seed) as same:
            again = same.generate([[5, 6]], params, use_tqdm=False)
    assert drawn[0].outputs[0].token_ids == again[0].outputs[0].token_ids
    with LLM(checkpoint) as llm:
        assert llm.model_config.seed == 0


def test_variables_of_the_template_are_the_models_unless_a_request_has_others() -> None:
    template = "{{ messages[0].content }}{% if enable_thinking %}<think>{% endif %}{{ level }}"
    defaults = {"enable_thinking": True, "level": "low"}
    conversation = [{"role": "user", "content": "a"}]
    with LLM(
        demo_model_path(),
        chat_template=template,
        default_chat_template_kwargs=defaults,
        kv_cache_memory_bytes=2**22,
    ) as llm:

        def prompt(**more: object) -> object:
            tokenizer = llm.get_tokenizer()
            return tokenizer.apply_chat_template(conversation, tokenize=False, **more)

        assert prompt() == "a<think>low"
        assert prompt(enable_thinking=False) == "alow"
        (output,) = llm.chat(
            conversation,
            SamplingParams(max_tokens=1),
            use_tqdm=False,
            chat_template_kwargs={"level": "high"},
        )
        assert output.prompt == "a<think>high"
    for wrong in ({"messages": []}, ["a"]):
        with pytest.raises(InvalidArgument, match="default_chat_template_kwargs"):
            LLM(demo_model_path(), default_chat_template_kwargs=wrong)


def test_default_sampling_parameters_are_overridden_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9}')
    overrides = {"top_p": 0.5, "max_new_tokens": 7, "presence_penalty": 1.0}
    with LLM(
        demo_model_path(),
        generation_config=tmp_path,
        override_generation_config=overrides,
        kv_cache_memory_bytes=2**22,
    ) as llm:
        params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_p, params.presence_penalty) == (0.6, 0.5, 1.0)
    assert params.max_tokens == 7
    for wrong, message in (
        ({"tempreature": 1.0}, "did you mean 'temperature'"),
        ({"top_p": 2.0}, "override_generation_config: top_p"),
        (7, "must be a dict"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            LLM(demo_model_path(), override_generation_config=wrong)


def test_a_vector_is_made_as_pooler_config_says() -> None:
    prompt = "Once upon a time"
    with LLM(demo_model_path(), kv_cache_memory_bytes=2**22) as llm:
        (states,) = llm.encode(prompt, pooling_task="token_embed", use_tqdm=False)
        hidden = np.asarray(states.outputs.data)
        (last,) = llm.embed(prompt, use_tqdm=False)
    means: Any = {"pooling_type": "mean", "normalize": False, "dimensions": 8}
    for config in (means, PoolerConfig(**means)):
        with LLM(demo_model_path(), kv_cache_memory_bytes=2**22, pooler_config=config) as llm:
            (mean,) = llm.embed(prompt, use_tqdm=False)
            (longer,) = llm.embed(prompt, PoolingParams(dimensions=16), use_tqdm=False)
        assert np.allclose(mean.outputs.embedding, hidden.mean(axis=0)[:8], atol=1e-3)
        assert np.allclose(longer.outputs.embedding, hidden.mean(axis=0)[:16], atol=1e-3)
    with LLM(demo_model_path(), kv_cache_memory_bytes=2**22, pooler_config={}) as llm:
        (same,) = llm.embed(prompt, use_tqdm=False)
    assert same.outputs.embedding == last.outputs.embedding
    for wrong, message in (
        ({"pooling_type": "ALL"}, "pooling_type must be one of LAST, CLS, MEAN, got 'ALL'"),
        ({"poling_type": "CLS"}, "did you mean 'pooling_type'"),
        ("MEAN", "must be a dict"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            LLM(demo_model_path(), pooler_config=wrong)
