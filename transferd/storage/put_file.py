"""Writes an object: creates a file, fills it, and renames it into place. Blocking.

The C extension (_files.c) does this for many objects in one call, without the GIL (docs/files.md), and also writes over
files whose objects have left. This is its slow twin. It also does what the extension leaves: the objects with which
anything is unusual.

The ways to write were measured (2 MiB objects, ext4). Through the page cache, allocating the file's blocks first
(fallocate) and then one pwrite is a third faster than pwrite alone, several pwrites, or O_TMPFILE with linkat. Without
support for fallocate we skip it (glibc would write zeros). Past the page cache, the disk decides: it makes no
difference whether the tail is truncated afterwards or written through the page cache.
"""

from __future__ import annotations

import os

from transferd.storage.file_io import UNIT, through_the_cache, unless_refused


def put_file(
    temporary: str, path: str, data: memoryview, direct: int, flags: int, mode: int, *, allocates: bool, syncs: bool
) -> None:
    """Write the object to a new file at `temporary`, and then rename that to `path`. Raises OSError.

    direct: how many of the first bytes go past the page cache, a multiple of UNIT.
    flags, mode: for `open`.
    allocates: allocate the file's blocks first.
    syncs: wait for the medium before the file gets its name.
    """
    fd = os.open(temporary, flags | os.O_CREAT | os.O_EXCL, mode)
    try:
        if allocates and data.nbytes:
            os.posix_fallocate(fd, 0, data.nbytes)
        _fill(fd, data, direct, flags)
        if syncs:
            os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(temporary, path)


def _fill(fd: int, data: memoryview, direct: int, flags: int) -> None:
    done = 0
    with unless_refused():
        while done < direct and done % UNIT == 0:
            done += os.pwrite(fd, data[done:direct], done)
    if flags & os.O_DIRECT and done < data.nbytes:
        through_the_cache(fd)
    while done < data.nbytes:  # once, except on a nearly full disk
        done += os.pwrite(fd, data[done:], done)
