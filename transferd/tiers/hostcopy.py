"""Executes a copy plan between two ranges of host memory.

The fast version is a small C extension that walks the runs without the GIL. On 16 KiB runs a Python loop of
memmove calls reaches only a third of memcpy's speed, because a call costs as much as the copy. The slow version
does the same and needs no compiler. `NATIVE` says whether the fast version is in use.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

_CopyRuns = Callable[[int, int, npt.NDArray[np.int64]], None]


def copy_runs_python(source_address: int, target_address: int, runs: npt.NDArray[np.int64], /) -> None:
    """The slow version of `copy_runs`. Releases the GIL only during each copy."""
    memmove = ctypes.memmove
    for source, target, nbytes in runs.tolist():
        memmove(target_address + target, source_address + source, nbytes)


# copy_runs(source address, target address, runs): copy runs[i] = (source offset, target offset, nbytes), relative to
# the two addresses. The caller owns both ranges and guarantees that every run lies inside them and that no run's
# target overlaps any source.
try:
    from transferd.tiers import _copyruns
except ImportError:
    copy_runs: _CopyRuns = copy_runs_python
else:
    copy_runs = _copyruns.copy_runs

NATIVE: bool = copy_runs is not copy_runs_python
