"""One thread that writes a file for each block and reads it back: open, write or read, close. The others' limit."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.peers.program import Order, Peer, area, serve


class Plain(Peer):
    def prepare(self, order: Order) -> str:
        self._order = order
        self.areas = [area(order.blocks, order.block_bytes)]
        self._flags = os.O_DIRECT if order.direct else 0
        return "one thread"

    def store(self, number: int) -> None:
        for block, row in enumerate(self.areas[0]):
            fd = os.open(self._path(number, block), os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._flags, 0o600)
            written = os.write(fd, row)
            os.close(fd)
            if written != len(row):
                raise OSError(f"a short write: {written} bytes")

    def load(self, number: int) -> None:
        for block, row in enumerate(self.areas[0]):
            fd = os.open(self._path(number, block), os.O_RDONLY | self._flags)
            got = os.readv(fd, [row])
            os.close(fd)
            if got != len(row):
                raise OSError(f"a short read: {got} bytes")

    def _path(self, number: int, block: int) -> Path:
        return self._order.directory / f"{number}-{block}"


if __name__ == "__main__":
    serve(Plain())
