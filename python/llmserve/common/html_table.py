"""Tables for notebooks: what `_repr_html_` returns. Every text is escaped."""

import html
from collections.abc import Iterable, Sequence

_MAX_TEXT = 200  # characters of a cell


def html_table(title: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A caption, a head and rows, as HTML."""
    return (
        f"<table><caption>{_escaped(title)}</caption>"
        f"<thead>{_row('th', head)}</thead>"
        f"<tbody>{''.join(_row('td', row) for row in rows)}</tbody></table>"
    )


def _row(tag: str, cells: Sequence[object]) -> str:
    style = ' style="text-align:left;white-space:pre-wrap"'
    return f"<tr>{''.join(f'<{tag}{style}>{_escaped(cell)}</{tag}>' for cell in cells)}</tr>"


def _escaped(value: object) -> str:
    text = str(value)
    return html.escape(text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}…")
