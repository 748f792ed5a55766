"""Executes a copy plan between two ranges of host memory. Another process may take either range away at any moment.

Shared memory can be truncated while we copy it, or be sparse on a full file system. Touching it then raises SIGBUS,
which would end the process. So this package touches blocks that an engine can reach only through `copy_runs` and the
extension `_inplace`. Both raise MemoryLost instead.

The fast version is a small C extension that walks the runs without the GIL, guarded as _guard.c says. The slow version
needs no compiler: the kernel copies within this process (process_vm_readv), and reports what it cannot access.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from transferd.errors import MemoryLost, TierError
from transferd.runtime import native
from transferd.runtime.native import NativeCall
from transferd.runtime.threads import Direction, Threads

Runs = npt.NDArray[np.int64]
_CopyRuns = Callable[[int, int, Runs], None]

AT_ONCE = 1024  # runs of one system call: IOV_MAX

_libc = ctypes.CDLL(None, use_errno=True)


def copy_runs_python(source_address: int, target_address: int, runs: Runs, /) -> None:
    """The slow version of `copy_runs`. Releases the GIL during each system call."""
    runs = runs[runs[:, 2] > 0]
    while len(runs):
        ends = np.cumsum(runs[:AT_ONCE, 2])
        moved = _moved(source_address, target_address, runs[:AT_ONCE])
        if moved < ends[-1]:  # so much at once, or the next byte cannot be accessed
            done = int(np.searchsorted(ends, moved, side="right"))
            rest = runs[done:].copy()
            within = moved - (int(ends[done - 1]) if done else 0)
            rest[0] += (within, within, -within)
            runs = rest
        else:
            runs = runs[AT_ONCE:]


def _moved(source_address: int, target_address: int, runs: Runs) -> int:
    """How many bytes of these runs one system call has copied, at least one. Raises MemoryLost, TierError."""
    count = len(runs)
    parts = np.empty((2, count, 2), dtype=np.uint64)  # iovec: address, length
    for side, (address, column) in enumerate(((target_address, 1), (source_address, 0))):
        parts[side, :, 0] = (runs[:, column] + address).astype(np.uint64)
        parts[side, :, 1] = runs[:, 2]
    ours, theirs = parts[0].ctypes.data, parts[1].ctypes.data
    moved = _libc.process_vm_readv(os.getpid(), ctypes.c_void_p(ours), count, ctypes.c_void_p(theirs), count, 0)
    if moved > 0:
        return int(moved)
    code = errno.EFAULT if moved == 0 else ctypes.get_errno()
    if code == errno.EFAULT:
        raise MemoryLost("shared memory vanished while it was copied: it was truncated, or it is full")
    raise TierError(f"cannot copy between blocks and host memory (process_vm_readv): {os.strerror(code)}")


_libc.process_vm_readv.restype = ctypes.c_ssize_t
_IOVECS = ctypes.c_void_p, ctypes.c_ulong  # where they are, and how many
_libc.process_vm_readv.argtypes = (ctypes.c_int, *_IOVECS, *_IOVECS, ctypes.c_ulong)

# copy_runs(source address, target address, runs): copy runs[i] = (source offset, target offset, nbytes), relative to
# the two addresses. The caller guarantees that every run lies inside the two ranges and that no run's target overlaps
# any source. Raises MemoryLost if a part of a range cannot be accessed any more; what was copied is undefined.
try:
    from transferd.tiers import _copyruns
except ImportError:
    copy_runs: _CopyRuns = copy_runs_python
else:
    copy_runs = _copyruns.copy_runs

NATIVE: bool = copy_runs is not copy_runs_python


async def copied(threads: Threads, direction: Direction, source: int, target: int, runs: Runs, what: str) -> None:
    """Do what `copy_runs` does in a thread; in one that needs no interpreter, if there are such threads.

    what: names the copy in reports of hanging calls. Raises as `copy_runs`; NoThreads, Closed.
    """
    if not (NATIVE and native.NATIVE):
        await threads.run(direction, lambda: copy_runs(source, target, runs), what)
        return
    call = NativeCall(_copyruns.prepared(source, target, runs))
    await threads.run(direction, call, what)
    _copyruns.check(call.native)
