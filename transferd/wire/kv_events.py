"""The wire form of KV events: vLLM's, so that a router subscribes to transferd as it would to vLLM.

A batch is a msgpack array `[ts, events, data_parallel_rank]`. An event is a map whose "type" is its
class name. The fields and their order are those of vllm/distributed/kv_events.py since events became
maps (vLLM 0.24; before that they were arrays). Fields that vLLM declares without a default are always
there, also when they are null; those with a default are left out here altogether.

A block's hash is an unsigned 64-bit integer, because that is what every consumer reads: the last eight
bytes, big-endian, of a digest (vLLM cuts its SHA-256 in the same way). The digest is

* the key itself, where the key is a SHA-256 in 64 lower-case hex digits, as FastDeploy's block hashes
  and `keys.block_keys` are: then the hash is the same as the engine's own;
* else the key's digest of 160 bits (keys.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from transferd.blocks.keys import key_digest

MEDIUM_GPU: Final = "GPU"
MEDIUM_CPU: Final = "CPU"
MEDIUM_STORAGE: Final = "STORAGE"

_SHA256_HEX = re.compile(r"[0-9a-f]{64}", re.ASCII)
_HASH_DIGITS = 16  # hex digits of 64 bits


class KvEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """What all events share: the class name under "type"."""


class BlockStored(KvEvent):
    """A chain of blocks is there now, each the child of the one before it.

    parent_block_hash: of the first block; None for the root of a sequence, or where it is not known.
    token_ids: of all blocks, one after the other; empty where they are not known, and block_size is 0
    then, as vLLM marks an event that has nothing but hashes.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None


class BlockRemoved(KvEvent):
    """Blocks are not there any more."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(KvEvent):
    """Nothing that was announced is there any more, in any medium."""


class Batch(msgspec.Struct, array_like=True, gc=False):
    """Events that became true together. ts: seconds since the epoch."""

    ts: float
    events: Sequence[KvEvent]
    data_parallel_rank: int


_encoder = msgspec.msgpack.Encoder()


def encode_batch(ts: float, events: Sequence[KvEvent], dp_rank: int) -> bytes:
    return _encoder.encode(Batch(ts, events, dp_rank))


def block_hash(key: str) -> int:
    """The hash under which a key's block is announced; see the module's docstring."""
    digest = key if len(key) == 64 and _SHA256_HEX.fullmatch(key) else key_digest(key)
    return int(digest[-_HASH_DIGITS:], 16)
