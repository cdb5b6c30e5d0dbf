"""Text from tokens: whole characters, stop strings, the same whatever the token boundaries."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from llmserve import _core_testing as testing

FAST = settings(deadline=None, derandomize=True, database=None, max_examples=400)


def stream(
    pieces: list[bytes], *, can_stop: bool = True, **options: object
) -> tuple[list[bytes], int | None]:
    """The deltas of tokens with these bytes, the last one from the flush, and the stop found."""
    checker = testing.StopChecker(pieces, **options)
    deltas = []
    for token_id in range(len(pieces)):
        text, stop = checker.append(token_id, can_stop)
        deltas.append(text)
        if stop is not None:
            return deltas, stop
    text, stop = checker.flush()
    return [*deltas, text], stop


def one_shot(data: bytes, stops: list[bytes], include: bool) -> tuple[bytes, bool]:
    """The definition: cut the whole text at the stop string that ends first, longest first."""
    text = data.decode("utf-8", errors="replace").encode()
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    if not ends:
        return text, False
    end, minus_length = min(ends)
    return text[: end if include else end + minus_length], True


def cut(data: bytes, points: list[int]) -> list[bytes]:
    bounds = [0, *sorted(p % (len(data) + 1) for p in points), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(bounds)]


TEXT = st.one_of(
    st.binary(max_size=40),
    st.text(alphabet="abé€😀\ufffd", max_size=20).map(str.encode),
    st.lists(
        st.sampled_from([b"a", b"b", b"\xc3", b"\xa9", b"\xe2\x82", b"\xac", b"\xf0\x9f", b"\xff"])
    ).map(b"".join),
)
STOPS = st.lists(
    st.text(alphabet="abé€😀\ufffd", min_size=1, max_size=4).map(str.encode), max_size=3
)


@FAST
@given(TEXT, st.lists(st.integers(0, 100), max_size=12))
def test_deltas_add_up_to_python_decode(data: bytes, points: list[int]) -> None:
    deltas, _ = stream(cut(data, points))
    assert b"".join(deltas) == data.decode("utf-8", errors="replace").encode()
    for delta in deltas:
        delta.decode("utf-8")  # whole characters


@FAST
@given(TEXT, st.lists(st.integers(0, 100), max_size=12), STOPS, st.booleans())
def test_stops_do_not_depend_on_token_boundaries(
    data: bytes, points: list[int], stops: list[bytes], include: bool
) -> None:
    deltas, stop = stream(cut(data, points), stop=stops, include_stop_str_in_output=include)
    text, is_stopped = one_shot(data, stops, include)
    assert b"".join(deltas) == text
    assert (stop is not None) == is_stopped
    for delta in deltas:
        delta.decode("utf-8")


@FAST
@given(TEXT, STOPS)
def test_nothing_more_than_a_possible_stop_is_held_back(data: bytes, stops: list[bytes]) -> None:
    checker = testing.StopChecker([data], stop=stops)
    _, stop = checker.append(0)
    if stop is None:
        rest, _ = checker.flush()
        longest = max((len(s) for s in stops), default=1)
        assert len(rest) < longest + 3  # one replacement for a truncated character


def test_a_possible_stop_string_is_held_back_until_it_is_decided() -> None:
    deltas, stop = stream([b"one ST", b"O", b"RM ST", b"OP", b"x"], stop=[b"STOP"])
    assert deltas == [b"one ", b"", b"STORM ", b""]
    assert stop == 0


def test_a_character_in_pieces_comes_out_whole() -> None:
    euro = "€".encode()
    deltas, _ = stream([euro[:1], euro[1:2], euro[2:] + b"!"])
    assert deltas == [b"", b"", euro + b"!", b""]


def test_invalid_bytes_become_replacement_characters_once_decided() -> None:
    deltas, _ = stream([b"\xe2\x82", b"a", b"\xf0"])
    assert [d.decode() for d in deltas] == ["", "\ufffda", "", "\ufffd"]


def test_the_longest_of_the_stops_that_end_together_wins() -> None:
    assert stream([b"xab"], stop=[b"b", b"ab"]) == ([b"x"], 1)


def test_special_tokens_are_left_out_unless_asked_for() -> None:
    pieces = [b"a", b"<eos>", b"b"]
    assert b"".join(stream(pieces, special_token_ids=[1])[0]) == b"ab"
    kept, _ = stream(pieces, special_token_ids=[1], skip_special_tokens=False)
    assert b"".join(kept) == b"a<eos>b"


def test_a_stop_string_before_min_tokens_is_ordinary_text() -> None:
    checker = testing.StopChecker([b"end", b"e", b"nd"], stop=[b"end"])
    assert checker.append(0, False) == (b"end", None)
    assert checker.append(1, True) == (b"", None)
    assert checker.append(2, True) == (b"", 0)


def test_the_end_of_a_passed_stop_string_may_begin_the_next() -> None:
    checker = testing.StopChecker([b"aba", b"ba"], stop=[b"aba"])
    assert checker.append(0, False) == (b"ab", None)
    assert checker.append(1, True) == (b"", 0)


def test_a_token_outside_the_vocabulary_has_no_text() -> None:
    checker = testing.StopChecker([b"a"])
    assert checker.append(7) == (b"", None)


def test_a_special_token_after_another_loses_its_space_where_none_is_wanted() -> None:
    pieces = [b"a", b" <x>", b" <y>", b" b", b" <x>"]
    special = {"special_token_ids": [1, 2, 4], "skip_special_tokens": False}
    deltas, _ = stream(pieces, spaces_between_special_tokens=False, **special)
    assert b"".join(deltas) == b"a <x><y> b <x>"
    deltas, _ = stream(pieces, **special)
    assert b"".join(deltas) == b"".join(pieces)
