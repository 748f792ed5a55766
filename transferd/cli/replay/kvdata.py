"""Deterministic random KV: every byte that a block must contain, on every rank.

The bytes of (content, rank, plane, layer) are a slice of one random table, XORed with a 64-bit mix of the four. So
any two of them differ nearly everywhere, and a shifted copy differs too. Nothing has to be stored, and computing
the bytes costs about as much as a memory copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from transferd.errors import InvariantError

POISON = 0xA5  # fills target blocks before a load, so that stale bytes cannot pass for good ones
VERSION = 1  # the version of the bytes; it is part of the keys, so versions never mix
_OFFSETS = 4096

Caches = Sequence[dict[str, list[npt.NDArray[Any]]]]  # per rank: plane -> one array per layer


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A block with wrong content, and the first wrong byte."""

    content: int
    block: int
    rank: int
    plane: str
    layer: int
    offset: int

    def __str__(self) -> str:
        return (
            f"content {self.content} in block {self.block}: rank {self.rank}, {self.plane} of layer {self.layer}, "
            f"from byte {self.offset}"
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """One layer of one plane of one rank. raw: [blocks, bytes], a view of the attached memory."""

    rank: int
    plane: str
    layer: int
    raw: npt.NDArray[np.uint8]


class KvData:
    """Fills, poisons and verifies blocks of attached caches. Borrows the arrays. Not thread-safe."""

    def __init__(self, caches: Caches) -> None:
        """caches: what Client.attach returned, rank by rank."""
        self._parts = [
            _Part(rank, plane, layer, _raw(array))
            for rank, cache in enumerate(caches)
            for plane, layers in cache.items()
            for layer, array in enumerate(layers)
        ]
        longest = max(part.raw.shape[1] for part in self._parts)
        # A bit generator's raw stream is the same in every version of numpy.
        self._table: npt.NDArray[np.uint64] = np.random.PCG64(VERSION).random_raw(-(-longest // 8) + _OFFSETS)
        self.block_bytes = sum(part.raw.shape[1] for part in self._parts)  # of all ranks

    def fill(self, block: int, content: int) -> None:
        """Write the bytes of `content` into device block `block`, on every rank."""
        for number, part in enumerate(self._parts):
            part.raw[block] = self._expected(content, number, part)

    def poison(self, blocks: Sequence[int]) -> None:
        """Fill blocks with POISON."""
        for part in self._parts:
            part.raw[list(blocks)] = POISON

    def verify(self, block: int, content: int) -> Mismatch | None:
        """The first difference, or None if every byte of the block is right on every rank."""
        for number, part in enumerate(self._parts):
            expected = self._expected(content, number, part)
            if not np.array_equal(part.raw[block], expected):
                offset = int(np.argmax(part.raw[block] != expected))
                return Mismatch(content, block, part.rank, part.plane, part.layer, offset)
        return None

    def untouched(self, block: int, content: int) -> Mismatch | None:
        """The first byte of a poisoned block that was overwritten, or None. content: only named in the Mismatch."""
        for part in self._parts:
            written = part.raw[block] != POISON
            if written.any():
                return Mismatch(content, block, part.rank, part.plane, part.layer, int(np.argmax(written)))
        return None

    def _expected(self, content: int, number: int, part: _Part) -> npt.NDArray[np.uint8]:
        nbytes = part.raw.shape[1]
        mixed = _mix(_mix(content) + number)
        start = mixed % _OFFSETS
        words: npt.NDArray[np.uint64] = self._table[start : start + -(-nbytes // 8)] ^ np.uint64(mixed)
        return words.view(np.uint8)[:nbytes]


def _raw(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """A view of an attached array as [blocks, bytes]."""
    if not array.flags.c_contiguous:
        raise InvariantError("an attached array is not contiguous, so writes would go to a copy")
    raw: npt.NDArray[np.uint8] = array.reshape(array.shape[0], -1).view(np.uint8)
    return raw


def _mix(value: int) -> int:
    """splitmix64's finaliser: neighbouring values come out unrelated (Steele, Lea and Flood, 2014)."""
    mask = 2**64 - 1
    value = (value + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)
