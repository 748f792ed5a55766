"""What the page cache has of a file."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path


def pages_in_memory(path: Path) -> int:
    """How many pages of a file the page cache has. (A read that must not wait would make it read the file ahead.)"""
    libc = ctypes.CDLL(None, use_errno=True)
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped,
    ):
        seen = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        assert libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(len(mapped)), seen) == 0, ctypes.get_errno()
        return sum(page & 1 for page in seen)
