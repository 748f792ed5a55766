"""Writes an object: creates a file or reuses an evicted one, fills it, and renames it into place. Blocking.

The C extension (_files.c) does all of this for many objects in one call, without the GIL (docs/files.md). This is its
slow twin. It also does what the extension leaves: the objects with which anything is unusual.

The ways to write were measured (2 MiB objects, ext4). Through the page cache, allocating the file's blocks first
(fallocate) and then one pwrite is a third faster than pwrite alone, several pwrites, or O_TMPFILE with linkat. Without
support for fallocate we skip it (glibc would write zeros). Past the page cache, the disk decides: it makes no
difference whether the tail is truncated afterwards or written through the page cache.
"""

from __future__ import annotations

import enum
import os
import stat

from transferd.storage.file_io import UNIT, through_the_cache, unless_refused


class Reached(enum.IntEnum):
    """How far `put_file` came."""

    NAMED = 0  # to the end
    NOT_RETIRED = 1  # nothing has changed
    NOT_OPENED = 2
    UNFIT = 3  # the file to overwrite is not a regular file, or has another link
    NOT_FILLED = 4
    NOT_NAMED = 5  # the file is complete


def put_file(
    spare: str | None,
    temporary: str,
    path: str,
    data: memoryview,
    direct: int,
    flags: int,
    mode: int,
    allocates: bool,
    syncs: bool,
    /,
) -> tuple[int, int]:
    """Write the object to the file at `temporary`, and then rename that to `path`.

    spare: a file to rename to `temporary` and to overwrite there, unless it is UNFIT; None to make a new one.
    direct: how many of the first bytes go past the page cache, a multiple of UNIT.
    flags, mode: for `open`.
    allocates: allocate the blocks of a new file first.
    syncs: wait for the medium before the file gets its name.

    Returns how far it came (Reached), and the errno that stopped it there.
    """
    reached = Reached.NOT_RETIRED
    try:
        if spare is not None:
            os.rename(spare, temporary)
        reached = Reached.NOT_OPENED
        # Opening a FIFO without O_NONBLOCK would wait for a reader.
        fd = os.open(temporary, flags | (os.O_CREAT | os.O_EXCL if spare is None else os.O_NONBLOCK), mode)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
                return Reached.UNFIT, 0
            reached = Reached.NOT_FILLED
            if found.st_size > data.nbytes:
                os.ftruncate(fd, data.nbytes)
            if allocates and found.st_size < data.nbytes:
                os.posix_fallocate(fd, 0, data.nbytes)
            _fill(fd, data, direct, flags)
            if syncs:
                os.fsync(fd)
        finally:
            os.close(fd)
        reached = Reached.NOT_NAMED
        os.rename(temporary, path)
    except OSError as error:
        return reached, error.errno or 0
    return Reached.NAMED, 0


def _fill(fd: int, data: memoryview, direct: int, flags: int) -> None:
    done = 0
    with unless_refused():
        while done < direct and done % UNIT == 0:
            done += os.pwrite(fd, data[done:direct], done)
    if flags & os.O_DIRECT and done < data.nbytes:
        through_the_cache(fd)
    while done < data.nbytes:  # once, except on a nearly full disk
        done += os.pwrite(fd, data[done:], done)
