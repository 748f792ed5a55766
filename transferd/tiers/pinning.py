"""How host memory is kept in place: what a region asks of whoever knows how its device likes that done."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Protocol

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.munlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class Pinning(Protocol):
    """Pins ranges of host memory. Refusal is an answer, not an error: the memory works all the same."""

    @property
    def node(self) -> int | None:
        """The NUMA node that memory should come from; None: any."""
        ...

    def pin(self, address: int, nbytes: int) -> str:
        """Returns why not, or "" when it is pinned."""
        ...

    def unpin(self, address: int, nbytes: int) -> None:
        """Undo a `pin` that worked, once. Raises TierError."""
        ...


class MemoryLock:
    """mlock(2). Asks for RLIMIT_MEMLOCK."""

    node: int | None = None

    def pin(self, address: int, nbytes: int) -> str:
        if _libc.mlock(address, nbytes) == 0:
            return ""
        code = ctypes.get_errno()
        problem = f"{errno.errorcode.get(code, code)}: {os.strerror(code)}"
        return f"{problem}; raise RLIMIT_MEMLOCK (LimitMEMLOCK=infinity in the unit)"

    def unpin(self, address: int, nbytes: int) -> None:
        _libc.munlock(address, nbytes)


MEMORY_LOCK = MemoryLock()
