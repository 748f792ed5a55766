"""Single-flight: reads that want the same object at once share one transfer from storage.

The first task to ask for an object *leads*: its batch fetches the object into a staging slot. Tasks
that ask while the batch is alive *join* it and copy from the same slot to their own device blocks.
A batch belongs to nobody in particular. Its fetch runs to its end also when the task that began it
was stopped, and its lease returns when the last consumer has let go.

Why this cannot deadlock: a fetch waits for slots only; slots are held by batches that are fetching
(and will end) or are being consumed; and a consumer of a finished batch waits for nothing but its own
device copy. The reader keeps the last part true by consuming every batch as soon as it is fetched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from transferd.storage.base import Outcome
from transferd.tiers.staging import Lease


class Batch:
    """Objects fetched together. `fetch` ends with one outcome per name: FOUND = good bytes are in its slot."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.lease: Lease | None = None
        self.fetch: asyncio.Task[list[Outcome]] | None = None
        self.consumers = 0
        self.index = {name: i for i, name in enumerate(self.names)}

    def outcome(self, name: str) -> Outcome:
        """What became of one object. Raises what the fetch raised."""
        assert self.fetch is not None
        return self.fetch.result()[self.index[name]]

    def slot(self, name: str) -> int:
        """Where a fetched object lies; valid while the caller is a consumer."""
        assert self.lease is not None
        return self.lease.slots[self.index[name]]


class Flights:
    """All batches of one rank that are alive, by object name. Mutated on the event loop only."""

    def __init__(self) -> None:
        self._by_name: dict[str, Batch] = {}
        self.joined = 0  # objects that rode along

    def board(self, names: Sequence[str]) -> tuple[list[tuple[Batch, list[int]]], Batch | None]:
        """Split positions 0 … len(names)-1 over batches; the caller becomes a consumer of each.

        Returns (batch, its positions) pairs, and the new batch among them that the caller must fetch.
        """
        parts: dict[Batch, list[int]] = {}
        to_lead: list[int] = []
        for position, name in enumerate(names):
            batch = self._by_name.get(name)
            if batch is None:
                to_lead.append(position)
            else:
                parts.setdefault(batch, []).append(position)
        self.joined += len(names) - len(to_lead)
        lead: Batch | None = None
        if to_lead:
            # A name asked for twice in one task is fetched once.
            lead = Batch(tuple(dict.fromkeys(names[i] for i in to_lead)))
            self._by_name.update(dict.fromkeys(lead.names, lead))
            parts[lead] = to_lead
        for batch in parts:
            batch.consumers += 1
        return list(parts.items()), lead

    def let_go(self, batch: Batch) -> None:
        """One consumer is done. The last one out returns the slots."""
        batch.consumers -= 1
        if batch.consumers == 0 and (batch.fetch is None or batch.fetch.done()):
            self._retire(batch)

    def fetched(self, batch: Batch) -> None:
        """The fetch has ended, well or badly."""
        if batch.consumers == 0:
            self._retire(batch)

    def _retire(self, batch: Batch) -> None:
        for name in batch.names:
            if self._by_name.get(name) is batch:
                del self._by_name[name]
        if batch.lease is not None:
            batch.lease.release()
            batch.lease = None

    def __len__(self) -> int:
        return len(self._by_name)
