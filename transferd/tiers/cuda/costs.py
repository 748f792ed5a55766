"""The ways of a copy, and which is the best: one small model of what a GPU's copies cost, themselves and their engine.

    straight   a DMA for each stretch of bytes that is in one piece on both sides, in batches
    rows       segments that lie equally far apart are the rows of few copies (rows.py)
    pairs      two blocks' pieces of a segment are two rows of one copy (rows.py), in batches
    gather     a kernel moves the segments between the cache and staging, and a DMA moves whole blocks

A way's cost is the predicted time of a block, and the time that a busy engine loses meanwhile. A kernel of ours takes
turns with the engine's kernels; a copy engine takes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

CopyPath = Literal["gather", "rows", "pairs", "straight"]

ENGINE = 1.5  # seconds of our own that a second of the engine is worth
SHORT = 28 * 1024  # bytes: shorter DMAs of a batch cost more (vLLM #42212; an H100's figures agree)


@dataclass(frozen=True, slots=True)
class Costs:
    """What copies cost on one kind of GPU, beside an engine that computes without a pause. Seconds, bytes a second.

    The defaults fit the figures of an H100 without MPS (docs/adr/0100) within a tenth.

    bus: what a copy engine reaches with long DMAs, in one direction.
    gather: what the pipeline of kernels and DMAs reaches.
    dma_s: what each DMA of a batch adds.
    short_out_s, short_in_s: what each DMA below SHORT adds besides, out of the device and into it.
    row_call_s: what each copy of rows adds. row_s: what each row of it adds.
    pair_s: what each copy of two blocks' pieces adds; None until it has been measured, and then nothing goes in pairs.
    kernel_loss, copy_loss: the part of its time that an engine loses beside our kernels, and beside copies alone.
    """

    bus: float = 46e9
    gather: float = 41e9
    dma_s: float = 0.5e-6
    short_out_s: float = 0.25e-6
    short_in_s: float = 0.96e-6
    row_call_s: float = 5.3e-6
    row_s: float = 0.02e-6
    pair_s: float | None = None
    kernel_loss: float = 0.57
    copy_loss: float = 0.12

    def straight(self, pieces: npt.NDArray[np.int64], *, outward: bool, dma_most: int) -> float:
        """Seconds for a block of these pieces. dma_most: bytes of the longest DMA."""
        short = self.short_out_s if outward else self.short_in_s
        dmas = int((-(-pieces // dma_most)).sum())
        return float(pieces.sum()) / self.bus + self.dma_s * dmas + short * int((pieces < SHORT).sum())

    def rows(self, heights: Sequence[int], nbytes: int) -> float:
        """Seconds for a block of this many bytes in copies of so many rows each."""
        return nbytes / self.bus + self.row_call_s * len(heights) + self.row_s * sum(heights)

    def pairs(self, pieces: npt.NDArray[np.int64]) -> float:
        """Seconds for a block of these pieces, each in a copy with another block's. Only where pairs were measured."""
        assert self.pair_s is not None
        return float(pieces.sum()) / self.bus + self.pair_s * len(pieces) / 2

    def gathered(self, nbytes: int) -> float:
        """Seconds for a block of this many bytes through staging."""
        return nbytes / self.gather

    def best(
        self,
        pieces: npt.NDArray[np.int64],
        heights: Sequence[int],
        *,
        outward: bool,
        dma_most: int,
        gathers: bool = True,
        pairs: bool = False,
    ) -> CopyPath:
        """The way with the least cost for blocks of one shape.

        pieces: int64, bytes of each stretch that is in one piece on both sides.
        heights: rows of each copy, if all of the block can go in rows; otherwise empty.
        gathers: whether there are a kernel and staging. pairs: whether blocks can go in pairs.
        """
        nbytes = int(pieces.sum())
        beside_copies, beside_kernels = 1 + ENGINE * self.copy_loss, 1 + ENGINE * self.kernel_loss
        costs: dict[CopyPath, float] = {}
        if heights:
            costs["rows"] = self.rows(heights, nbytes) * beside_copies
        if pairs and self.pair_s is not None:
            costs["pairs"] = self.pairs(pieces) * beside_copies
        costs["straight"] = self.straight(pieces, outward=outward, dma_most=dma_most) * beside_copies
        if gathers:
            costs["gather"] = self.gathered(nbytes) * beside_kernels
        return min(costs, key=costs.__getitem__)
