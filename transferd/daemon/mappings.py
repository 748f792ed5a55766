"""Tracks which clients have mapped which rank's memory, in this epoch of the cache and in earlier ones.

A rank is mapped while a live client has attached its memory, or has offered it. If that memory is cleared, or its owner
replaced, clients that attached it are *outdated* for that rank: their engine reads and writes bytes that the daemon
does not move. A client stays outdated until it attaches again, detaches or leaves.

`report` passes each change to the dispatcher, which refuses tasks accordingly; see control/contents.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transferd.tiers.base import DeviceHandle

Report = Callable[[tuple[int, ...], dict[bytes, tuple[int, ...]]], None]


@dataclass(slots=True, eq=False)
class _RankMappings:
    """One rank."""

    current: set[bytes] = field(default_factory=set)
    outdated: set[bytes] = field(default_factory=set)
    offered: bool = False  # whether a client owns the memory
    handle: DeviceHandle | None = None  # of the memory offered last, which attached clients have mapped

    def replaced(self) -> None:
        self.outdated |= self.current
        self.current.clear()


class Mappings:
    """Only the cache changes it; see cache_memory.py."""

    def __init__(self, ranks: int, report: Report, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.unmapped_since = now()  # since when `unmapped` has named a rank; meaningless while it names none
        self._ranks = [_RankMappings() for _ in range(ranks)]
        self._report = report
        self._reported: tuple[tuple[int, ...], dict[bytes, tuple[int, ...]]] | None = None

    @property
    def unmapped(self) -> list[int]:
        """Ranks without memory that a live client has attached or offered in this epoch."""
        return [number for number, rank in enumerate(self._ranks) if not (rank.offered or rank.current)]

    def mapped_by(self, rank: int) -> int:
        """How many clients have attached the rank's memory."""
        return len(self._ranks[rank].current)

    def attach(self, client: bytes, rank: int) -> None:
        """Note that the client maps the current memory."""
        self._ranks[rank].outdated.discard(client)
        self._ranks[rank].current.add(client)
        self._changed()

    def outdate(self, client: bytes, rank: int) -> None:
        """Note that the client has mapped memory of an earlier epoch."""
        self._ranks[rank].outdated.add(client)
        self._changed()

    def detach(self, client: bytes, rank: int) -> None:
        self._ranks[rank].current.discard(client)
        self._ranks[rank].outdated.discard(client)
        self._changed()

    def leave(self, client: bytes) -> None:
        """Drop the mappings of a client that left or was lost."""
        for rank in self._ranks:
            rank.current.discard(client)
            rank.outdated.discard(client)
        self._changed()

    def offer(self, rank: int, handle: DeviceHandle) -> None:
        """Note that the rank uses a client's memory from now on."""
        held = self._ranks[rank]
        if held.handle not in (None, handle):
            held.replaced()
        held.handle, held.offered = handle, True
        self._changed()

    def withdraw(self, rank: int) -> None:
        """Note that the rank no longer uses offered memory. Attached clients are not outdated yet: it may return."""
        self._ranks[rank].offered = False
        self._changed()

    def clear(self) -> None:
        """Begin a new epoch: all memory is released."""
        for rank in self._ranks:
            rank.replaced()
            rank.handle, rank.offered = None, False
        self._changed()

    def statistics(self) -> dict[str, Any]:
        return {
            "unmapped": self.unmapped,
            "mapped": [len(rank.current) for rank in self._ranks],
            "outdated": [len(rank.outdated) for rank in self._ranks],
        }

    def _changed(self) -> None:
        outdated: dict[bytes, tuple[int, ...]] = {}
        for number, rank in enumerate(self._ranks):
            for client in rank.outdated:
                outdated[client] = (*outdated.get(client, ()), number)
        state = tuple(self.unmapped), outdated
        if state[0] and not (self._reported and self._reported[0]):
            self.unmapped_since = self._now()
        if state != self._reported:
            self._reported = state
            self._report(*state)
