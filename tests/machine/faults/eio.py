"""The file backend on a medium that fails: while a flag file is there, every read and write of an object is EIO.

The error arises where the kernel's would, below the code that translates it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transferd.storage import file_io
from transferd.storage.file import FileStorage
from transferd.workers import cpu_blocks

FLAG = "TRANSFERD_FAULT_EIO"


class _FailingOs:
    """The module `os`, with a medium that fails while the flag is up."""

    def __init__(self, flag: Path) -> None:
        self._flag = flag

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return self._failing(real) if name in ("pwrite", "preadv") else real

    def _failing(self, real: Callable[..., int]) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            if self._flag.exists():
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*arguments)

        return call


class EioFile(FileStorage):
    """Only for a daemon that a test has started: it changes what `os` means to the file backend of its process."""

    async def open(self) -> None:
        failing = _FailingOs(Path(os.environ[FLAG]))
        vars(file_io)["os"] = failing
        # The extensions make system calls of their own.
        file_io.NATIVE = cpu_blocks.NATIVE = False
        await super().open()
