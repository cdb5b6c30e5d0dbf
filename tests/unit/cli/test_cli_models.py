"""`llmserve pull`, `list`, `rm` against a Hub on this machine, and `completion` in a shell."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import checkpoints
import hub_server
import pytest
from cli_calls import Run

MODEL = "some-org/tiny-llama"
DEADLINE_S = 60.0  # bash takes milliseconds


@pytest.fixture
def hub(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[hub_server.HubServer]:
    from huggingface_hub import constants

    with hub_server.serve() as server:
        server.models[MODEL] = checkpoints.copy_checkpoint(checkpoint, tmp_path / "upstream")
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.chdir(tmp_path)
        yield server


def test_a_model_is_pulled_listed_and_removed(hub: hub_server.HubServer, call: Run) -> None:
    done = call("pull", MODEL)
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.strip()) / "model.safetensors").exists()
    (row,) = json.loads(call("list", "--json").stdout)
    assert (row["model_id"], row["kinds"], row["revisions"]) == (MODEL, ["safetensors"], ["main"])
    assert row["num_bytes"] > 100_000
    listed = call("list").stdout
    assert MODEL in listed
    assert "KiB" in listed
    wrong = call("rm", "some-org/tiny-lama")
    assert (wrong.returncode, "did you mean some-org/tiny-llama?" in wrong.stderr) == (2, True)
    assert call("rm", MODEL).stdout.startswith(f"removed {MODEL}, ")
    assert call("list").stdout == ""


def test_a_file_of_a_repository_is_pulled_alone(
    hub: hub_server.HubServer, call: Run, tmp_path: Path
) -> None:
    hub.models["some-org/tiny-GGUF"] = tmp_path / "gguf"
    hub.models["some-org/tiny-GGUF"].mkdir()
    for name in ("tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf"):
        (tmp_path / "gguf" / name).write_bytes(b"GGUF")
    for flag in ("--hf-file", "-hff"):
        file = Path(call("pull", "some-org/tiny-GGUF", flag, "tiny-Q8_0.gguf").stdout.strip())
        assert [path.name for path in file.parent.iterdir()] == ["tiny-Q8_0.gguf"]


def test_without_a_cache_there_is_nothing(hub: hub_server.HubServer, call: Run) -> None:
    done = call("list")
    assert (done.returncode, done.stdout) == (0, "")
    assert "0 models, 0 B" in done.stderr
    assert "has no model 'x'" in call("rm", "x").stderr


def test_what_is_here_is_not_pulled(hub: hub_server.HubServer, call: Run) -> None:
    done = call("pull", "upstream")
    assert (done.returncode, "upstream is here already" in done.stderr) == (2, True)


def test_without_huggingface_hub_the_extra_is_named(
    call: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for command in (("list",), ("rm", "x"), ("pull", MODEL)):
        assert "pip install 'llmserve[hub]'" in call(*command).stderr


@pytest.mark.parametrize(
    ("typed", "some"),
    [
        (["gen"], {"generate"}),
        (["bench", "la"], {"latency"}),
        (["generate", "--max-t"], {"--max-tokens"}),
        (["bench", "latency", "--batch"], {"--batch-size"}),
        (["cache", ""], {"list", "clear"}),
    ],
)
def test_bash_completes_commands_and_options(typed: list[str], some: set[str], call: Run) -> None:
    script = call("completion", "bash").stdout
    words = " ".join(f"'{word}'" for word in ["llmserve", *typed])
    probe = f'COMP_WORDS=({words}); COMP_CWORD={len(typed)}; _llmserve; echo "${{COMPREPLY[*]}}"'
    done = subprocess.run(
        ["bash", "-c", f"{script}\n{probe}"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    assert done.stderr == ""
    found = set(done.stdout.split())
    assert some <= found
    assert all(word.startswith(typed[-1]) for word in found)


# What the shell's own completion would show of a line; zsh's needs a terminal to show it in.
_PROBES = {
    "fish": "source {script}; complete -C {line}",
    "zsh": """
autoload -U compinit; compinit -u -D; source {script}
(( $+_comps[llmserve] )) || exit 1
_describe() {{ print -l -- "${{(@P)2}}" }}
_files() {{ }}
line={line}; words=("${{(@)${{(z)line}}}}"); [[ $line = *" " ]] && words+=(""); CURRENT=$#words
_llmserve
""",
}


@pytest.mark.parametrize("shell", ["zsh", "fish"])
@pytest.mark.parametrize(
    ("line", "some", "others"),
    [
        ("llmserve ", {"generate", "bench"}, {"latency", "--batch-size"}),
        ("llmserve bench ", {"latency", "serve"}, {"generate"}),
        ("llmserve generate --", {"--max-tokens", "--temperature"}, {"--batch-size"}),
        ("llmserve bench latency --", {"--batch-size"}, {"--max-tokens"}),
    ],
)
def test_the_other_shells_complete_what_stands_there(
    shell: str, line: str, some: set[str], others: set[str], call: Run, tmp_path: Path
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / "script"
    script.write_text(call("completion", shell).stdout)
    probe = _PROBES[shell].format(script=script, line=shlex.quote(line))
    done = subprocess.run(
        [shell, *(["-f"] if shell == "zsh" else []), "-c", probe],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, "HOME": str(tmp_path), "TERM": "dumb"},
    )
    assert done.stderr == ""
    found = {re.split("[:\t]", text)[0] for text in done.stdout.splitlines()}
    assert some <= found
    assert not others & found


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells_have_every_command(shell: str, call: Run) -> None:
    script = call("completion", shell).stdout
    for word in ("generate", "pull", "bench latency", "max-tokens"):
        assert word in script
    assert call("completion", "tcsh").returncode == 2
