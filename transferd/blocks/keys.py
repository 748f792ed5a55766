"""Keys of the blocks of a token sequence, by content.

A prefill and a decode engine that see the same prompt compute the same keys. The definition, version 1; all integers
little-endian, u32 and u64 unsigned, i64 signed, `||` is concatenation, H is SHA-256:

    digest(-1) = H("transferd block keys v1\\0" || u32 block_size)
    digest(i)  = H(digest(i-1) || u32 n || i64 token[0] … i64 token[n-1]
                   || u32 m || extra[0] … extra[m-1])
    extra      = i64 start || u64 length || u32 bytes of key || key

n is the number of tokens in block i, m the number of extra keys that overlap the block's tokens. An
extra key (the hash of an image or a sound, the id of an adapter) has a range of tokens. It enters the keys
of all blocks that the range overlaps, incomplete ones included. start is the beginning of its range
relative to the block's first token; it is negative if the range begins in an earlier block. Extras are
sorted by (start, length, key bytes). Text keys are UTF-8 with surrogates passed through.

The key of a full block is its digest in 64 hex digits; that of a last block with N < block_size tokens
is `<digest>:partial:N`. Every field has a fixed width or a length prefix, so two different inputs never
feed the same bytes to the hash. Any change to this needs a new version text, and so gives new keys.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import re
import struct
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

from transferd.errors import RequestError
from transferd.tasks import TokenIds

if TYPE_CHECKING:
    import numpy.typing as npt


def encode_text(text: str) -> bytes:
    """Any Python string as bytes, injectively: UTF-8 with lone surrogates passed through."""
    return text.encode("utf-8", "surrogatepass")


BLOCK_KEYS_VERSION = b"transferd block keys v1\0"
_U32 = struct.Struct("<I")
_EXTRA = struct.Struct("<qQI")
_TOKEN_BYTES = 8
_PARTIAL = re.compile(r":partial:([1-9][0-9]{0,9})\Z", re.ASCII)


def block_keys(
    token_ids: Sequence[int] | npt.NDArray[Any] | TokenIds,
    block_size: int,
    extra_keys: Iterable[tuple[str | bytes, int, int]] | None = None,
    partial: bool = True,
) -> list[str]:
    """The key of every block of a sequence, root to leaf, as the module's docstring defines them.

    token_ids: the whole sequence from its first token.
    extra_keys: everything besides tokens that the KV of a token range depends on, such as an image's hash, as (key,
        offset, length). Each covers tokens offset … offset+length-1 and may extend past the last token.
    partial: also return a key for a last incomplete block.

    Raises RequestError for a block size below 1, tokens that are not 64-bit integers, a negative offset or length.
    """
    block_size = _integer("block_size", block_size, 1, (1 << 32) - 1)
    try:
        tokens = memoryview(TokenIds(token_ids).array.astype("<i8").tobytes())
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestError(f"token_ids must be 64-bit integers: {error}") from error
    count = len(tokens) // _TOKEN_BYTES
    extras = _extras_by_block(extra_keys or (), count, block_size)
    sha256 = hashlib.sha256
    parent = sha256(BLOCK_KEYS_VERSION + _U32.pack(block_size)).digest()
    full_header, no_extras = _U32.pack(block_size), _U32.pack(0)
    keys = []
    stride = block_size * _TOKEN_BYTES
    full = count // block_size
    for index in range(full):
        block = tokens[index * stride : (index + 1) * stride]
        hasher = sha256(b"".join((parent, full_header, block, extras.get(index, no_extras))))
        parent = hasher.digest()
        keys.append(parent.hex())
    rest = count - full * block_size
    if partial and rest:
        tail = (parent, _U32.pack(rest), tokens[full * stride :], extras.get(full, no_extras))
        keys.append(f"{sha256(b''.join(tail)).hexdigest()}:partial:{rest}")
    return keys


def partial_tokens(key: str) -> int | None:
    """The N of a key that ends in `:partial:N`; None for the key of a full block, and any other text."""
    match = _PARTIAL.search(key)
    return None if match is None else int(match[1])


def _extras_by_block(
    extra_keys: Iterable[tuple[str | bytes, int, int]], tokens: int, block_size: int
) -> dict[int, bytes]:
    """The encoded extras of each block that has any."""
    blocks: dict[int, list[tuple[int, int, bytes]]] = {}
    for item in extra_keys:
        key, offset, length = _checked_extra(item)
        if not length or offset >= tokens:
            continue
        first, end = offset // block_size, -(-min(offset + length, tokens) // block_size)
        for index in range(first, end):
            blocks.setdefault(index, []).append((offset - index * block_size, length, key))
    return {
        index: _U32.pack(len(extras))
        + b"".join(_EXTRA.pack(start, length, len(key)) + key for start, length, key in sorted(extras))
        for index, extras in blocks.items()
    }


def _checked_extra(item: tuple[str | bytes, int, int]) -> tuple[bytes, int, int]:
    try:
        key, offset, length = item
    except (TypeError, ValueError):
        raise RequestError(f"an extra key must be (key, offset, length), not {item!r}") from None
    if not isinstance(key, str | bytes):
        raise RequestError(f"an extra key must be text or bytes, not {key!r}")
    raw = encode_text(key) if isinstance(key, str) else key
    largest = (1 << 63) - 1
    return raw, _integer("offset", offset, 0, largest), _integer("length", length, 0, largest)


def _integer(what: str, value: SupportsIndex, smallest: int, largest: int) -> int:
    """`value` as an int; also accepts numpy's integers. Raises RequestError."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or not smallest <= operator.index(value) <= largest:
        raise RequestError(f"{what} must be an integer from {smallest} to {largest}, not {value!r}")
    return operator.index(value)


@functools.lru_cache(maxsize=32)  # a match, then every rank of the task, then the KV events use the same path
def path_keys(path: TokenIds, block_size: int, salt: str = "") -> list[str]:
    """The chained keys (`block_keys`) of a path's full blocks; do not change the list. salt: "" for none.

    A path's salt is an extra key of its first token, so it is part of every block's key.
    """
    return block_keys(path, block_size, [(f"salt {salt}", 0, 1)] if salt else None, partial=False)
