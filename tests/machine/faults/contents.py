"""What belongs under a key: bytes that any process can work out from the key alone."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.integration.caches import Caches, arrays

RANKS = 2
LAYERS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 2, 128, 64
DEVICE_BLOCKS = 24
BLOCK_BYTES = LAYERS * 2 * KV_HEADS * HEAD_DIM * BLOCK_SIZE * 2  # of one rank

CACHE: dict[str, Any] = {
    "ranks": RANKS,
    "layers": LAYERS,
    "kv_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "block_size": BLOCK_SIZE,
    "device_blocks": DEVICE_BLOCKS,
    "host_blocks": 0,
}


def _pieces(caches: Caches, block: int, key: str) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """(the block's bytes in one array, what they should be) for every array of every rank."""
    random = np.random.default_rng(zlib.crc32(key.encode()))
    for array in arrays(caches):
        there = array[block].reshape(-1).view(np.uint8)
        yield there, np.frombuffer(random.bytes(there.nbytes), dtype=np.uint8)


def write_content(caches: Caches, block: int, key: str) -> None:
    for there, wanted in _pieces(caches, block, key):
        there[:] = wanted


def holds_content(caches: Caches, block: int, key: str) -> bool:
    return all(np.array_equal(there, wanted) for there, wanted in _pieces(caches, block, key))
