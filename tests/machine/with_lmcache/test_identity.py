"""What LMCache's keys name, and what docs/lmcache.md says they leave out: a new version of LMCache makes this red."""

from __future__ import annotations

import dataclasses
from typing import Any

from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.token_hasher import TokenHasher

from transferd.adapters.lmcache.kinds import key_of

KEY = ObjectKey(b"\x01" * 32, "tiny", 0x01000100, 0, "")
OTHERS: dict[str, Any] = {
    "chunk_hash": b"\x02" * 32,
    "model_name": "other",  # part of every object's name, beside the key
    "kv_rank": 0x02000200,
    "object_group_id": 1,
    "cache_salt": "alice",
}


def test_every_field_of_a_key_is_part_of_an_objects_name() -> None:
    assert {one.name for one in dataclasses.fields(ObjectKey)} == set(OTHERS), "what is new must be in key_of"
    names = {
        (one.model_name, key_of(one)) for one in (KEY, *(dataclasses.replace(KEY, **{k: v}) for k, v in OTHERS.items()))
    }
    assert len(names) == 1 + len(OTHERS)


def test_an_engine_tells_lmcache_of_a_request_what_the_docs_say_and_no_more() -> None:
    told = {one.name for one in dataclasses.fields(IPCCacheServerKey) if one.compare}
    known = {"model_name", "world_size", "worker_id", "token_ids", "start", "end", "cache_salt"}
    assert told == known, "docs/lmcache.md says that keys leave out LoRA adapters and the engine's arguments: still so?"
    assert {one.name for one in dataclasses.fields(MemoryLayoutDesc)} == {"shapes", "dtypes"}, "kinds._kind has these"


def test_a_chunks_hash_covers_the_tokens_before_it() -> None:
    hasher = TokenHasher(chunk_size=4)
    one, other = (hasher.compute_chunk_hashes([first, *range(1, 12)]) for first in (0, 99))
    assert len({*one, *other}) == 6
