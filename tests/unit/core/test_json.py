"""The strict JSON reader that headers and configurations go through."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llmserve import _core_testing
from llmserve.errors import CorruptFile

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False).filter(lambda x: x == 0 or abs(x) > 1e-300)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=20,
)


def parse(text: bytes | str) -> object:
    return _core_testing.parse_json("f.json", text.encode() if isinstance(text, str) else text)


@given(JSON_VALUES, st.booleans(), st.sampled_from([None, 2]))
def test_reads_what_python_writes(value: object, ascii_only: bool, indent: int | None) -> None:
    assert parse(json.dumps(value, ensure_ascii=ascii_only, indent=indent)) == value


@given(st.binary(max_size=40))
def test_accepts_no_more_than_python_does(text: bytes) -> None:
    try:
        value = parse(text)
    except CorruptFile:
        return
    assert json.loads(text) == value


@given(st.text(alphabet='{}[]",:0123456789.eE+-truefalsnu\\ ', max_size=12))
def test_accepts_json_like_text_only_if_python_does(text: str) -> None:
    try:
        value = parse(text)
    except CorruptFile:
        return
    assert json.loads(text) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "f.json, byte 0: the JSON text ends early"),
        (b'{"a": 1, "a": 2}', 'f.json, byte 13: the key "a" comes twice'),
        (b"[1,]", "f.json, byte 3: a comma has nothing after it"),
        (b"[1 2]", "f.json, byte 3: expected ',' or ']'"),
        (b'{"a" 1}', "f.json, byte 5: expected ':' after a key"),
        (b"[NaN]", "f.json, byte 1: expected a JSON value (JSON has no NaN"),
        (b"[-Infinity]", "f.json, byte 2: expected a digit"),
        (b"[1e400]", "f.json, byte 1: the number is out of range"),
        (b"[9223372036854775808]", "f.json, byte 1: the integer does not fit 64 bits"),
        (b"[01]", "f.json, byte 3: a number has leading zeros"),
        (b"[1.]", "f.json, byte 3: expected a digit"),
        (b'["\xff"]', "f.json, byte 2: a string is not valid UTF-8"),
        (b'["\xed\xa0\x80"]', "f.json, byte 2: a string is not valid UTF-8"),
        (b'["\xc0\x80"]', "f.json, byte 2: a string is not valid UTF-8"),
        (b'["\\ud800"]', "f.json, byte 8: a surrogate stands alone"),
        (b'["\\x"]', "f.json, byte 3: unknown escape in a string"),
        (b'["\n"]', "f.json, byte 2: a string has an unescaped control character"),
        (b'["a', "f.json, byte 3: a string has no end"),
        (b"1 1", "f.json, byte 2: unexpected text after the JSON value"),
        (b"\xef\xbb\xbf{}", "f.json, byte 0: expected a JSON value"),
        (b"[" * 65, "f.json, byte 65: nested more than 64 deep"),
        (b'{"a":' * 100_000, "nested more than 64 deep"),
        (b"[" + b"0," * (1 << 20) + b"0]", "more than 1048576 values"),
        (b" " * ((16 << 20) + 1), "f.json: is 16777217 bytes long; at most 16777216 are read"),
    ],
)
def test_refuses_with_file_byte_and_reason(text: bytes, message: str) -> None:
    with pytest.raises(CorruptFile) as error:
        parse(text)
    assert message in str(error.value)


def test_nesting_of_64_is_read() -> None:
    depth = 64
    assert parse("[" * depth + "]" * depth) == json.loads("[" * depth + "]" * depth)
