"""Chunks have as many bytes as their storage asks for, if staging has room for two."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.simulation.storage import SimStorage
from transferd.config import from_tree
from transferd.daemon.daemon import Daemon
from transferd.storage.mooncake import MooncakeStorage
from transferd.tiers.staging import CHUNK_BYTES

MIB = 1024**2
BLOCK_BYTES = 512 * 1024  # of 8 layers, 8 heads of 128 dimensions, 16 tokens, K and V, 2 bytes each


class Costly(SimStorage):
    """Behind joined.py, as a backend is whose calls cost much."""

    slots_at_once = None
    chunk_bytes = 32 * MIB


@pytest.mark.parametrize("key_schema", ["transferd", "fastdeploy"])  # fastdeploy: behind divided.py, too
@pytest.mark.parametrize(
    ("storage", "staging", "chunk"),
    [
        (Costly, 256, 32),
        (Costly, 128, 32),
        (Costly, 64, 16),  # room for two
        (SimStorage, 256, 16),
        (None, 256, 16),
    ],
)
def test_a_chunk_has_the_bytes_that_its_storage_asks_for(
    tmp_path: Path, key_schema: str, storage: type[SimStorage] | None, staging: int, chunk: int
) -> None:
    cache = {"ranks": 1, "layers": 8, "kv_heads": 8, "head_dim": 128, "block_size": 16, "device_blocks": 4}
    tree = {
        "server": {"endpoint": f"ipc://{tmp_path}/s"},
        "cache": cache,
        "host": {"staging": staging * MIB},
        "storage": {"backend": "none", "key_schema": key_schema},
    }
    daemon = Daemon(from_tree(tree), storage=None if storage is None else storage())
    context = daemon.default.workers[0].context
    assert context.layout.block_bytes == BLOCK_BYTES
    for consumer in ("read", "write"):
        blocks = context.staging.chunk_slots(consumer)
        assert chunk * MIB // BLOCK_BYTES - 1 <= blocks <= chunk * MIB // BLOCK_BYTES, "one fewer if footers need room"


def test_only_a_pool_asks_for_more_than_others() -> None:
    assert MooncakeStorage.chunk_bytes == 2 * CHUNK_BYTES == 2 * SimStorage.chunk_bytes
