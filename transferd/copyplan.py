"""Block ids × geometry → coalesced byte runs. The one place that knows offsets.

A plan is an int64 table of runs [n, 3]: source offset, target offset, byte count, each offset
relative to its side's origin. Because geometries are relative, ranks whose memory has the same
shape share one plan. Runs that continue each other on both sides are merged.

`check_ids` is what admission calls, so that a bad id is refused before anything moves; `plan_copy`
asserts the same again, as the last line before memory is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from transferd.layout.base import Geometry


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """runs: int64 [n, 3] C-contiguous (source offset, target offset, nbytes). nbytes: their sum."""

    runs: npt.NDArray[np.int64]
    nbytes: int


def check_ids(ids: Sequence[int], blocks: int, what: str, *, target: bool) -> None:
    """Raise RequestError naming the first id out of 0 … blocks-1, or, for targets, the first duplicate."""
    raise NotImplementedError


def plan_copy(source: Geometry, source_ids: Sequence[int], target: Geometry, target_ids: Sequence[int]) -> CopyPlan:
    """Runs that copy block source_ids[i] to block target_ids[i], every segment, for all i.

    Raises RequestError for ids out of range, duplicate targets or lists of different length.
    """
    raise NotImplementedError
