"""The wire form of KV events, held against what vLLM's own structs would read and write."""

from __future__ import annotations

import hashlib

import msgspec
import pytest

from tests.integration import subscriber as published
from transferd.blocks.formats import key_digest
from transferd.blocks.keys import block_keys
from transferd.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, block_hash, encode_batch

EVENTS = [
    BlockStored([7, 2**64 - 1], None, [1, 2, 3, 4], 2, None, "STORAGE", None),
    BlockRemoved([5], "CPU"),
    AllBlocksCleared(),
]


def test_a_batch_reads_with_structs_written_from_the_published_schema() -> None:
    batch = msgspec.msgpack.decode(encode_batch(12.5, EVENTS, 3), type=published.Batch)
    assert (batch.ts, batch.data_parallel_rank) == (12.5, 3)
    assert batch.events == [
        published.BlockStored([7, 2**64 - 1], None, [1, 2, 3, 4], 2, None, "STORAGE", None),
        published.BlockRemoved([5], "CPU"),
        published.AllBlocksCleared(),
    ]


def test_events_are_maps_with_their_type_and_every_field_that_has_no_default() -> None:
    _, [stored, removed, cleared], _ = msgspec.msgpack.decode(encode_batch(0.0, EVENTS, 0))
    fields = ["type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"]
    assert list(stored) == fields
    assert removed == {"type": "BlockRemoved", "block_hashes": [5], "medium": "CPU"}
    assert cleared == {"type": "AllBlocksCleared"}


def test_the_hash_of_a_sha256_key_is_the_end_of_that_very_digest() -> None:
    digest = hashlib.sha256(b"a block").digest()
    assert block_hash(digest.hex()) == int.from_bytes(digest[-8:], "big")
    for key in block_keys(range(100), 16, partial=False):
        assert block_hash(key) == int.from_bytes(bytes.fromhex(key)[-8:], "big")


@pytest.mark.parametrize("key", ["", "a", "模型", "\ud800", "A" * 64, "g" * 64, "0" * 63, "0" * 65, "0" * 64 + "\n"])
def test_the_hash_of_any_other_key_is_the_end_of_its_key_digest(key: str) -> None:
    assert block_hash(key) == int.from_bytes(bytes.fromhex(key_digest(key))[-8:], "big") < 2**64
