"""NIXL's POSIX plugin: the caller opens and registers the files, and one transfer moves all blocks."""

from __future__ import annotations

import importlib.metadata
import os
import time
from pathlib import Path

from nixl._api import nixl_agent, nixl_agent_config

from benchmarks.peers.program import Order, Peer, area, serve


class Nixl(Peer):
    def prepare(self, order: Order) -> str:
        self._order = order
        self.areas = [area(order.blocks, order.block_bytes)]
        self._flags = os.O_DIRECT if order.direct else 0
        self._agent = nixl_agent("bench", nixl_agent_config(backends=[]))
        self._agent.create_backend("POSIX")
        self._rows = [(row.ctypes.data, row.nbytes, 0) for row in self.areas[0]]
        self._agent.register_memory([(*row, "") for row in self._rows], "DRAM", ["POSIX"])
        self._memory = self._agent.get_xfer_descs(self._rows, "DRAM")
        return f"nixl {importlib.metadata.version('nixl')}"

    def store(self, number: int) -> None:
        self._move("WRITE", number, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def load(self, number: int) -> None:
        self._move("READ", number, os.O_RDONLY)

    def _move(self, operation: str, number: int, flags: int) -> None:
        fds = [os.open(self._path(number, block), flags | self._flags, 0o600) for block in range(self._order.blocks)]
        files = [(0, self._order.block_bytes, fd) for fd in fds]
        registered = self._agent.register_memory([(*file, "") for file in files], "FILE", ["POSIX"])
        there = self._agent.get_xfer_descs(files, "FILE")
        transfer = self._agent.initialize_xfer(operation, self._memory, there, "bench", backends=["POSIX"])
        state = self._agent.transfer(transfer)
        while state == "PROC":
            time.sleep(0)  # it completes only when asked; other threads may run in between
            state = self._agent.check_xfer_state(transfer)
        self._agent.release_xfer_handle(transfer)
        self._agent.deregister_memory(registered, ["POSIX"])
        for fd in fds:
            os.close(fd)
        if state != "DONE":
            raise OSError(f"the transfer ended as {state}")

    def _path(self, number: int, block: int) -> Path:
        return self._order.directory / f"{number}-{block}"


if __name__ == "__main__":
    serve(Nixl())
