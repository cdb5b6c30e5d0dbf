"""Models by path, by file and by Hub id; the Hub is a server of the test on this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import checkpoints
import hub_server
import huggingface_hub
import llmserve
import pytest
from gguf_files import write_gguf
from llmserve import LLM, HubError, InvalidArgument, NotSupported, cli
from llmserve.checkpoint import resume
from llmserve.checkpoint.model_files import find_checkpoint
from offline import GREEDY, generate, tokens

MODEL = "some-org/tiny-llama"
DEADLINE_S = 120.0  # a start of Python with huggingface-hub takes a second or two


@pytest.fixture
def hub(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[hub_server.HubServer]:
    """A Hub with one model, beside whose files are some that nobody needs."""
    folder = checkpoints.copy_checkpoint(checkpoint, tmp_path / "upstream")
    for name in ("pytorch_model.bin", "modeling.py", "README.md", "model.gguf", "training.pt"):
        (folder / name).write_bytes(b"not wanted")
    (folder / "original").mkdir()
    (folder / "original" / "consolidated.safetensors").write_bytes(b"not wanted")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("rag")
    with hub_server.serve() as server:
        server.models[MODEL] = folder
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.chdir(tmp_path)
        yield server


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_a_model_by_its_id_says_what_the_folder_says(
    hub: hub_server.HubServer, cache: Path, llm: LLM
) -> None:
    with LLM(MODEL, download_dir=cache, num_gpu_blocks_override=32) as downloaded:
        assert tokens(generate(downloaded, "the fox")) == tokens(generate(llm, "the fox"))
        assert (
            downloaded.get_tokenizer().apply_chat_template(
                [{"role": "user", "content": "a"}], chat_template="rag", tokenize=False
            )
            == "rag"
        )


def test_only_the_needed_files_are_downloaded(hub: hub_server.HubServer, cache: Path) -> None:
    folder = find_checkpoint(MODEL, None, cache)
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert {name for name in names if not name.endswith((".json", ".jinja"))} == {
        "model.safetensors"
    }
    assert not [r for r in hub.requests if r.endswith((".bin", ".py", ".pt", ".gguf", ".md"))]


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: hub_server.HubServer, cache: Path) -> None:
    folders = {find_checkpoint(MODEL, r, cache) for r in (None, *hub_server.REVISIONS)}
    assert [folder.name for folder in folders] == [hub_server.COMMIT]
    with pytest.raises(HubError, match=f"{MODEL} has no revision 'v9' .*branch, tag or commit"):
        find_checkpoint(MODEL, "v9", cache)


def test_an_id_without_an_organisation_is_one_of_the_hubs_own(
    hub: hub_server.HubServer, cache: Path
) -> None:
    hub.models["gpt2"] = hub.models[MODEL]
    assert (find_checkpoint("gpt2", None, cache) / "model.safetensors").exists()
    with pytest.raises(HubError, match="no folder 'gpt3' here and no model of that name"):
        find_checkpoint("gpt3", None, cache)


def test_a_gguf_file_is_chosen_by_its_quantization_and_downloaded_alone(
    hub: hub_server.HubServer, checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = hub.models[MODEL].parent / "gguf"
    folder.mkdir()
    write_gguf(folder / "tiny-Q8_0.gguf", checkpoint)
    for name in ("tiny-Q4_K_M.gguf", "mmproj-tiny-Q8_0.gguf", "config.json"):
        (folder / name).write_bytes(b"not wanted")
    hub.models["some-org/tiny-GGUF"] = folder
    for name in ("some-org/tiny-GGUF:Q8_0", "hf.co/some-org/tiny-GGUF:tiny-Q8_0.gguf"):
        with LLM(name, download_dir=cache, num_gpu_blocks_override=32) as llm:
            (output,) = llm.generate({"prompt_token_ids": [3, 5]}, GREEDY, use_tqdm=False)
            assert output.outputs[0].token_ids
    snapshot = find_checkpoint("some-org/tiny-GGUF:Q8_0", None, cache).parent
    assert [path.name for path in snapshot.iterdir()] == ["tiny-Q8_0.gguf"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert find_checkpoint("some-org/tiny-GGUF:Q8_0", None, cache).parent == snapshot
    with pytest.raises(InvalidArgument, match="has no GGUF file for 'Q4_K_M'"):
        find_checkpoint("some-org/tiny-GGUF:Q4_K_M", None, cache)


def test_a_tokenizer_comes_by_its_models_id_without_the_weights(
    hub: hub_server.HubServer, checkpoint: Path, cache: Path, tmp_path: Path, llm: LLM
) -> None:
    folder = checkpoints.copy_checkpoint(checkpoint, tmp_path / "bare")
    (folder / "tokenizer.json").unlink()
    with LLM(folder, tokenizer=MODEL, download_dir=cache, num_gpu_blocks_override=32) as bare:
        assert tokens(generate(bare, "the fox")) == tokens(generate(llm, "the fox"))
    assert not [request for request in hub.requests if request.endswith(".safetensors")]
    with pytest.raises(InvalidArgument, match=r"tokenizer must be a folder .* or a model's id"):
        LLM(folder, tokenizer="nothing")


@pytest.mark.parametrize("has_ranges", [True, False])
def test_a_download_that_was_interrupted_goes_on_where_it_ended(
    has_ranges: bool,
    hub: hub_server.HubServer,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    huggingface_hub.utils.enable_progress_bars()  # transformers turns them off for all
    monkeypatch.setattr(resume, "MIN_BYTES", 10_000)
    hub.has_ranges = has_ranges
    hub.breaks_after = 9000
    with pytest.raises(HubError, match=r"cannot be downloaded|the next start goes on"):
        find_checkpoint(MODEL, None, cache)
    (kept,) = cache.rglob("*.incomplete")
    assert kept.stat().st_size == 9000
    hub.breaks_after = None
    capsys.readouterr()
    folder = find_checkpoint(MODEL, None, cache)
    shown = re.findall(r"model\.safetensors: +(\d+)%", capsys.readouterr().err)
    begin = 100 * 9000 / (folder / "model.safetensors").stat().st_size
    assert (shown[0], shown[-1]) == (f"{begin:.0f}", "100")
    assert hub.ranges == (["bytes=0-", "bytes=9000-"] if has_ranges else [])
    original = hub.models[MODEL] / "model.safetensors"
    assert (folder / "model.safetensors").read_bytes() == original.read_bytes()
    assert not list(cache.rglob("*.incomplete"))


def test_what_a_server_calls_its_bytes_names_no_file_elsewhere(
    hub: hub_server.HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "MIN_BYTES", 1)
    fetched: list[Path] = []
    monkeypatch.setattr(resume, "_fetch", lambda url, blob, *rest: fetched.append(blob))
    for blob in ("../../evil", "/evil", "", "a" * 39, "a" * 40):
        answer = SimpleNamespace(etag=blob, size=10**9, location=hub.url, xet_file_data=None)
        monkeypatch.setattr(
            huggingface_hub, "get_hf_file_metadata", lambda *_, answer=answer, **__: answer
        )
        files = {"model.safetensors": resume.RemoteFile(10**9, blob)}
        resume.fetch_large_files(MODEL, None, cache, files)
    assert [path.name for path in fetched] == ["a" * 40]


def test_bytes_that_are_not_the_hubs_are_not_kept(tmp_path: Path) -> None:
    (tmp_path / "partial").write_bytes(b"other")
    with pytest.raises(HubError, match="what came is not the file that the Hub has"):
        resume._check(tmp_path / "partial", "0" * 64, 5, "model.gguf")
    assert not list(tmp_path.iterdir())


def test_a_second_time_nothing_is_downloaded(hub: hub_server.HubServer, cache: Path) -> None:
    folder = find_checkpoint(MODEL, None, cache)
    hub.requests.clear()
    assert find_checkpoint(MODEL, None, cache) == folder
    assert not [request for request in hub.requests if "/resolve/" in request]


def test_offline_the_cache_is_enough(
    hub: hub_server.HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = find_checkpoint(MODEL, None, cache)
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert find_checkpoint(MODEL, None, cache) == folder
    assert hub.requests == []


def test_offline_without_the_cache_says_what_to_do(
    hub: hub_server.HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(HubError, match=r"is not in the cache, .*HF_HUB_OFFLINE is set; unset it"):
        find_checkpoint(MODEL, None, cache)
    assert hub.requests == []


def test_what_the_hub_does_not_know_is_named_with_what_to_check(
    hub: hub_server.HubServer, cache: Path
) -> None:
    message = r"no folder 'some-org/other' here and no model of that name at http.*check the spell"
    with pytest.raises(HubError, match=message):
        find_checkpoint("some-org/other", None, cache)


def test_a_gated_model_says_where_to_accept_its_terms(
    hub: hub_server.HubServer, cache: Path
) -> None:
    hub.errors[MODEL] = (403, "GatedRepo")
    with pytest.raises(HubError, match=rf"gated: accept its terms at {hub.url}/{MODEL}.*HF_TOKEN"):
        find_checkpoint(MODEL, None, cache)


def test_a_server_that_fails_is_reported(hub: hub_server.HubServer, cache: Path) -> None:
    hub.errors[MODEL] = (500, "")
    with pytest.raises(HubError, match="500"):
        find_checkpoint(MODEL, None, cache)


def test_a_server_out_of_reach_is_reported(
    hub: hub_server.HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # discard: nobody listens
    with pytest.raises(HubError, match=r"http://127.0.0.1:9 cannot be reached.*check the network"):
        find_checkpoint(MODEL, None, cache)


def test_a_model_of_pickles_is_refused(hub: hub_server.HubServer, cache: Path) -> None:
    for name in ("model.safetensors", "model.gguf"):
        (hub.models[MODEL] / name).unlink()
    with pytest.raises(NotSupported, match=r"has no \*.safetensors; pickled weights"):
        find_checkpoint(MODEL, None, cache)


def test_a_head_of_pickles_comes_by_its_id_and_a_draft_model_of_pickles_is_refused(
    hub: hub_server.HubServer, cache: Path, tmp_path: Path
) -> None:
    """It is read without running what it says."""
    torch = pytest.importorskip("torch")
    model = hub.models[MODEL]
    size = json.loads((model / "config.json").read_text())["hidden_size"]
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    head = tmp_path / "head"
    head.mkdir()
    config = {"medusa_num_heads": 1, "medusa_num_layers": 1, "vocab_size": vocab_size}
    (head / "config.json").write_text(json.dumps(config))
    tensors = {
        "0.0.linear.weight": torch.zeros(size, size),
        "0.0.linear.bias": torch.zeros(size),
        "0.1.weight": torch.randn(vocab_size, size),
    }
    torch.save(tensors, head / "medusa_lm_head.pt")
    hub.models["some-org/head"] = head
    options = {"download_dir": cache, "num_gpu_blocks_override": 32}
    draft = {"model": "some-org/head", "adaptive": False}
    with LLM(MODEL, speculative_config=draft, **options) as llm:
        generate(llm, "the fox")
        assert llm.get_metrics().num_draft_tokens > 0
    (head / "medusa_lm_head.pt").unlink()
    (head / "pytorch_model.bin").write_bytes(b"whatever")
    (head / "config.json").write_text((model / "config.json").read_text())
    hub.models["some-org/pickled"] = head
    with pytest.raises(NotSupported, match=r"has no \*.safetensors; pickled weights"):
        LLM(MODEL, speculative_config={"model": "some-org/pickled"}, **options)


def test_what_a_config_says_is_not_supported_is_told_before_the_weights_come(
    hub: hub_server.HubServer, cache: Path
) -> None:
    config = {"architectures": ["Qwen3NextForCausalLM"]}
    checkpoints.edit_config(hub.models[MODEL], **config)
    with pytest.raises(NotSupported, match="near it are Qwen3"):
        find_checkpoint(MODEL, None, cache)
    quantized = {"quantization_config": {"quant_method": "hqq"}}
    checkpoints.edit_config(hub.models[MODEL], **quantized)
    with pytest.raises(NotSupported, match="quantized by hqq are not supported"):
        find_checkpoint(MODEL, None, cache.with_name("other"), is_overridden=True)
    assert not [request for request in hub.requests if request.endswith(".safetensors")]


def test_a_config_that_is_overridden_may_name_any_architecture(
    hub: hub_server.HubServer, cache: Path
) -> None:
    checkpoints.edit_config(hub.models[MODEL], architectures=["XForCausalLM"])
    overrides = {"architectures": ["LlamaForCausalLM"]}
    with LLM(MODEL, download_dir=cache, hf_overrides=overrides, num_gpu_blocks_override=32) as llm:
        assert tokens(generate(llm, "the fox"))


def test_a_string_that_is_a_path_is_always_a_path(
    hub: hub_server.HubServer, checkpoint: Path, cache: Path
) -> None:
    checkpoints.copy_checkpoint(checkpoint, Path(MODEL))
    assert find_checkpoint(MODEL, None, cache) == Path(MODEL)
    assert hub.requests == []
    with pytest.raises(InvalidArgument, match="revision is for models of the Hugging Face Hub"):
        find_checkpoint(MODEL, "main", cache)


@pytest.mark.parametrize(
    "model",
    ["./some-org/x", "a/b/c", "/some/where", "~/x", "some-org/", "a/..", "a b/c"],
)
def test_what_has_not_the_form_of_an_id_is_a_path(
    model: str, hub: hub_server.HubServer, cache: Path
) -> None:
    with pytest.raises(InvalidArgument, match="model must be a checkpoint directory"):
        find_checkpoint(model, None, cache)
    assert hub.requests == []


@pytest.mark.parametrize(
    "model", ["models/typo.gguf", "models/config.json", "models/model.safetensors"]
)
def test_a_mistyped_path_is_not_sent_to_the_hub(
    model: str, hub: hub_server.HubServer, cache: Path
) -> None:
    with pytest.raises(InvalidArgument, match=f"there is nothing at '{model}'"):
        find_checkpoint(model, None, cache)
    assert hub.requests == []


def test_what_may_not_be_read_says_so(checkpoint: Path, tmp_path: Path) -> None:
    folder = checkpoints.copy_checkpoint(checkpoint, tmp_path / "locked")
    folder.chmod(0)
    command = [sys.executable, "-m", "llmserve", "plan"]
    if os.geteuid() == 0:  # without the rights that root has over files
        if shutil.which("setpriv") is None:
            pytest.skip("root reads everything, and there is no setpriv")
        command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]
    try:
        for arguments in (
            [folder],
            [folder / "config.json"],
            [folder / "model.safetensors"],
            [folder / "model.gguf"],
            [folder, "--gpu-memory", "1GiB", "--weights", "1MB"],
        ):
            done = subprocess.run(
                [*command, *arguments],
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
                check=False,
            )
            message = f"llmserve: model: {arguments[0]} cannot be read: Permission denied\n"
            assert (done.returncode, done.stderr) == (2, message)
    finally:
        folder.chmod(0o755)


def test_without_huggingface_hub_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(NotSupported, match=r"pip install 'llmserve\[hub\]'"):
        LLM(MODEL)


@pytest.mark.parametrize(
    ("name", "value"), [("revision", 3), ("download_dir", 3), ("download_dir", "")]
)
def test_bad_arguments_are_named(name: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=f"{name} must be"):
        LLM(MODEL, **{name: value})  # type: ignore[arg-type]


def test_the_command_takes_an_id_and_the_environment_as_it_is(
    hub: hub_server.HubServer, cache: Path
) -> None:
    command = ["-m", "llmserve", "generate", "--model", MODEL, "--max-tokens", "4", "--quiet", "a"]
    package = str(Path(llmserve.__file__).parents[1])  # the fixture has changed the folder
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "HF_HUB_CACHE": str(cache), "PYTHONPATH": package},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "cannot" not in done.stderr
    assert (cache / "models--some-org--tiny-llama").is_dir()


def test_a_weights_file_runs_beside_its_config(checkpoint: Path, tmp_path: Path, llm: LLM) -> None:
    folder = checkpoints.copy_checkpoint(checkpoint, tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    (folder / "model.safetensors").write_bytes(b"broken")
    with LLM(folder / "other.safetensors", num_gpu_blocks_override=32) as other:
        assert tokens(generate(other, "the fox", GREEDY)) == tokens(generate(llm, "the fox"))


def test_a_weights_file_without_a_config_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes((checkpoint / "model.safetensors").read_bytes())
    with pytest.raises(InvalidArgument, match=r"has no config.json"):
        LLM(path)


def test_inspect_takes_a_weights_file(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(checkpoint / "model.safetensors")]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out
