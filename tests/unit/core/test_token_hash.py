"""SHA-256 and the chain of block hashes."""

import hashlib
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llmserve import _core_testing as testing


@pytest.mark.parametrize(
    ("message", "digest"),
    [  # FIPS 180-4, examples
        (b"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
        (b"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
        (
            b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1",
        ),
        (b"a" * 1_000_000, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"),
    ],
)
def test_sha256_gives_the_published_digests(message: bytes, digest: str) -> None:
    assert testing.sha256([message]).hex() == digest


@settings(deadline=None, derandomize=True, database=None)
@given(st.lists(st.binary(max_size=150), max_size=6))
def test_sha256_does_not_depend_on_where_the_input_is_cut(pieces: list[bytes]) -> None:
    assert testing.sha256(pieces) == hashlib.sha256(b"".join(pieces)).digest()


def test_a_block_hash_covers_parent_and_tokens() -> None:
    parent = testing.root_hash(b"")
    tokens = [0, 1, -1, 2**31 - 1]
    expected = hashlib.sha256(parent + struct.pack("<4i", *tokens)).digest()
    assert testing.chain_hash(parent, tokens) == expected
    assert testing.chain_hash(testing.root_hash(b"x"), tokens) != expected


def test_a_root_covers_the_salt_and_each_digest_in_its_place() -> None:
    salt = hashlib.sha256(b"llmserve prefix cache salt:tenant").digest()
    assert testing.root_hash("tenant") == testing.root_hash("tenant", []) == salt
    first, second = (hashlib.sha256(name).digest() for name in (b"adapter", b"int8 tier"))
    expected = hashlib.sha256(b"llmserve prefix cache digest:" + salt + first).digest()
    assert testing.root_hash("tenant", [first]) == expected
    orders = [[], [first], [second], [first, second], [second, first]]
    roots = {testing.root_hash(name, order) for name in ("", "tenant") for order in orders}
    assert len(roots) == 2 * len(orders)


def test_sample_zero_has_the_seed_of_the_request() -> None:
    seeds = [testing.sample_seed(2**64 - 1, i) for i in range(128)]
    assert seeds[0] == 2**64 - 1
    assert len(set(seeds)) == 128
