"""Block ids × geometry → coalesced byte runs. The only place that computes offsets.

A plan has two forms, and each device tier uses the one that it can execute best:

* `moves`: which block goes where, and between which two geometries. A GPU kernel computes addresses from a
  table of segments and these ids, so only a few bytes per block travel to the device;
* `runs`: an int64 table [n, 3]: source offset, target offset, byte count, with offsets relative to each side's
  origin. Computed on first use. Runs that continue each other on both sides are merged, be they of one block (layers
  that lie together) or of neighbours.

Geometries are relative, so ranks whose memory has the same shape share one plan. Admission calls `check_ids`;
`plan_copy` repeats the check, as the last line of defence before memory is written.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from transferd.blocks.layout.base import Geometry
from transferd.errors import InvariantError, RequestError
from transferd.tasks import check_ids


class Moves(NamedTuple):
    """Copy every segment of block source_ids[i] to block target_ids[i]. ids: int64 [n]."""

    source: Geometry
    source_ids: npt.NDArray[np.int64]
    target: Geometry
    target_ids: npt.NDArray[np.int64]


class CopyPlan:
    """The moves or runs of one copy.

    nbytes: the sum of all runs.
    moves: None if the plan was made only of runs.
    """

    __slots__ = ("_runs", "moves", "nbytes")

    def __init__(self, nbytes: int, *, moves: Moves | None = None, runs: npt.NDArray[np.int64] | None = None) -> None:
        assert moves is not None or runs is not None
        self.nbytes = nbytes
        self.moves = moves
        self._runs = runs

    @property
    def runs(self) -> npt.NDArray[np.int64]:
        """int64 [n, 3], C-contiguous: source offset, target offset, byte count."""
        if self._runs is None:
            assert self.moves is not None
            self._runs = _runs_of(self.moves)
        return self._runs


def plan_copy(source: Geometry, source_ids: Sequence[int], target: Geometry, target_ids: Sequence[int]) -> CopyPlan:
    """A plan that copies every segment of block source_ids[i] to block target_ids[i], for all i.

    Raises RequestError for ids out of range, duplicate targets or lists of different length.
    """
    count = len(source_ids)
    if count != len(target_ids):
        what = f"{count} source ids but {len(target_ids)} target ids; the lists must have the same length"
        raise RequestError(what, code="length_mismatch")
    check_ids(source_ids, source.blocks, "source ids", target=False)
    check_ids(target_ids, target.blocks, "target ids", target=True)
    moves = Moves(source, np.asarray(source_ids, dtype=np.int64), target, np.asarray(target_ids, dtype=np.int64))
    return CopyPlan(_path(source, target).nbytes * count, moves=moves)


def _runs_of(moves: Moves) -> npt.NDArray[np.int64]:
    path = _path(moves.source, moves.target)
    count = len(moves.source_ids)
    if count == 1:  # the most frequent plan: nothing to merge, so it skips a few vector operations
        source_id, target_id = int(moves.source_ids[0]), int(moves.target_ids[0])
        return path.base + path.source_step * source_id + path.target_step * target_id
    # [segment, block, 3]: in layer-major memory, neighbours in a row are neighbours in memory.
    # Reading in ascending order is a tenth faster, and finds every pair of neighbours.
    order = np.argsort(moves.source_ids, kind="stable")
    runs = np.empty((len(path.base), count, 3), dtype=np.int64)
    runs[:] = path.base[:, None]
    runs[:, :, 0] += np.multiply.outer(path.source_step[:, 0], moves.source_ids[order])
    runs[:, :, 1] += np.multiply.outer(path.target_step[:, 1], moves.target_ids[order])
    return _merged(runs.reshape(-1, 3))


class _Path(NamedTuple):
    """The part that all plans between two geometries share: the runs of block 0 → block 0, and the steps per id."""

    base: npt.NDArray[np.int64]  # [segments that touch on both sides are one, 3]
    source_step: npt.NDArray[np.int64]
    target_step: npt.NDArray[np.int64]
    nbytes: int  # of one block


@functools.lru_cache(maxsize=256)
def _path(source: Geometry, target: Geometry) -> _Path:
    if not np.array_equal(source.nbytes, target.nbytes):
        raise InvariantError("cannot plan a copy between memories of different layouts")
    first, nbytes = joined_segments(source, target)
    source_step, target_step = np.zeros((2, len(first), 3), dtype=np.int64)
    source_step[:, 0], target_step[:, 1] = source.strides[first], target.strides[first]
    base = np.stack((source.offsets[first], target.offsets[first], nbytes), axis=1)
    return _Path(base, source_step, target_step, int(nbytes.sum()))


def joined_segments(source: Geometry, target: Geometry) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Join segments of a block that touch on both sides, and move alike from block to block.

    Returns, for each stretch in ascending order of the source, the index of its first segment and its bytes.
    """
    order = np.argsort(source.offsets, kind="stable")
    sides = [(side.offsets[order], side.strides[order]) for side in (source, target)]
    nbytes = source.nbytes[order]
    touches = np.ones(len(order) - 1, dtype=bool)
    for offsets, strides in sides:
        touches &= (offsets[1:] == offsets[:-1] + nbytes[:-1]) & (strides[1:] == strides[:-1])
    if not touches.any():
        return np.arange(len(order)), source.nbytes
    starts = np.flatnonzero(np.concatenate(([True], ~touches)))
    return order[starts], np.add.reduceat(nbytes, starts)


def _merged(runs: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Merge each run that continues the previous run on both sides into that run."""
    if len(runs) < 2:
        return runs
    ends = runs[:-1, :2] + runs[:-1, 2:]
    continues = (runs[1:, :2] == ends).all(axis=1)
    if not continues.any():
        return runs
    starts = np.flatnonzero(np.concatenate(([True], ~continues)))
    merged = runs[starts].copy()
    merged[:, 2] = np.add.reduceat(runs[:, 2], starts)
    return merged
