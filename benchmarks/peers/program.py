"""What runs in a peer's own environment. It does what the driver asks, one JSON line each way, until stdin ends.

Only numpy is needed, so that every environment can import it. Every peer moves the same bytes: those of block `b` in
round `r` follow from the two numbers. stdout belongs to the driver; whatever a library prints there goes to stderr.
"""

from __future__ import annotations

import abc
import json
import mmap
import os
import statistics
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

POISON = 0xA5
OFFSETS = 4096
BATCHES = 16  # a peer that takes jobs of several blocks gets as many jobs, all at once
Area = npt.NDArray[np.uint8]  # [blocks, bytes]


@dataclass(frozen=True, slots=True)
class Order:
    """What to move, and where to. directory: the peer's own. direct: past the page cache."""

    directory: Path
    blocks: int
    block_bytes: int
    direct: bool


class Peer(abc.ABC):
    """One way to move blocks. areas: its memory; each holds a part of every block, all of them together the blocks."""

    areas: Sequence[Area]

    @abc.abstractmethod
    def prepare(self, order: Order) -> str:
        """Get ready, and set `areas`. Which version this is."""

    @abc.abstractmethod
    def store(self, number: int) -> None:
        """Store all blocks under names of round `number`."""

    def before_load(self, number: int) -> None:
        """What an engine does before it loads round `number`. It is not part of the load's time."""

    @abc.abstractmethod
    def load(self, number: int) -> None:
        """Load them back into the same blocks. Raises if one is missing."""

    def forget(self, number: int) -> None:
        """Remove what round `number` stored."""

    def close(self) -> None:
        """Stop what `prepare` started."""


class Caller(abc.ABC):
    """A way to have a task done that moves next to nothing: what agreeing on it costs."""

    @abc.abstractmethod
    def prepare(self, order: Order) -> str:
        """Get ready. Which version this is."""

    @abc.abstractmethod
    def calls(self, count: int) -> list[float]:
        """Seconds of each of so many tasks, one after the other. Raises if one is not answered as it should be."""

    def close(self) -> None:
        """Stop what `prepare` started."""


def area(blocks: int, block_bytes: int) -> Area:
    """Memory of this process, at a page's border."""
    pages = mmap.mmap(-1, blocks * block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, np.uint8).reshape(blocks, block_bytes)


def batches(blocks: int) -> list[range]:
    """The blocks of each job."""
    size = -(-blocks // BATCHES)
    return [range(start, min(start + size, blocks)) for start in range(0, blocks, size)]


class Contents:
    """The bytes that blocks must have."""

    def __init__(self, areas: Sequence[Area]) -> None:
        self._areas = areas
        self._table = np.random.PCG64(1).random_raw(max(area.shape[1] for area in areas) // 8 + OFFSETS)

    def fill(self, number: int) -> None:
        """Write the bytes of round `number` into every block."""
        for part, area in enumerate(self._areas):
            for block in range(len(area)):
                area[block] = self._expected(number, block, part, area.shape[1])

    def poison(self) -> None:
        """Overwrite every block, so that a load which does nothing cannot pass."""
        for area in self._areas:
            area[:] = POISON

    def wrong(self, number: int) -> int:
        """How many blocks differ from what round `number` filled in."""
        bad = set()
        for part, area in enumerate(self._areas):
            for block in range(len(area)):
                if not np.array_equal(area[block], self._expected(number, block, part, area.shape[1])):
                    bad.add(block)
        return len(bad)

    def _expected(self, number: int, block: int, part: int, nbytes: int) -> Area:
        mixed = (((number * 65_537 + block) * 257 + part + 1) * 0x9E3779B97F4A7C15) % 2**64
        start = mixed % OFFSETS
        words: Area = (self._table[start : start + nbytes // 8] ^ np.uint64(mixed)).view(np.uint8)
        return words


def serve(peer: Peer | Caller) -> None:
    """Answer the driver until stdin ends. An error is an answer, too; the driver decides what follows."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    contents: Contents | None = None
    try:
        for line in sys.stdin:
            asked = json.loads(line)
            try:
                if asked["do"] == "prepare":
                    order = Order(Path(asked["directory"]), asked["blocks"], asked["block_bytes"], asked["direct"])
                    answer: dict[str, Any] = {"version": peer.prepare(order)}
                    contents = Contents(peer.areas) if isinstance(peer, Peer) else None
                elif isinstance(peer, Caller):
                    answer = {"seconds": statistics.median(peer.calls(asked["calls"]))}
                else:
                    assert contents is not None, "not prepared"
                    answer = _do(peer, contents, asked["do"], asked["round"])
            except Exception as error:  # noqa: BLE001 -- a peer's errors are of any type
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)
    finally:
        peer.close()


def _do(peer: Peer, contents: Contents, what: str, number: int) -> dict[str, Any]:
    if what == "fill":
        contents.fill(number)
    elif what == "poison":
        contents.poison()
        peer.before_load(number)
    elif what == "check":
        return {"wrong": contents.wrong(number)}
    elif what == "forget":
        peer.forget(number)
    else:
        work = {"store": peer.store, "load": peer.load}[what]
        before = time.perf_counter()
        work(number)
        return {"seconds": time.perf_counter() - before}
    return {}
