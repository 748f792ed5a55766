"""The wire format of KV events: vLLM's, so that a router can subscribe to transferd exactly as to vLLM.

A batch is a msgpack array `[ts, events, data_parallel_rank]`. An event is a map whose "type" is its class name. The
fields and their order are those of vllm/distributed/kv_events.py since events became maps (vLLM 0.24; before that
they were arrays). Fields that vLLM declares without a default are always present, even if null; those with a
default are omitted.

A block's hash is an unsigned 64-bit integer, because every consumer reads that: the last eight bytes, big-endian,
of a digest (vLLM truncates its SHA-256 in the same way). The digest is

* the key itself, if it is a SHA-256 in 64 lower-case hex digits, as those of `keys.block_keys` are; the hash then
  equals the engine's own;
* otherwise the key's 160-bit digest (formats.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from transferd.blocks.formats import key_digest

MEDIUM_GPU: Final = "GPU"
MEDIUM_CPU: Final = "CPU"
MEDIUM_STORAGE: Final = "STORAGE"


def medium_of_level(level: str) -> str:
    """The medium of one level of storage, announced beside MEDIUM_STORAGE, which is any of them."""
    return f"{MEDIUM_STORAGE}/{level}"


_SHA256_HEX = re.compile(r"[0-9a-f]{64}", re.ASCII)
_HASH_DIGITS = 16  # hex digits of 64 bits


class KvEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """The base of all events: "type" holds the class name."""


class BlockStored(KvEvent):
    """A chain of blocks is now available, each the child of the one before it."""

    block_hashes: list[int]
    parent_block_hash: int | None  # parent of the first block; None for the root of a sequence, or if unknown
    token_ids: list[int]  # those of all blocks in order; empty if unknown
    block_size: int  # 0 without token_ids, as in vLLM's events that carry only hashes
    lora_id: int | None
    medium: str
    lora_name: str | None


class BlockRemoved(KvEvent):
    """Blocks are gone."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(KvEvent):
    """All announced blocks are gone, in every medium."""


class Batch(msgspec.Struct, array_like=True, gc=False):
    """Events of one moment. ts: seconds since the epoch."""

    ts: float
    events: Sequence[KvEvent]
    data_parallel_rank: int


_encoder = msgspec.msgpack.Encoder()


def encode_batch(ts: float, events: Sequence[KvEvent], dp_rank: int) -> bytes:
    return _encoder.encode(Batch(ts, events, dp_rank))


def block_hash(key: str) -> int:
    """The hash under which a key's block is announced; see the module docstring."""
    digest = key if len(key) == 64 and _SHA256_HEX.fullmatch(key) else key_digest(key)
    return int(digest[-_HASH_DIGITS:], 16)
