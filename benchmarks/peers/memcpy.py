"""One thread that copies all blocks to other memory of the process and back. The limit of what moves no files."""

from __future__ import annotations

import numpy as np

from benchmarks.peers.program import Order, Peer, area, serve


class Memcpy(Peer):
    def prepare(self, order: Order) -> str:
        self.areas = [area(order.blocks, order.block_bytes)]
        self._other = area(order.blocks, order.block_bytes)
        self._other[:] = 0  # its pages are there before the first round
        return f"numpy {np.__version__}"

    def store(self, number: int) -> None:  # noqa: ARG002 -- one place for all rounds
        np.copyto(self._other, self.areas[0])

    def load(self, number: int) -> None:  # noqa: ARG002
        np.copyto(self.areas[0], self._other)


if __name__ == "__main__":
    serve(Memcpy())
