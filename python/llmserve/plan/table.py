"""Tables as text and as HTML."""

import html
from collections.abc import Sequence

from llmserve.common.html_table import html_table


def text_table(head: Sequence[str], body: Sequence[Sequence[str]], note: str = "") -> str:
    """Columns of equal width, the first to the left; the note below if a row ends in its mark."""
    rows = [list(head), *(list(row) for row in body)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, *_notes(body, note)])


def html_page(
    summary: str, head: Sequence[str], body: Sequence[Sequence[str]], note: str = ""
) -> str:
    """A summary and a table with its note, for a notebook or a file of its own."""
    return f"<pre>{html.escape(summary)}</pre>" + html_table(
        "".join(_notes(body, note)), head, body
    )


def _notes(body: Sequence[Sequence[str]], note: str) -> list[str]:
    return [note] if note and any(row[0].endswith("*") for row in body) else []
