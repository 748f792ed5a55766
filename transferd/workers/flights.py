"""Single-flight: reads that need the same object at the same time share one fetch from storage.

The first task to ask for an object *leads*: its batch fetches the object into a staging slot. Tasks
that ask while the batch is alive *join* it and copy from the same slot to their own device blocks.
No task owns a batch: its fetch runs to the end even if the task that started it was stopped, and its
lease is released by the last consumer.

Why this cannot deadlock: a fetch waits only for slots. Slots are held by batches that are being fetched,
which end, or consumed. A consumer of a fetched batch waits only for its own device copy, because the reader
consumes every batch as soon as it is fetched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from transferd.storage.base import MISSING, Outcome
from transferd.tiers.staging import Lease


class SharedFetch:
    """Objects fetched together. `fetch` returns one outcome per name; FOUND: its slot holds the object.

    verified: whether `fetch` has checked the objects. If not, each consumer does while it copies.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.lease: Lease | None = None
        self.fetch: asyncio.Future[list[Outcome]] | None = None
        self.consumers = 0
        self.verified = True
        self.index = {name: i for i, name in enumerate(self.names)}

    def outcome(self, name: str) -> Outcome:
        """The outcome for one object, after `fetch` has ended. Raises what the fetch raised."""
        assert self.fetch is not None
        return self.fetch.result()[self.index[name]]

    def spoil(self, name: str) -> bool:
        """Turn an object that failed its check into a miss. False: another consumer has done so."""
        assert self.fetch is not None
        outcomes, i = self.fetch.result(), self.index[name]
        before, outcomes[i] = outcomes[i], MISSING
        return before is not MISSING

    def slot(self, name: str) -> int:
        """The staging slot of a fetched object. Valid while the caller is a consumer."""
        assert self.lease is not None
        return self.lease.slots[self.index[name]]


class Flights:
    """All live batches of one rank, by object name. Changed on the event loop only."""

    def __init__(self) -> None:
        self._by_name: dict[str, SharedFetch] = {}
        self.joined = 0  # objects that joined another task's fetch

    def board(self, names: Sequence[str]) -> tuple[list[tuple[SharedFetch, list[int]]], SharedFetch | None]:
        """Assign positions 0 … len(names)-1 to batches. The caller becomes a consumer of each.

        Returns (batch, its positions) pairs and, if one of the batches is new, that batch: the caller must fetch it.
        """
        parts: dict[SharedFetch, list[int]] = {}
        to_lead: list[int] = []
        for position, name in enumerate(names):
            batch = self._by_name.get(name)
            if batch is None:
                to_lead.append(position)
            else:
                parts.setdefault(batch, []).append(position)
        self.joined += len(names) - len(to_lead)
        lead: SharedFetch | None = None
        if to_lead:
            # A name that occurs twice in one task is fetched once.
            lead = SharedFetch(tuple(dict.fromkeys(names[i] for i in to_lead)))
            self._by_name.update(dict.fromkeys(lead.names, lead))
            parts[lead] = to_lead
        for batch in parts:
            batch.consumers += 1
        return list(parts.items()), lead

    def leave(self, batch: SharedFetch) -> None:
        """One consumer is done. The last one releases the slots."""
        batch.consumers -= 1
        if batch.consumers == 0 and (batch.fetch is None or batch.fetch.done()):
            self._retire(batch)

    def fetched(self, batch: SharedFetch) -> None:
        """The fetch has ended, whether or not it succeeded."""
        if batch.consumers == 0:
            self._retire(batch)

    def _retire(self, batch: SharedFetch) -> None:
        for name in batch.names:
            if self._by_name.get(name) is batch:
                del self._by_name[name]
        if batch.lease is not None:
            batch.lease.release()
            batch.lease = None

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __len__(self) -> int:
        return len(self._by_name)
