"""Scripts in the shapes of vLLM's offline examples: each runs with nothing changed but its import
and its model. A script whose feature is not here says so, and is refused with those words."""

from __future__ import annotations

import re
import shlex
import sys
import types
from pathlib import Path

import pytest
from llmserve import NotSupported, demo_model_path

FOLDER = Path(__file__).parents[2] / "vllm_scripts"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py"))
# pydantic is not among what the tests need.
NEEDS = {"structured_outputs": "pydantic", "logits_processor": "torch", "prompt_embeds": "torch"}


def run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    text = re.sub(r"^(from|import) vllm\b", r"\1 llmserve", text, flags=re.MULTILINE)
    text = text.replace("org/model", str(demo_model_path()))
    flags = re.search(r"^flags: (.*)$", text, re.MULTILINE)
    monkeypatch.setattr(sys, "argv", [name, *shlex.split(flags[1] if flags else "")])
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(compile(text, f"{name}.py", "exec"), vars(main))


def absent(name: str) -> str | None:
    """What the refusal says, of a script whose feature is not here."""
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    said = re.search(r"^absent: (.*)$", text, re.MULTILINE)
    return said[1] if said else None


def test_most_of_the_scripts_are_of_what_is_here() -> None:
    assert len(SCRIPTS) == 29
    assert sum(absent(name) is None for name in SCRIPTS) == 25


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_with_its_import_changed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    refusal = absent(name)
    if refusal is None:
        run(name, monkeypatch)
        return
    with pytest.raises(NotSupported, match=re.escape(refusal)):
        run(name, monkeypatch)
