"""Which files of a repository are a model's, and what names of models say."""

from __future__ import annotations

from pathlib import Path

import checkpoints
import pytest
from llmserve import CorruptFile, InvalidArgument, NotSupported, cli
from llmserve.checkpoint.model_files import find_checkpoint
from llmserve.checkpoint.model_name import ModelName, parse_model_name
from llmserve.checkpoint.repository import model_files

GGUFS = [
    "README.md",
    "mmproj-F16.gguf",
    "imatrix.gguf",
    "Tiny-Q8_0.gguf",
    "Tiny-Q4_K_M.gguf",
    "Tiny-Q4_K_S.gguf",
    "BF16/Tiny-BF16-00001-of-00002.gguf",
    "BF16/Tiny-BF16-00002-of-00002.gguf",
]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Qwen/Qwen3-0.6B", ModelName("Qwen/Qwen3-0.6B")),
        ("gpt2", ModelName("gpt2")),
        ("org/x-GGUF:Q4_K_M", ModelName("org/x-GGUF", "Q4_K_M")),
        ("org/x-GGUF:sub/x.gguf", ModelName("org/x-GGUF", "sub/x.gguf")),
        ("hf.co/org/x:Q8_0", ModelName("org/x", "Q8_0", is_address=True)),
        ("https://huggingface.co/org/x", ModelName("org/x", is_address=True)),
        ("https://huggingface.co/org/x/tree/v1", ModelName("org/x", None, "v1", True)),
        (
            "https://huggingface.co/org/x/blob/main/a/x.gguf?download=true",
            ModelName("org/x", "a/x.gguf", "main", True),
        ),
    ],
)
def test_a_name_is_read_as_it_is_typed_or_copied(text: str, expected: ModelName) -> None:
    assert parse_model_name(text) == expected


@pytest.mark.parametrize(
    "text",
    ["./org/x", "a/b/c", "/some/where", "~/x", "org/", "a/..", "a b/c", "x.gguf", "a/x.gguf", ""],
)
def test_what_can_only_be_a_path_is_no_name(text: str) -> None:
    assert parse_model_name(text) is None


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (None, ["Tiny-Q4_K_M.gguf"]),  # as llama.cpp takes
        ("q8_0", ["Tiny-Q8_0.gguf"]),
        ("Tiny-Q8_0.gguf", ["Tiny-Q8_0.gguf"]),
        ("BF16", GGUFS[-2:]),
        ("Tiny-BF16-00001-of-00002.gguf", GGUFS[-2:]),
    ],
)
def test_of_gguf_files_one_is_chosen_with_all_its_parts(
    file: str | None, expected: list[str]
) -> None:
    assert model_files(GGUFS, file, "org/x") == expected


def test_a_quantization_that_is_not_there_is_answered_with_those_that_are() -> None:
    message = r"org/x has no GGUF file for 'Q6_K'; add .* after a colon: BF16, Q4_K_M, Q4_K_S, Q8_0"
    with pytest.raises(InvalidArgument, match=message):
        model_files(GGUFS, "Q6_K", "org/x")
    with pytest.raises(InvalidArgument, match=r"several GGUF files; .*: a.gguf, b/a.gguf"):
        model_files(["a.gguf", "b/a.gguf"], None, "org/x")
    with pytest.raises(InvalidArgument, match="no GGUF file of a model, which 'Q8_0' asks for"):
        model_files(["config.json", "model.safetensors"], "Q8_0", "org/x")


@pytest.mark.parametrize(
    ("tokenizer", "beside"),
    [
        (["tokenizer.json"], ["tokenizer.model", "vocab.json", "merges.txt"]),
        (["tekken.json"], ["tokenizer.model.v3"]),
        (["tokenizer.model"], []),
        (["tiktoken.model"], []),
        (["qwen.tiktoken"], []),
        (["vocab.json", "merges.txt"], []),
        ([], ["vocab.json"]),
    ],
)
def test_the_tokenizer_that_is_read_is_taken_whatever_its_files(
    tokenizer: list[str], beside: list[str]
) -> None:
    others = ["config.json", "model.safetensors", "modeling.py", "original/params.json"]
    wanted = model_files([*others, *tokenizer, *beside], None, "org/x")
    assert wanted == ["config.json", "model.safetensors", *tokenizer]


def test_safetensors_come_before_gguf_and_mistrals_layout_is_the_last() -> None:
    names = ["config.json", "model.safetensors", "x-Q8_0.gguf", "consolidated.safetensors"]
    assert model_files(names, None, "x") == ["config.json", "model.safetensors"]
    mistral = ["params.json", "consolidated.safetensors", "tekken.json"]
    assert sorted(model_files(mistral, None, "x")) == sorted(mistral)


FOREIGN = [
    (["config.json", "openvino_model.xml", "openvino_model.bin"], "is a model of OpenVINO"),
    (["adapter_config.json", "adapter_model.safetensors"], "is a LoRA adapter"),
    (["model_index.json"], "is a pipeline of diffusers"),
    (["config.json", "model.onnx"], "is a model in ONNX"),
    (["config.json", "pytorch_model.bin"], r"has no \*.safetensors; pickled weights"),
    (["config.json", "tf_model.h5"], "is a model of TensorFlow or Flax"),
]


@pytest.mark.parametrize(("names", "message"), FOREIGN)
def test_what_is_no_model_here_is_told_for_what_it_is(
    names: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(NotSupported, match=f"^org/x {message}"):
        model_files(names, None, "org/x")
    for name in names:
        (tmp_path / name).write_text("{}")
    with pytest.raises(NotSupported, match=message):
        find_checkpoint(tmp_path)


def test_a_model_with_an_onnx_copy_beside_it_is_a_model(checkpoint: Path, tmp_path: Path) -> None:
    folder = checkpoints.copy_checkpoint(checkpoint, tmp_path)
    (folder / "model.onnx").write_bytes(b"x")
    assert find_checkpoint(folder) == folder


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_pointer_of_git_lfs_says_how_to_fetch_the_file(
    name: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoints.copy_checkpoint(checkpoint, tmp_path)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:1234\nsize 4242\n"
    (folder / name).unlink()
    (folder / name).write_text(pointer)
    assert cli.main(["generate", "--model", str(folder), "x"]) != 0
    message = f"llmserve: {folder / name}: a git-lfs pointer, not the file itself; run `git lfs"
    assert capsys.readouterr().err.startswith(message)


def test_a_gguf_pointer_of_git_lfs_is_told(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CorruptFile, match="git lfs pull"):
        find_checkpoint(tmp_path)


def test_a_projector_beside_a_gguf_file_is_left_out(tmp_path: Path) -> None:
    for name in ("tiny-Q8_0.gguf", "mmproj-F16.gguf", "config.json"):  # as repositories have it
        (tmp_path / name).write_bytes(b"GGUF")
    assert find_checkpoint(tmp_path) == tmp_path / "tiny-Q8_0.gguf"


def test_a_mistyped_folder_is_answered_with_the_one_beside_it(tmp_path: Path) -> None:
    (tmp_path / "Qwen3-0.6B").mkdir()
    with pytest.raises(InvalidArgument, match=r"nothing at .*; did you mean '.*/Qwen3-0.6B'\?"):
        find_checkpoint(tmp_path / "Qwen3-0.6")
