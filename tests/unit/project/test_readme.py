"""Every block of the README and of the pages that promise it runs as printed, but the commands that
.ci/run runs."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import llmserve
import pytest

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# Starts of Python and a few dozen tokens of the demo model.
DEADLINE_S = 120.0

BLOCK = re.compile(r"(?:<!-- ci: (?P<ci>\w+) -->\n)?```(?P<kind>\w+)\n(?P<code>.*?)```", re.DOTALL)
BLOCKS = [match.groupdict() for match in BLOCK.finditer(README)]
TO_RUN = [block for block in BLOCKS if block["ci"] is None]
NUM_OF_README = len(TO_RUN)
for page in ("command-line.md", "memory-plan.md", "serving.md", "observability.md", "security.md"):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    TO_RUN += [match.groupdict() for match in BLOCK.finditer(text)]

Run = Future[subprocess.CompletedProcess[str] | None]


def environment(tmp_path: Path) -> dict[str, str]:
    """With `python` and `llmserve` as an installed package has them."""
    for name, arguments in (("python", ""), ("llmserve", "-m llmserve")):
        script = tmp_path / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        script.chmod(0o755)
    package = str(Path(llmserve.__file__).parents[1])
    return {
        **os.environ,
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")]),
    }


def test_the_commands_that_the_checks_run_are_marked() -> None:
    commands = {block["ci"]: block["code"] for block in BLOCKS if block["ci"]}
    assert commands["try"].strip() == 'pip install . && llmserve generate "Once upon a time"'
    assert commands["test"].strip() == (
        "pip install '.[test]' -C cmake.define.LLMSERVE_TESTING=ON && pytest -n 2 --dist loadfile"
    )
    assert commands["cuda"].strip() == (
        "pip install '.[cuda]' -C cmake.define.LLMSERVE_CUDA=ON -C cmake.version='>=3.26'"
    )
    assert NUM_OF_README >= 4
    assert {block["kind"] for block in TO_RUN} <= {"python", "sh"}


def on_a_free_port(code: str) -> str:
    """As printed but for the port of a server: it may be taken on this machine."""
    for port in set(re.findall(r"127\.0\.0\.1:(\d+)", code)):
        with socket.create_server(("127.0.0.1", 0)) as sock:
            code = code.replace(port, str(sock.getsockname()[1]))
    return code


def needs_curl(block: dict[str, str]) -> bool:
    return "curl " in block["code"] and shutil.which("curl") is None


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Run]]:
    """Of each block, two at a time: most of it is the start of Python."""

    def run(block: dict[str, str]) -> subprocess.CompletedProcess[str] | None:
        if needs_curl(block):
            return None
        bash = ["bash", "-euo", "pipefail", "-c"]
        folder = tmp_path_factory.mktemp("block")
        return subprocess.run(
            [*([sys.executable, "-c"] if block["kind"] == "python" else bash), block["code"]],
            env=environment(folder),
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=2 * DEADLINE_S,
            check=False,
        )

    blocks = [{**block, "code": on_a_free_port(block["code"])} for block in TO_RUN]
    with ThreadPoolExecutor(2) as pool:
        yield [pool.submit(run, block) for block in blocks]


@pytest.mark.parametrize("idx", range(len(TO_RUN)))
def test_a_block_runs_as_printed(idx: int, runs: list[Run]) -> None:
    block = TO_RUN[idx]
    done = runs[idx].result()
    if done is None:
        pytest.skip("curl is not installed")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    for said in re.findall(r"print\(.*\)  # (\{.*\})", block["code"]):
        assert said in done.stdout


def test_the_block_of_the_server_ends_where_its_extra_is_missing(tmp_path: Path) -> None:
    (block,) = (b["code"] for b in TO_RUN[:NUM_OF_README] if "llmserve serve" in b["code"])
    surroundings = environment(tmp_path)
    (tmp_path / "missing").mkdir()
    hidden = "import sys\nsys.modules['starlette'] = None\n"
    (tmp_path / "missing" / "sitecustomize.py").write_text(hidden)
    paths = [str(tmp_path / "missing"), surroundings["PYTHONPATH"]]
    surroundings["PYTHONPATH"] = os.pathsep.join(paths)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", on_a_free_port(block)],
        env=surroundings,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode != 0
    assert "llmserve[serve]" in done.stderr


def test_setting_up_says_where_it_works_and_what_it_takes() -> None:
    section = README.split("\n## Set up\n")[1].split("\n## ")[0]
    for words in ("On Linux", "minutes", "GB of memory a core", "unless it is given `-v`"):
        assert words in section


def test_what_is_not_there_is_said() -> None:
    (paragraph,) = re.findall(r"\nNot there yet: .*?\n\n", README, re.DOTALL)
    for words in ("wheels", "Windows", "Mamba", "LoRA", "images", "classifiers", "batches"):
        assert words in paragraph


def test_figures_of_speed_are_those_of_the_page() -> None:
    page = (ROOT / "docs" / "performance" / "peers.md").read_text(encoding="utf-8")
    (sentence,) = re.findall(r"TinyLlama 1\.1B on .*?\(llama\.cpp [\d.]+\)", README, re.DOTALL)
    figures = re.findall(r"\d+\.\d(?=[ ,)])", sentence)
    assert len(figures) >= 7
    for figure in figures:
        assert re.search(rf"^\| (?:32 requests|decode of 128).*\| {figure} \|", page, re.MULTILINE)


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *(p.name for p in (ROOT / "docs").glob("*.md"))]
)
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page if (ROOT / page).exists() else ROOT / "docs" / page
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), f"{page}: {target}"


def test_paths_that_the_docs_name_exist() -> None:
    pattern = re.compile(r"`((?:csrc|tests|docs|python|tools)/[\w./-]+)`")
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for named in pattern.findall(page.read_text(encoding="utf-8")):
            assert (ROOT / named).exists(), f"{page.name}: {named}"
