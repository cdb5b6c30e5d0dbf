"""Mutations of a checkpoint's files that know their structure: a mutated file is still one of its
kind in most places, so that what reads it gets past the first check."""

from __future__ import annotations

import copy
import functools
import json
import random
import re
import struct
from collections.abc import Callable
from typing import Any

Mutate = Callable[[random.Random, bytes], bytes]

_INTEGERS = [0, 1, 2, 3, 7, 255, 256, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**62]
_INTEGERS += [2**63 - 1, 2**63, 2**64 - 1, 10**30]


# Bytes that one mutation of a message may add: files stay small, so that many are made.
_MAX_ADDED = 2**17


class Raw(str):
    """Text that is written into JSON as it is."""


class Pairs(list[Any]):
    """The members of a JSON object, [key, value], of which some may come twice."""


def _deep(depth: int) -> Raw:
    return Raw("[" * depth + "]" * depth)


_ODD_VALUES: list[Any] = [
    *_INTEGERS,
    *(-value for value in _INTEGERS),
    *(0.5, -0.0, 1e-45, 3.5e38, True, False, None),
    *map(
        Raw, ("1e400", "-1e400", "1e-400", "NaN", "Infinity", "1.0", "1E3", "01", "-", "1" * 5000)
    ),
    *("", "a", "0", "true", "\0", "\ud800", "²", "é", "\u2581", "##", "<unk>", "../../etc/passwd"),
    *("/etc/passwd", "x" * 1000, "float32", "silu", "x" * 70_000, "ab" * 300),
    *([], [[]], [[[]]], [0], [1, 2, 3], [None], ["a"], [0.5] * 3, Pairs(), Pairs([["a", 1]])),
    *(_deep(20), _deep(100), _deep(5000), [0] * 1000, ["e"] * 1000),
]


def parse(text: str | bytes) -> Any:
    """JSON, objects as Pairs."""
    return json.loads(text, object_pairs_hook=lambda pairs: Pairs([list(p) for p in pairs]))


def dump(value: Any) -> str:
    """What `parse` reads, and Raw texts."""
    if isinstance(value, Raw):
        return value
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{dump(key)}:{dump(item)}" for key, item in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(dump, value)) + "]"
    return json.dumps(value)


def _type(value: Any) -> str:
    if isinstance(value, Raw):
        return "int"
    return type(value).__name__


def _slots(tree: Any, rng: random.Random) -> tuple[list[Any], int] | None:
    """A random place: a container and an index in it, the outer ones more often."""
    slot = None
    while isinstance(tree, list) and tree:
        index = rng.randrange(len(tree))
        if isinstance(tree, Pairs):
            slot = (tree[index], 1)
            tree = tree[index][1]
        else:
            slot = (tree, index)
            tree = tree[index]
        if rng.random() < 0.3:
            break
    return slot


def _containers(tree: Any) -> list[list[Any]]:
    found: list[list[Any]] = []
    if isinstance(tree, list):
        found.append(tree)
        for item in tree:
            found += _containers(item[1] if isinstance(tree, Pairs) else item)
    return found


def _odd_string(rng: random.Random, text: str) -> str:
    choice = rng.randrange(6)
    if choice == 0:
        return (text * rng.choice((2, 3, 100)))[:70_000]
    if choice == 1:
        return text[1:]
    if choice == 2:
        return text[::-1]
    at = rng.randrange(len(text) + 1)
    return text[:at] + rng.choice(["\0", "é", " ", "\ud83d", "\u2581", "a" * 50]) + text[at:]


def _mutate_tree(rng: random.Random, tree: Any) -> None:
    slot = _slots(tree, rng)
    if slot is None:
        return
    container, index = slot
    value = container[index]
    choice = rng.randrange(10)
    if choice < 4:
        odd = _ODD_VALUES
        if rng.random() < 0.8:  # what a parser of types lets through
            odd = [item for item in odd if _type(item) == _type(value)] or [None]
        container[index] = rng.choice(odd)
    elif choice == 4 and isinstance(value, str):
        container[index] = _odd_string(rng, value)
    elif choice == 5 and isinstance(value, int) and not isinstance(value, bool):
        container[index] = rng.choice([value + 1, value - 1, -value, 2 * value, value / 3])
    elif choice == 6 and isinstance(value, list) and value:
        del value[rng.randrange(len(value))]
    elif choice == 7 and isinstance(value, list) and value:
        item = rng.choice(value)
        num_bytes = len(_plain([item[1] if isinstance(value, Pairs) else item]))
        count = min(rng.choice((1, 2, 25, 2000)), 1 + _MAX_ADDED // num_bytes)
        # Copies: what a later mutation makes of one would make 2000 times its size of them all.
        value += [copy.deepcopy(item) for _ in range(count)]
    elif choice == 8:
        # A part of the tree at another place: never of itself, which would have no end.
        container[index] = parse(_plain(rng.choice(_containers(tree))))
    elif isinstance(value, Pairs) and value:
        rng.choice(value)[0] = rng.choice(["", "type", "content", "x", rng.choice(value)[0]])
    else:
        container[index] = rng.choice(_ODD_VALUES)


def _plain(value: Any) -> str:
    """Without Raw texts, which `parse` may not take."""
    if isinstance(value, Raw):
        return "0"
    if isinstance(value, Pairs):
        members = (f"{json.dumps(str(key))}:{_plain(item)}" for key, item in value)
        return "{" + ",".join(members) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_plain, value)) + "]"
    return json.dumps(value)


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """A few bytes: without regard to structure."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        choice, at = rng.randrange(6), rng.randrange(len(out) + 1)
        if choice == 0:
            del out[at:]
        elif choice == 1:
            out[at : at + 1] = bytes([rng.randrange(256)])
        elif choice == 2:
            out[at:at] = rng.randbytes(rng.choice((1, 4, 100)))
        elif choice == 3:
            del out[at : at + rng.choice((1, 8, 100))]
        elif choice == 4:
            out[at:at] = out[at : at + 100] * rng.choice((1, 5, 500))
        else:
            out[at : at + 4] = struct.pack("<I", rng.choice(_INTEGERS) & 0xFFFFFFFF)
    return bytes(out)


def mutate_json(rng: random.Random, data: bytes) -> bytes:
    """Values, keys, lengths and places in a JSON text."""
    if rng.random() < 0.1:
        return rng.choice([b"\xef\xbb\xbf", b"", b" " * 1000]) + mutate_bytes(rng, data)
    tree = parse(data)
    try:
        for _ in range(1 + int(rng.expovariate(1.0))):
            _mutate_tree(rng, tree)
        return dump(tree).encode("utf-8", "surrogatepass")
    except RecursionError:  # a part that has come to hold itself
        return mutate_bytes(rng, data)


def mutate_safetensors(rng: random.Random, data: bytes) -> bytes:
    """The header as JSON, its length, the data."""
    choice = rng.randrange(10)
    if choice == 0:
        return mutate_bytes(rng, data)
    (length,) = struct.unpack_from("<Q", data)
    header, values = data[8 : 8 + length], data[8 + length :]
    if choice == 1:
        return struct.pack("<Q", rng.choice(_INTEGERS) & (2**64 - 1)) + header + values
    if choice == 2:
        at = rng.randrange(len(values) // 4) * 4
        value = struct.pack("<f", rng.choice((0.0, 1e38, -1e-40, float("nan"), float("inf"))))
        return data[:8] + header + values[:at] + value + values[at + 4 :]
    if choice == 3:
        values = values[: rng.randrange(len(values))]
    else:
        header = mutate_json(rng, header)
    return struct.pack("<Q", len(header)) + header + values


def mutate_lines(rng: random.Random, data: bytes) -> bytes:
    """Lines swapped, doubled, left out; numbers changed."""
    if rng.random() < 0.2:
        return mutate_bytes(rng, data)
    lines = data.split(b"\n")
    for _ in range(rng.randint(1, 3)):
        choice, at = rng.randrange(5), rng.randrange(len(lines))
        if choice == 0:
            del lines[at : at + rng.choice((1, 50))]
            lines = lines or [b""]
        elif choice == 1:
            lines[at:at] = [lines[at]] * rng.choice((1, 3, 1000))
        elif choice == 2:
            other = rng.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
        elif choice == 3:
            number = b"%d" % rng.choice([*_INTEGERS, -1])
            lines[at] = re.sub(rb"\d+$", number, lines[at])
        else:
            lines[at] = mutate_bytes(rng, lines[at])
    return b"\n".join(lines)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
        if data[at - 1] < 0x80:
            return value, at


def _protobuf(data: bytes) -> list[list[Any]]:
    """Fields: number, wire type, value."""
    fields, at = [], 0
    while at < len(data):
        key, at = _read_varint(data, at)
        wire = key & 7
        value: Any
        if wire == 0:
            value, at = _read_varint(data, at)
        else:
            size = {1: 8, 5: 4}.get(wire, 0)
            if wire == 2:
                size, at = _read_varint(data, at)
            value, at = data[at : at + size], at + size
        fields.append([key >> 3, wire, value])
    return fields


def _protobuf_bytes(fields: list[list[Any]]) -> bytes:
    out = bytearray()
    for number, wire, value in fields:
        out += _varint(number << 3 | wire)
        if wire == 0:
            out += _varint(value)
        else:
            out += (_varint(len(value)) if wire == 2 else b"") + value
    return bytes(out)


def _mutate_fields(rng: random.Random, fields: list[list[Any]]) -> None:
    at = rng.randrange(len(fields))
    field = fields[at]
    choice = rng.randrange(8)
    if choice == 0:
        del fields[at]
    elif choice == 1:
        size = len(field[2]) if field[1] == 2 else 8
        count = rng.choice((1, 2, 500))
        fields[at:at] = [list(field) for _ in range(min(count, 1 + _MAX_ADDED // (size + 1)))]
    elif choice == 2:
        field[0] = rng.randrange(1, 50)
    elif field[1] == 0:
        field[2] = rng.choice(_INTEGERS) & (2**64 - 1)
    elif field[1] == 5:
        field[2] = struct.pack("<f", rng.choice((float("nan"), float("inf"), 0.0, -1e38)))
    elif choice == 3:
        times = rng.choice((2, 50, 3000))
        field[2] = field[2] * min(times, 1 + _MAX_ADDED // (len(field[2]) + 1))
    else:
        field[2] = mutate_bytes(rng, field[2])


def mutate_sentencepiece(rng: random.Random, data: bytes) -> bytes:
    """Fields of the model and of its messages."""
    if rng.random() < 0.1:
        return mutate_bytes(rng, data)
    fields = _protobuf(data)
    for _ in range(rng.randint(1, 3)):
        # Pieces are many: the other messages are to be met as often.
        kinds = sorted({field[0] for field in fields})
        if not kinds:
            break
        kind = rng.choice(kinds)
        chosen = rng.choice([field for field in fields if field[0] == kind])
        if chosen[1] != 2 or not chosen[2] or rng.random() < 0.2:
            _mutate_fields(rng, fields)
            continue
        try:
            inner = _protobuf(chosen[2])
            if inner:
                _mutate_fields(rng, inner)
            chosen[2] = _protobuf_bytes(inner)
        except IndexError:
            chosen[2] = mutate_bytes(rng, chosen[2])
    return _protobuf_bytes(fields)


_GGUF_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


class _GgufWalk:
    """The places of a good file's numbers and texts: offset and size, by part of the file."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 8
        self.places: dict[str, list[tuple[int, int]]] = {"header": [(4, 4), (8, 8), (16, 8)]}
        num_tensors, num_values = self._u64("header"), self._u64("header")
        for _ in range(num_values):
            self._string("keys")
            self._value(self._u32("types"))
        for _ in range(num_tensors):
            self._string("tensors")
            for _ in range(self._u32("tensors")):
                self._u64("tensors")
            self._u32("tensors")
            self._u64("tensors")

    def _number(self, part: str, form: str) -> int:
        size = struct.calcsize(form)
        self.places.setdefault(part, []).append((self.at, size))
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += size
        return int(value)

    def _u32(self, part: str) -> int:
        return self._number(part, "<I")

    def _u64(self, part: str) -> int:
        return self._number(part, "<Q")

    def _string(self, part: str) -> None:
        size = self._u64(part)
        self.places.setdefault(f"text of {part}", []).append((self.at, size))
        self.at += size

    def _value(self, kind: int) -> None:
        if kind == 8:
            self._string("values")
        elif kind == 9:
            inner, count = self._u32("types"), self._u64("counts")
            for _ in range(count):
                if inner == 8:
                    self._string("elements")
                else:
                    self.places.setdefault("elements", []).append((self.at, _GGUF_BYTES[inner]))
                    self.at += _GGUF_BYTES[inner]
        else:
            self.places.setdefault("values", []).append((self.at, _GGUF_BYTES[kind]))
            self.at += _GGUF_BYTES[kind]


@functools.lru_cache(maxsize=8)
def _walk(data: bytes) -> _GgufWalk:
    """Of a good file, which every case begins with."""
    return _GgufWalk(data)


def mutate_gguf(rng: random.Random, data: bytes) -> bytes:
    """Counts, types, lengths, numbers, keys and offsets of a file, or its data."""
    if rng.random() < 0.1:
        return mutate_bytes(rng, data)
    walk = _walk(data)
    out = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        part = rng.choice([*walk.places, "data"])
        if part == "data":
            at, size = rng.randrange(walk.at, len(data) - 4) & ~3, 4
        else:
            at, size = rng.choice(walk.places[part])
        if part.startswith("text"):
            if size:
                out[at + rng.randrange(size)] = rng.choice(b"\x00\xffa .\x80e")
        elif rng.random() < 0.2 and size == 4:
            out[at : at + 4] = struct.pack("<f", rng.choice((float("nan"), float("inf"), -1.0)))
        else:
            (old,) = struct.unpack_from({1: "<B", 2: "<H", 4: "<I", 8: "<Q"}[size], out, at)
            value = rng.choice([*_INTEGERS, old + 1, old - 1, old ^ 1, *range(31)])
            out[at : at + size] = (value & (2 ** (8 * size) - 1)).to_bytes(size, "little")
    return bytes(out)


# Whole parts, for between two others, and words that break or stretch what they are put into.
_TEMPLATE_PARTS = [
    "{% for i in range(99999) %}x{% endfor %}",
    "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "{{ 'x' * 10**10 }}",
    "{{ messages }}",
    "{% set ns = namespace(x='x') %}{% for i in range(60) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ messages | tojson }}",
    "{{ raise_exception('no') }}",
    "{{ messages | map(attribute='content') | join(',') | upper }}",
    "{% block a %}{% endblock %}",
    "{% include 'x' %}",
    "{{ [[[[1]]]] }}",
    "{{ 9**9**9 }}",
    "{% set x = messages * 99 %}",
    "{{ '%9999999d' % 1 }}",
    "{{ strftime_now('%Y') }}",
    "{{ messages[0].content[::-1] }}",
    "{{ 1 / 0 }}",
    "{{ messages.__class__ }}",
    "{{ ''.join(['a'] * 99999) }}",
    "{{ (('a' * 9999) ~ 'b') | replace('a', 'b' * 999) }}",
    "{{ dict(a=messages) | dictsort }}",
    "{{ " + "(" * 40 + "1" + ")" * 40 + " }}",
    "{{ " + "not " * 300 + "1 }}",
    "\0\u2028",
]
_TEMPLATE_WORDS = ["((((((", ".__class__", "['__init__']", "| tojson", "{#", "{{", "%}", "not", "'"]
_TEMPLATE_WORDS += ["{% if true %}", "{% endif %}", "{% endfor %}", "\0", "messages", "1e400"]


def mutate_template(rng: random.Random, data: bytes) -> bytes:
    """Words of a Jinja template, and parts that take long or much."""
    if rng.random() < 0.1:
        return mutate_bytes(rng, data)
    words = re.findall(r"\{[%{#]-?|-?[%}#]\}|\w+|\s+|.", data.decode("utf-8", "replace"))
    for _ in range(rng.randint(1, 3)):
        choice, at = rng.randrange(8), rng.randrange(len(words) + 1)
        if choice == 0:
            del words[at : at + rng.choice((1, 2, 10))]
        elif choice == 1:
            words[at:at] = words[at : at + 10] * rng.choice((1, 2, 300))
        elif choice == 2:
            words[at:at] = [rng.choice(_TEMPLATE_WORDS)] * rng.choice((1, 1, 30, 500))
        elif choice == 3 and words:
            words[at % len(words)] = rng.choice(words)
        else:
            ends = [i + 1 for i, word in enumerate(words) if word.endswith(("%}", "}}"))]
            at = rng.choice([0, len(words), *ends])
            words[at:at] = [rng.choice(_TEMPLATE_PARTS)] * rng.choice((1, 1, 1, 30))
    return "".join(words).encode("utf-8", "replace")
