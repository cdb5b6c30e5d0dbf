"""Answers in a terminal: wrapped at words, with what Markdown marks drawn."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llmserve.cli.markdown import MarkdownWriter, width_of

STYLE = re.compile(r"\033\[\d*m")
MARKUP = st.text(st.sampled_from("ab *`#->1.\n\u65e5"), max_size=80)


def drawn(text: str, width: int = 40, *, has_colours: bool = True) -> str:
    writer = MarkdownWriter(width, has_colours)
    return writer.feed(text) + writer.end()


def without_style(text: str) -> str:
    return STYLE.sub("", text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a **b c** d", "a b c d"),
        ("a *b* `c d` e", "a b c d e"),
        ("(*so*) [**too**]", "(so) [too]"),
        ("# Title", "Title"),
        ("- one\n* two\n1. three", "\u2022 one\n\u2022 two\n1. three"),
        ("2 * 3, 2**3, a_b_c, f(*x)", "2 * 3, 2**3, a_b_c, f(*x)"),
        ("`**x**`", "**x**"),
        ("**never closed\n\nnext", "never closed\n\nnext"),
        ("#no heading", "#no heading"),
    ],
)
def test_marks_are_drawn_and_not_shown(text: str, shown: str) -> None:
    assert without_style(drawn(text)) == shown


def test_bold_begins_and_ends_where_it_is_marked() -> None:
    assert drawn("a **b** c") == "a \033[0m\033[1mb\033[0m c\033[0m"


def test_words_are_wrapped_and_lists_keep_their_indent() -> None:
    lines = without_style(drawn("- " + "word " * 12, 30)).splitlines()
    assert lines[0].startswith("\u2022 word")
    assert all(line.startswith("  word") for line in lines[1:])
    assert all(len(line) <= 30 for line in lines)
    assert without_style(drawn("x" * 50, 30)) == "x" * 50  # a word is never cut


def test_code_in_a_fence_stays_as_it_is() -> None:
    code = "```python\nx = 1  # a comment that is longer than the terminal is wide\n\n**y**\n```"
    assert without_style(drawn(f"a\n{code}\nb", 30)) == f"a\n{code}\nb"


@given(text=MARKUP, width=st.integers(20, 60))
def test_pieces_do_not_matter_and_no_character_is_lost_without_colours(
    text: str, width: int
) -> None:
    writer = MarkdownWriter(width, has_colours=True)
    assert "".join(map(writer.feed, text)) + writer.end() == drawn(text, width)
    plain = drawn(text, width, has_colours=False)
    assert "\033" not in plain
    # Lines of a quote that are wrapped have its mark again.
    assert re.sub(r"[\s>]", "", plain) == re.sub(r"[\s>]", "", text)


def test_a_style_that_is_open_ends_with_the_answer() -> None:
    assert drawn("**a").endswith("\033[0m")


@pytest.mark.parametrize(("text", "width"), [("abc", 3), ("\u65e5\u672c", 4), ("e\u0301", 1)])
def test_width_is_in_columns(text: str, width: int) -> None:
    assert width_of(text) == width
