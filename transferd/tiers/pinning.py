"""Pinning keeps host memory in place. Each kind of device may bring its own way to pin."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Protocol

from transferd.tiers.populate import pieces_of

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.munlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class Pinning(Protocol):
    """Pins ranges of host memory. A refusal is an answer, not an error: unpinned memory works, too."""

    @property
    def node(self) -> int | None:
        """The preferred NUMA node of the memory; None: any."""
        ...

    def pin(self, address: int, nbytes: int) -> str:
        """Pin the range. Returns "", or why it was refused."""
        ...

    def unpin(self, address: int, nbytes: int) -> None:
        """Undo a successful `pin`, once. Raises TierError."""
        ...


class MemoryLock:
    """mlock(2). Limited by RLIMIT_MEMLOCK."""

    node: int | None = None

    def pin(self, address: int, nbytes: int) -> str:
        for at, length in pieces_of(address, nbytes):
            if _libc.mlock(at, length) != 0:
                code = ctypes.get_errno()
                _libc.munlock(address, at - address)
                problem = f"{errno.errorcode.get(code, code)}: {os.strerror(code)}"
                return f"{problem}; raise RLIMIT_MEMLOCK (LimitMEMLOCK=infinity in the unit)"
        return ""

    def unpin(self, address: int, nbytes: int) -> None:
        for at, length in pieces_of(address, nbytes):
            _libc.munlock(at, length)


MEMORY_LOCK = MemoryLock()
