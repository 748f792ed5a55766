"""Deterministic random KV: what a block must contain, on every rank, to the last byte.

The content of (block, rank, plane, layer) is a stretch of one random table, XORed with a 64-bit mix of
the four. Any two differ in every word, and it costs about as much as a memory copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

POISON = 0xA5  # what target blocks are filled with first, so that stale bytes cannot pass for good ones
_OFFSETS = 4096

Caches = Sequence[dict[str, list[npt.NDArray[Any]]]]  # per rank: plane -> one array per layer


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A block that came back wrong, and the first byte of it that is."""

    content: int
    block: int
    rank: int
    plane: str
    layer: int
    offset: int


class KvData:
    """Fills and verifies blocks of attached caches. Borrows the arrays."""

    def __init__(self, caches: Caches, seed: int = 0) -> None:
        self._parts = [
            (rank, plane, layer, _raw(array))
            for rank, cache in enumerate(caches)
            for plane, layers in cache.items()
            for layer, array in enumerate(layers)
        ]
        longest = max(part[3].shape[1] for part in self._parts)
        words = -(-longest // 8) + _OFFSETS
        self._table = np.random.default_rng(seed).integers(0, 2**63, words, dtype=np.uint64)
        self.block_bytes = sum(part[3].shape[1] for part in self._parts)

    def fill(self, block: int, content: int) -> None:
        """Write what `content` must look like into device block `block`, on every rank."""
        for number, (_, _, _, raw) in enumerate(self._parts):
            raw[block] = self._expected(content, number, raw.shape[1])

    def poison(self, blocks: Sequence[int]) -> None:
        for _, _, _, raw in self._parts:
            raw[list(blocks)] = POISON

    def verify(self, block: int, content: int) -> Mismatch | None:
        """The first difference, or None if every byte of the block is right on every rank."""
        for number, (rank, plane, layer, raw) in enumerate(self._parts):
            expected = self._expected(content, number, raw.shape[1])
            if not np.array_equal(raw[block], expected):
                offset = int(np.flatnonzero(raw[block] != expected)[0])
                return Mismatch(content, block, rank, plane, layer, offset)
        return None

    def _expected(self, content: int, number: int, nbytes: int) -> npt.NDArray[np.uint8]:
        mixed = _mix(content * 65536 + number)
        start = mixed % _OFFSETS
        words: npt.NDArray[np.uint64] = self._table[start : start + -(-nbytes // 8)] ^ np.uint64(mixed)
        return words.view(np.uint8)[:nbytes]


def _raw(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """An attached array as [blocks, bytes], sharing its memory."""
    raw: npt.NDArray[np.uint8] = array.view(np.uint8).reshape(array.shape[0], -1)
    return raw


def _mix(value: int) -> int:
    """splitmix64's finaliser: neighbouring values come out unrelated (Steele, Lea and Flood, 2014)."""
    mask = 2**64 - 1
    value = (value + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)
