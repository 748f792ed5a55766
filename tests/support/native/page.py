"""The fault library of another process, armed from here while that process runs (faults.c)."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support import native
from transferd.runtime.compat import Self

HANGS = -2  # in place of an errno: the call hangs until the fault is disarmed, then it is made
SLOW = -3  # in place of an errno: the call takes `delay_ms` longer
ALL = 2**31 - 1


class _Plan(ctypes.Structure):
    """`struct plan` of faults.c."""

    _fields_ = (
        ("calls", ctypes.c_char * 64),
        ("path", ctypes.c_char * 1024),
        ("error", ctypes.c_int),
        ("delay_ms", ctypes.c_int),
        ("armed", ctypes.c_int),
        ("skip_left", ctypes.c_int),
        ("fail_left", ctypes.c_int),
        ("hits", ctypes.c_int),
        ("wall_s", ctypes.c_int),
        ("wall_reads", ctypes.c_int),
    )


class FaultPage:
    """Owns the page; `prefix` puts a command under it. The process may outlive the object."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(ctypes.sizeof(_Plan)))
        self._map(path)

    @classmethod
    def mapped(cls, path: Path) -> Self:
        """A page that is there."""
        page = cls.__new__(cls)
        page._map(path)
        return page

    def _map(self, path: Path) -> None:
        self._path = path
        with path.open("r+b") as file:
            self._plan = _Plan.from_buffer(mmap.mmap(file.fileno(), ctypes.sizeof(_Plan)))

    @property
    def prefix(self) -> list[str]:
        """In front of a command."""
        return [*native.under(""), f"TRANSFERD_FAULT_PAGE={self._path}"]

    @contextmanager
    def armed(self, calls: str, error: int, *, count: int = ALL, path: str = "", delay_ms: int = 0) -> Iterator[None]:
        """The next `count` of these calls fail, of files whose path has `path`. See faults.c for the names."""
        plan = self._plan
        plan.armed = 0
        plan.calls, plan.path, plan.error, plan.delay_ms = calls.encode(), path.encode(), error, delay_ms
        plan.skip_left, plan.fail_left, plan.hits = 0, count, 0
        plan.armed = 1
        try:
            yield
        finally:
            plan.armed = 0

    @property
    def hits(self) -> int:
        """How many calls the fault has met since the last `armed`."""
        return int(self._plan.hits)

    def step_wall(self, seconds: int) -> None:
        """From now on the wall clock of the process is this far off; 0: it is right again."""
        self._plan.wall_s = seconds

    @property
    def wall_reads(self) -> int:
        """How often the process has read a wall clock that was off."""
        return int(self._plan.wall_reads)
