"""What a KV pool holds by KV dtype: the rows that a memory plan and a capacity show."""

from collections.abc import Sequence
from dataclasses import dataclass

from llmserve import _core


@dataclass(frozen=True, slots=True)
class KvRow:
    """A pool with one KV dtype, and its users at each context of the plan or capacity it is in."""

    dtype: str
    is_supported: bool  # false: arithmetic only, the engine does not run it yet
    bytes_per_token: int
    num_blocks: int
    num_tokens: int
    num_users: tuple[int, ...]


def kv_rows(pools: Sequence[_core.KvPool], contexts: Sequence[int]) -> tuple[KvRow, ...]:
    """pools: one for each of the core's KV dtypes, in its order."""
    return tuple(
        KvRow(
            dtype.name,
            dtype.is_supported,
            pool.bytes_per_token,
            pool.num_blocks,
            pool.num_tokens,
            tuple(pool.num_users(context) for context in contexts),
        )
        for dtype, pool in zip(_core.kv_cache_dtypes(), pools, strict=True)
    )


def users_at(rows: Sequence[KvRow], contexts: Sequence[int], context: int, dtype: str) -> int:
    """Users of one of `contexts` tokens at one of the rows' dtypes."""
    (row,) = (row for row in rows if row.dtype == dtype)
    return row.num_users[contexts.index(context)]


def kv_table(rows: Sequence[KvRow], contexts: Sequence[int]) -> tuple[list[str], list[list[str]]]:
    """Head and body; a dtype that is arithmetic only is marked with a star."""
    head = ["KV dtype", "bytes a token", "tokens", *(f"users at {c}" for c in contexts)]
    body = [
        [
            row.dtype + ("" if row.is_supported else " *"),
            str(row.bytes_per_token),
            str(row.num_tokens),
            *(str(users) for users in row.num_users),
        ]
        for row in rows
    ]
    return head, body
