"""Blocks of a simulated memory as an engine sees them: what it may use, and what their bytes must be."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from transferd.blocks.layout.base import Geometry

Bytes = npt.NDArray[np.uint8]


@dataclass
class Blocks:
    """The blocks of one memory that this engine may use, and where their bytes are.

    lost: whether the bytes have gone with the daemon's memory, so that nothing can be said of them.
    """

    free: list[int]
    memories: list[Bytes]  # by rank
    places: npt.NDArray[np.int64]  # [block, byte of a packed block] -> offset
    geometry: Geometry
    lost: Callable[[], bool] = lambda: False

    @classmethod
    def of(cls, geometry: Geometry, memories: list[Bytes], ids: Sequence[int]) -> Blocks:
        places = np.concatenate(
            [
                offset + np.arange(geometry.blocks)[:, None] * stride + np.arange(nbytes)[None, :]
                for offset, stride, nbytes in zip(
                    geometry.offsets.tolist(), geometry.strides.tolist(), geometry.nbytes.tolist(), strict=True
                )
            ],
            axis=1,
        )
        return cls(list(ids), memories, places, geometry)

    def take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def fill(self, block: int, label: str) -> None:
        for rank in range(len(self.memories)):
            self.fill_on(rank, block, label)

    def fill_on(self, rank: int, block: int, label: str) -> None:
        self.memories[rank][self.places[block]] = content(label, rank, self.places.shape[1])

    def holds(self, block: int, label: str) -> bool:
        return all(
            np.array_equal(memory[self.places[block]], content(label, rank, self.places.shape[1]))
            for rank, memory in enumerate(self.memories)
        )

    def ranges(self, block: int, rank: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        base = int(self.memories[rank].ctypes.data)
        return base + self.geometry.offsets + block * self.geometry.strides, self.geometry.nbytes


@functools.lru_cache(maxsize=4096)
def content(label: str, rank: int, nbytes: int) -> Bytes:
    """The bytes that belong to a label on a rank."""
    seed = xxhash.xxh3_64_intdigest(f"{label}/{rank}".encode())
    return np.random.Generator(np.random.PCG64(seed)).integers(0, 256, nbytes, dtype=np.uint8)
