"""What the page cache has of a file."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from pathlib import Path

from tests.support.waits import wait_until


def pages_in_memory(path: Path) -> int:
    """How many pages of a file the page cache has. (A read that must not wait makes the kernel read the file ahead.)"""
    libc = ctypes.CDLL(None, use_errno=True)
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped,
    ):
        seen = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        assert libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(len(mapped)), seen) == 0, ctypes.get_errno()
        return sum(page & 1 for page in seen)


def tells_what_it_has(directory: Path) -> bool:
    """Whether a read of a file there can be limited to what the page cache has (ext4, XFS, Btrfs; not tmpfs)."""
    with tempfile.TemporaryFile(dir=directory) as file:
        file.write(b"x")
        file.flush()
        try:
            return os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT) == 1
        except OSError:
            return False


def forget(path: Path) -> None:
    """Have the page cache drop a file; again while it keeps a part, such as what is just being read ahead."""
    with path.open("rb") as file:
        os.fsync(file.fileno())

        def dropped() -> bool:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return not pages_in_memory(path)

        wait_until(dropped, f"the page cache keeps {path}")
