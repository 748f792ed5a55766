"""What a client counts for reports: tasks that it rejects itself, and blocks that its engine did not store.

A Hello carries the counts. Its Welcome confirms them; if a later Welcome comes first, that Hello was lost, and the next
one repeats them.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from transferd.errors import RequestError
from transferd.tasks import NOT_STORED
from transferd.wire import protocol as wire

MOST_CODES = 16  # of tasks turned away, in one Hello


class Counts:
    """The counts of one conversation that no daemon has confirmed."""

    def __init__(self) -> None:
        self._turned_away: Counter[str] = Counter()  # tasks, by code
        self._not_stored: Counter[str] = Counter()  # blocks, by reason
        # The Hello under way that reports them, and its counts of both.
        self._said: tuple[int, Counter[str], Counter[str]] | None = None

    def turned_away(self, code: str) -> None:
        """Count a task that was never sent."""
        if len(self._turned_away) < MOST_CODES or code in self._turned_away:
            self._turned_away[code] += 1

    def not_stored(self, reason: str, blocks: int) -> None:
        """Count blocks. Raises RequestError for what a daemon would refuse, and the Hello with it."""
        if reason not in NOT_STORED or type(blocks) is not int or blocks < 0:
            what = f"expected one of {', '.join(NOT_STORED)} and a number of blocks"
            raise RequestError(f"{what}, not {reason!r} and {blocks!r}", code="bad_value")
        self._not_stored[reason] += blocks

    def said(self, seq: int, hello: wire.Hello) -> wire.Hello:
        """The Hello of this number, with what is to be reported, unless an earlier one is under way with counts."""
        if self._said is None and (self._turned_away or self._not_stored):
            tasks, blocks = _of_one_hello(self._turned_away), _of_one_hello(self._not_stored)
            self._said = seq, tasks, blocks
            return msgspec.structs.replace(hello, turned_away=dict(tasks), not_stored=dict(blocks))
        return hello

    def welcomed(self, seq: int) -> None:
        """Note the Welcome that answers the Hello of this number."""
        if self._said is not None and seq >= self._said[0]:
            hello, tasks, blocks = self._said
            self._said = None
            if seq == hello:
                self._turned_away -= tasks
                self._not_stored -= blocks


def _of_one_hello(counts: Counter[str]) -> Counter[str]:
    return Counter({name: min(count, wire.MOST_COUNTED) for name, count in counts.items() if count > 0})
