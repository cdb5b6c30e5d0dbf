"""hf_overrides: a checkpoint runs as if its config.json had other fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import checkpoints
import pytest
from llmserve import LLM, CorruptFile, InvalidArgument, LLMServeError, NotSupported, _core
from llmserve.checkpoint.config_overrides import overridden_config
from offline import GREEDY, generate, tokens

PROMPT = [[5, 6, 7, 8, 9, 10]]


def changed_copy(checkpoint: Path, folder: Path, **fields: object) -> Path:
    """A copy whose config.json says so itself."""
    model = checkpoints.copy_checkpoint(checkpoint, folder)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **fields}))
    return model


def run(model: Path, **arguments: Any) -> tuple[int, list[list[int]]]:
    with LLM(model, kv_cache_memory_bytes=2**23, **arguments) as llm:
        return llm.max_model_len, tokens(generate(llm, PROMPT, GREEDY))


FIELDS = {"max_position_embeddings": 512, "rms_norm_eps": 0.5}


def by_function(config: Any) -> Any:
    config.update({"rms_norm_eps": 0.5})
    config.max_position_embeddings = 2 * config.get("max_position_embeddings")
    return config


def in_place(config: Any) -> None:
    config.update(FIELDS)


@pytest.mark.parametrize("overrides", [FIELDS, by_function, in_place])
def test_a_model_runs_as_if_its_config_said_so(
    checkpoint: Path, tmp_path: Path, overrides: Any
) -> None:
    expected = run(changed_copy(checkpoint, tmp_path, **FIELDS))
    assert run(checkpoint, hf_overrides=overrides) == expected
    assert expected != run(checkpoint)


def test_weights_that_are_read_anew_are_of_the_same_model(checkpoint: Path) -> None:
    with LLM(checkpoint, kv_cache_memory_bytes=2**23, hf_overrides=FIELDS) as llm:
        before = tokens(generate(llm, PROMPT, GREEDY))
        llm.sleep(level=2)
        llm.wake_up()
        assert tokens(generate(llm, PROMPT, GREEDY)) == before
    assert before == run(checkpoint, hf_overrides=FIELDS)[1]


def merged(tmp_path: Path, config: object, overrides: Any) -> object:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return json.loads(overridden_config(tmp_path, overrides))


def test_objects_are_merged_and_those_of_rope_are_whole(tmp_path: Path) -> None:
    config = {"a": 1, "text_config": {"b": 2, "c": 3}, "rope_scaling": {"type": "x", "factor": 2}}
    overrides = {"text_config": {"c": 4}, "rope_scaling": {"type": "y"}}
    assert merged(tmp_path, config, overrides) == {
        "a": 1,
        "text_config": {"b": 2, "c": 4},
        "rope_scaling": {"type": "y"},
    }


def test_older_names_of_rope_change_the_newer_object(tmp_path: Path) -> None:
    config = {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert merged(tmp_path, config, {"rope_scaling": yarn}) == {
        "rope_parameters": {"rope_theta": 1e4, **yarn}
    }
    assert merged(tmp_path, config, {"rope_theta": 5e5}) == {
        "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}
    }
    both = merged(tmp_path, config, {"rope_scaling": yarn, "rope_theta": 5e5})
    assert both == {"rope_parameters": {"rope_theta": 5e5, **yarn}}


def failing(_config: Any) -> Any:
    raise KeyError("x")


REFUSED: list[tuple[Any, type[LLMServeError], str]] = [
    (3, InvalidArgument, "hf_overrides must be a dict or a function, got 3"),
    ({3: 4}, InvalidArgument, "hf_overrides: a field has a name, got 3"),
    ({"a": {1, 2}}, InvalidArgument, "hf_overrides: not what JSON can hold"),
    ({"a": float("nan")}, InvalidArgument, "hf_overrides: not what JSON can hold"),
    (failing, InvalidArgument, "the function raised KeyError: 'x'"),
    (lambda config: 5, InvalidArgument, "the function must give the config back, got 5"),
    ({"hidden_size": 7}, CorruptFile, r"expected floats \[\d+, 7\], as config.json has it"),
    ({"num_hidden_layers": "x"}, CorruptFile, "config.json: num_hidden_layers: expected"),
]


@pytest.mark.parametrize(("overrides", "error", "message"), REFUSED)
def test_what_is_no_config_is_refused(
    checkpoint: Path, overrides: Any, error: type[LLMServeError], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM(checkpoint, hf_overrides=overrides)


@pytest.mark.parametrize("overrides", [FIELDS, by_function])
def test_a_file_without_a_config_is_refused(tmp_path: Path, overrides: Any) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(NotSupported, match=r"hf_overrides change a config\.json, and .*m\.gguf"):
        overridden_config(file, overrides)
    with pytest.raises(NotSupported, match="of format gguf has none; leave them out"):
        _core.Checkpoint(str(file), "{}")


def test_a_model_may_be_made_smaller_and_says_what_it_leaves_out(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = run(checkpoint)
    assert run(checkpoint, hf_overrides={"num_hidden_layers": 1}) != whole
    (record,) = caplog.records
    said = record.getMessage()
    assert "layers.1." in said
    assert said.endswith("others: no layer of this model uses them")


def test_lists_of_layers_are_cut_with_them() -> None:
    model = checkpoints.checkpoint("gemma2")  # two layers of different kinds
    for overrides in (
        {"num_hidden_layers": 1},
        {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
    ):
        config = json.loads(overridden_config(model, overrides))
        assert config["layer_types"] == overrides.get("layer_types", ["sliding_attention"])
        assert len(run(model, hf_overrides=overrides)[1][0]) > 0
    both = {"num_hidden_layers": 1, "layer_types": ["full_attention"] * 2}
    with pytest.raises(CorruptFile, match="layer_types: expected num_hidden_layers 1 entries"):
        run(model, hf_overrides=both)


def test_what_does_not_know_of_them_is_refused(checkpoint: Path) -> None:
    with pytest.raises(NotSupported, match="packed_cache_bytes is not supported with hf_overri"):
        LLM(checkpoint, hf_overrides=FIELDS, packed_cache_bytes=2**30)
    with pytest.raises(NotSupported, match=r"LLM\.plan: hf_overrides are not supported"):
        LLM.plan(checkpoint, hf_overrides=FIELDS)
