"""The pages of docs/ about the code name files, classes and methods that exist."""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = ("architecture.md", "life-of-a-request.md", "cuda.md")
# Where a path of a page may begin.
BASES = ("", "csrc", "python/llmserve", "docs")
SUFFIXES = (".h", ".cpp", ".cu", ".cuh", ".inc", ".py", ".md")
# A page names a file of one of these rooms by its last part alone.
ROOMS = ("csrc", "python/llmserve")
BLOCK = re.compile(r"^```\n(.*?)^```", re.DOTALL | re.MULTILINE)
DEFINITION = re.compile(r"\b(?:class|struct|enum class|using)\s+(\w+)")
METHOD = re.compile(r"\b([A-Z]\w+)::(\w+)")
# Of two words at least: one alone may be prose in a drawing.
CLASS = re.compile(r"[A-Z][a-z]+[A-Z]\w*|LLM")


def read(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def code_spans(text: str) -> Iterator[str]:
    """What stands between backquotes, but for blocks of lines."""
    without_blocks = BLOCK.sub("", text)
    yield from (span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", without_blocks))


def drawn_words(text: str) -> Iterator[str]:
    for block in BLOCK.findall(text):
        yield from re.findall(r"[\w/.:]+", block)


def sources() -> Iterator[Path]:
    for folder, suffixes in (("csrc", {".h", ".cpp", ".cuh"}), ("python/llmserve", {".py"})):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in suffixes:
                yield path


def defined_names() -> set[str]:
    return {
        name for path in sources() for name in DEFINITION.findall(path.read_text(encoding="utf-8"))
    }


def members(name: str) -> str:
    """Text of the files that define a class."""
    definition = re.compile(rf"\b(?:class|struct) {name}\b[^;]*{{")
    texts = (path.read_text(encoding="utf-8") for path in sources())
    return "\n".join(text for text in texts if definition.search(text))


def is_path(span: str) -> bool:
    return re.fullmatch(r"\w[\w./-]*", span) is not None and span.endswith(SUFFIXES)


def exists(span: str) -> bool:
    if any((ROOT / base / span).exists() for base in BASES):
        return True
    return any(next((ROOT / room).rglob(span), None) for room in ROOMS)


def missing_names(text: str) -> list[str]:
    names = defined_names()
    words = [*code_spans(text), *drawn_words(text)]
    missing = [span for span in words if is_path(span) and not exists(span)]
    for word in words:
        missing += [
            f"{owner}::{member}"
            for owner, member in METHOD.findall(word)
            if not re.search(rf"\b{member}\b", members(owner))
        ]
        if CLASS.fullmatch(word) and word not in names and not hasattr(builtins, word):
            missing.append(word)
    return missing


def folders(text: str) -> list[str]:
    """First cells of the table of folders."""
    table = re.search(r"\| folder of `csrc/` \|.*?\n\n", text, re.DOTALL)
    assert table is not None
    rows = table.group().strip().splitlines()[2:]
    return [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]


def headings(text: str) -> set[str]:
    """As links name them."""
    lines = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", PAGES)
def test_every_file_class_and_method_that_a_page_names_exists(page: str) -> None:
    assert missing_names(read(page)) == []


def test_every_folder_of_the_core_is_in_the_table() -> None:
    on_disk = {path.name for path in (ROOT / "csrc").iterdir() if path.is_dir()}
    assert set(folders(read("architecture.md"))) == on_disk


def test_links_between_pages_lead_to_files_and_headings() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    broken = []
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)\s]*(?:\n[^)\s]*)?)\)", text):
            if "://" in target or target.startswith("mailto:"):
                continue
            name, _, heading = target.partition("#")
            file = page.parent / name if name else page
            if file.exists() and (not heading or heading in headings(file.read_text("utf-8"))):
                continue
            broken.append(f"{page.name}: {target}")
    assert broken == []


def test_the_page_is_read_in_ten_minutes() -> None:
    """At 180 words a minute, code and tables included."""
    assert len(read("architecture.md").split()) <= 1800


def test_a_name_that_is_gone_is_found() -> None:
    text = "`NoSuchClass`, `Scheduler::no_such_call`, `engine/no_such_file.h`, `engine/engine.h`"
    assert missing_names(text) == [
        "engine/no_such_file.h",
        "NoSuchClass",
        "Scheduler::no_such_call",
    ]
