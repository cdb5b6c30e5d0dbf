"""docs/decisions/README.md lists every decision under its title."""

import re
from pathlib import Path

DECISIONS = Path(__file__).parents[3] / "docs" / "decisions"


def test_the_index_has_every_page_under_its_title() -> None:
    index = (DECISIONS / "README.md").read_text(encoding="utf-8")
    listed = {
        file: title for title, file in re.findall(r"^- \[(.+)\]\((.+)\)$", index, re.MULTILINE)
    }
    pages = {path for path in DECISIONS.glob("*.md") if path.name != "README.md"}
    titles = {
        path.name: path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        for path in pages
    }
    assert listed == titles
