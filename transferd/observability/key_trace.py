"""The look-ups of engines as a trace that `transferd replay` reads, for as long as somebody records (cli/record.py).

Nothing is kept unless a read came in the last KEPT_S seconds. Keys are kept as hashes that differ in each daemon
process, so a trace has no contents, and cannot be compared with another one's. A trace has an id for each 512 tokens:
a key names the whole chain up to its block, so that of the last block of each 512 tokens stands for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from transferd.tasks import TRACE_BLOCK_TOKENS

KEPT_S = 30.0
MOST_IDS = 262_144  # kept for a reader; of an answer, one look-up more at most
ANSWERED = 65_536


class KeyTrace:
    """See the module. now: monotonic seconds. Used on the event loop."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._until = 0.0
        self._kept: deque[tuple[float, str, int, list[int]]] = deque()  # when, engine, tokens, ids
        self._first = 1  # the number of the first of these
        self._ids = 0

    def looked_up(self, engine: str, keys: Sequence[str], block_size: int) -> None:
        """Note a look-up of a chain, if somebody records. block_size: tokens of a block."""
        now = self._now()
        if now > self._until:
            return
        step = max(1, round(TRACE_BLOCK_TOKENS / block_size))
        ids = [hash(key) & (2**62 - 1) for key in keys[step - 1 :: step]]
        self._kept.append((now, engine, len(keys) * block_size, ids))
        self._ids += len(ids)
        while self._ids > MOST_IDS:
            self._drop()

    def read(self, after: int) -> dict[str, Any]:
        """The look-ups since the one of this number, and keep further ones for a while. The first read begins.

        {last, lost, requests: [[seconds, engine, tokens, ids]]}: the number to ask for next, how many were dropped
        meanwhile, and for each when it was, in monotonic seconds.
        """
        if self._now() > self._until:
            while self._kept:
                self._drop()
        self._until = self._now() + KEPT_S
        while self._kept and self._first <= after:
            self._drop()
        rows, ids = [], 0
        for row in self._kept:
            if ids >= ANSWERED:
                break
            rows.append(list(row))
            ids += len(row[3])
        lost = self._first - 1 - after if after else 0
        return {"last": self._first - 1 + len(rows), "lost": max(0, lost), "requests": rows}

    def _drop(self) -> None:
        self._ids -= len(self._kept.popleft()[3])
        self._first += 1
