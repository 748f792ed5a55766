"""Reads one stored file piece by piece and checks it against its own name. Blocking; for the scrub and `verify`.

It needs no layout: name and footer contain everything (formats.py). It uses memory for one piece, whatever the
object's size.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from transferd.blocks.formats import FOOTER_BYTES, Damage, Inspection, NotSealed, stamp_of_name
from transferd.storage.opening import READ_FLAGS

PIECE_BYTES = 1024**2  # large enough for a disk, small enough that a stop can wait for it


@dataclass(slots=True)
class Examination:
    """The examination of one file.

    After `pieces` is exhausted, at most one of damage, gone and unsealed is set; none if the object is intact.
    """

    name: str
    path: str
    damage: Damage | None = None  # what is wrong with the object
    keep_out: bool = False  # have the page cache drop the file afterwards
    gone: bool = False  # the object was replaced, removed or written over meanwhile
    unsealed: bool = False  # the object contains nothing to check against
    nbytes: int = 0

    def pieces(self, buffer: memoryview) -> Iterator[int]:
        """Read the object through `buffer`; yields the size of each piece. Raises OSError for errors besides damage."""
        try:
            fd = os.open(self.path, READ_FLAGS)
        except FileNotFoundError:
            self.gone = True
            return
        try:
            opened = os.fstat(fd)
            if not stat.S_ISREG(opened.st_mode):
                self.damage = Damage.UNREADABLE
                return
            # A hint (from Linux 6.3): pages that only a check has read need not stay in the page cache.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_NOREUSE)
            yield from self._inspect(fd, buffer)
            if self.damage is not None and not self._unchanged_since(opened):
                self.damage, self.gone = None, True
        finally:
            if self.keep_out:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def _inspect(self, fd: int, buffer: memoryview) -> Iterator[int]:
        self.nbytes = os.fstat(fd).st_size
        try:
            inspection = Inspection(stamp_of_name(self.name), self.nbytes)
        except NotSealed:
            self.unsealed = True
            return
        try:
            footer = os.pread(fd, FOOTER_BYTES, max(0, self.nbytes - FOOTER_BYTES))
            yield len(footer)
            self.damage = inspection.footer(footer)
            if self.damage is not None:
                return
            done = 0
            while done < inspection.payload_bytes:
                count = os.preadv(fd, [buffer[: inspection.payload_bytes - done]], done)
                if not count:  # truncated while we read it
                    self.damage = Damage.LENGTH
                    return
                inspection.payload(buffer[:count])
                done += count
                yield count
            self.damage = inspection.damage()
        except OSError:  # the medium cannot read it
            self.damage = Damage.UNREADABLE

    def _unchanged_since(self, opened: os.stat_result) -> bool:
        """Whether the path still names the file that we opened, and that file was not changed since.

        A full store writes new objects over its files, so the same file may have held another object meanwhile.
        """
        try:
            return _version(os.stat(self.path, follow_symlinks=False)) == _version(opened)
        except OSError:
            return False


def _version(file: os.stat_result) -> tuple[int, int, int, int]:
    return file.st_dev, file.st_ino, file.st_mtime_ns, file.st_ctime_ns
