"""Connects residency to its followers: routers on sockets, and the open token index of this daemon.

Events are collected and sent as one batch in the loop's next iteration, so answers to clients never wait for them,
and events of one moment share a batch.
"""

from __future__ import annotations

import asyncio
import functools
import operator
from collections.abc import Iterator, Sequence

from transferd.blocks.keys import path_keys
from transferd.control.admission import withdraws_the_rest
from transferd.daemon.kv_events.announcements import Residency
from transferd.daemon.kv_events.departures import Departures
from transferd.daemon.kv_events.remembered import Remembered, place_of
from transferd.daemon.kv_events.snapshot import Announced
from transferd.daemon.kv_events.sockets import EventSockets
from transferd.daemon.kv_events.subscriber import FollowedNodes
from transferd.daemon.preflight import EnginePlan
from transferd.errors import ConfigError
from transferd.observability.report import FollowedReport
from transferd.storage.attention_store.open_index import OpenTokenStorage, TokenIndex
from transferd.storage.base import Storage
from transferd.storage.divided import of_blocks
from transferd.tasks import ReadStorageTask, Task, TaskResult, WriteStorageTask

LOOKED_AT = 128  # announced blocks that a pool is asked for at a time
AGAIN_BLOCKS, AGAIN_S = 1000, 0.1  # announced again at a time after a restart, and the pause after them


class KvEventFeed:
    """Publishes every change of residency from `start` to `close`.

    Its first and last batches are AllBlocksCleared: announcements end with their engine, and a subscriber that missed
    the end learns of it from the engine's successor.

    An open token index of this daemon receives all events under the node's name, and those of other nodes.

    has_followers: whether events reach routers on sockets, or our own token index. Else no task need be reported.
    """

    def __init__(
        self, plan: EnginePlan, storage: Storage | None, sockets: EventSockets, departures: Departures, name: str
    ) -> None:
        """Build the feed, which listens to `departures` from now on. Raises ConfigError.

        storage: the storage of blocks, as the ranks use it.
        sockets: the daemon's, shared by the feeds of all engines; not started if `events.endpoint` is empty.
        name: the engine's.
        """
        config, objects = plan.config, plan.objects
        self._objects = objects
        self._storage = storage
        self._levels = None if storage is None else storage.levels
        self._tokens = plan.tokens
        self._index: TokenIndex | None = None
        self._peers: FollowedNodes | None = None
        if isinstance(plan.tokens, OpenTokenStorage):
            self._index, self._node, peers = plan.tokens.index, plan.tokens.node, config.storage.attention_store.peers
            if self._node in peers:
                what = "must not contain this node itself; remove it"
                raise ConfigError("storage.attention_store.peers", what, self._node)
            self._peers = FollowedNodes(peers, self._index, config.events.max_blocks) if peers else None
        first = config.geometry.first_rank
        self._ranks = range(first, first + config.geometry.ranks)
        self._generation = plan.generation  # the one served at the start
        self._departures = departures
        self.has_followers = bool(sockets.endpoint) or self._index is not None
        reports = self.has_followers and departures.listen(self, of_blocks(self._object_left, objects.parts))
        moved = of_blocks(self._object_moved, objects.parts)
        self._reports = reports
        asks = self.has_followers and (config.events.levels or not reports)
        levels = departures.listen_to_levels(self, moved) if asks else ()
        self.residency = Residency(
            objects,
            block_size=config.geometry.block_size,
            max_blocks=config.events.max_blocks,
            token_ids=config.events.token_ids,
            keys_of=self._keys_of,
            only_flush=plan.only_flush,
            holds=self._holds if reports else lambda _: True,
            reports_departures=reports,
            levels=levels if config.events.levels else (),
            levels_of=self._levels_of,
            changed=self._soon,
        )
        self.sockets = sockets
        self._dp_rank = config.events.dp_rank
        self._flush: asyncio.Handle | None = None
        self._running = False
        path = place_of(config, name, objects.space) if reports else None
        self._remembered = None if path is None else Remembered(path, self.residency)
        self._again: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Announce that everything is cleared, and begin. The sockets must be bound."""
        self._running = True
        self.residency.clear()
        self.sockets.include(self._announced)
        if self._peers is not None:
            self._peers.start()

    def storage_opened(self) -> None:
        """Begin to announce again what an earlier life has announced and storage still has."""
        if self._remembered is not None:
            self._again = asyncio.get_running_loop().create_task(self._announce_again(self._remembered))

    async def close(self) -> None:
        """Retract all announcements and stop. Idempotent."""
        if self._running:
            self._running = False
            if self._flush is not None:
                self._flush.cancel()
            if self._again is not None:
                self._again.cancel()
            if self._remembered is not None:
                self._remembered.note(self.residency.drain_stored())
                await self._remembered.close()
            self.residency.clear()
            self._send()
        self.sockets.exclude(self._announced)
        if self._peers is not None:
            self._peers.close()
        self._departures.forget(self)

    def task_ended(self, task: Task, result: TaskResult) -> None:
        """Report an admitted task that was answered."""
        self.residency.task_ended(task, result, self._generation)

    def not_found(self, keys: Sequence[str]) -> None:
        """Report keys that a look-up has not found."""
        if self.has_followers and not self._reports:
            for digest in self._objects.ids(keys):
                self.residency.object_left(digest)

    def generation_changed(self, generation: str) -> None:
        """Retract everything: object names contain another generation now, and device blocks hold other weights' KV."""
        self._generation = generation
        self._clear()

    def memory_gone(self, *, stored: bool) -> None:
        """Retract all blocks in device and host memory; with `stored`, also stored ones, which are unreachable now."""
        if stored:
            self._clear()
        else:
            self.residency.memory_gone()

    def _clear(self) -> None:
        self.residency.clear()
        self.residency.drain_stored()
        if self._again is not None:
            self._again.cancel()
        if self._remembered is not None and self._running:
            self._remembered.forget(self._generation)

    async def _announce_again(self, remembered: Remembered) -> None:
        """Announce what is still stored of what an earlier life announced, a little at a time."""
        records = await remembered.read(self._generation)
        for first in range(0, len(records), AGAIN_BLOCKS):
            self.residency.announce_stored(records[first : first + AGAIN_BLOCKS])
            await asyncio.sleep(AGAIN_S)
        remembered.announced_again()

    def up_to_date(self) -> TokenIndex | None:
        """The index, including every task that was answered before this call."""
        if self._flush is not None:
            self._flush.cancel()
            self._send()
        return self._index

    def followed(self) -> dict[str, FollowedReport]:
        """What was received of each peer's events, by the name of its node."""
        return {} if self._peers is None else self._peers.statistics()

    # --- inside -------------------------------------------------------------------------------------

    def _soon(self) -> None:
        if self._running:
            self._flush = asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        self._flush = None
        events, stored = self.residency.drain(), self.residency.drain_stored()
        if self._remembered is not None and self._running:
            self._remembered.note(stored)
        if self._index is not None:
            for event in events:
                self._index.apply(self._node, event)
        self.sockets.publish(events, self._dp_rank)

    def _announced(self) -> list[Announced]:
        self.up_to_date()
        size = self.residency.block_size
        return [Announced(self._dp_rank, *held, size) for held in self.residency.announced().items()]

    def _keys_of(self, task: ReadStorageTask | WriteStorageTask) -> Sequence[str]:
        """The keys under which a task's blocks are announced: with token-indexed storage, those of the tokens."""
        if self._tokens is None or task.token_ids is None:
            return task.keys
        start = task.start_read_block_idx if isinstance(task, ReadStorageTask) else task.start_write_block_idx
        rest = isinstance(task, WriteStorageTask) and withdraws_the_rest(task)
        keys = path_keys(task.token_ids, self._tokens.block_size, task.salt)
        return keys[start:] if rest else keys[start : start + len(task.keys)]

    def _object_left(self, name: str) -> None:
        block = self._objects.id_of(self._generation, name)
        if block is not None:
            self.residency.object_left(block)

    def _object_moved(self, name: str) -> None:
        block = self._objects.id_of(self._generation, name)
        if block is not None:
            gone = not self._reports and self._levels is not None and not self._levels.having(name)
            (self.residency.object_left if gone else self.residency.object_moved)(block)

    def objects(self) -> Iterator[list[str]]:
        """The names of all announced objects, a few hundred at a time."""
        digests, parts = self.residency.digests(), self._objects.parts
        for start in range(0, len(digests), LOOKED_AT):
            names = (name for digest in digests[start : start + LOOKED_AT] for name in self._names(digest))
            yield [name + part.suffix for name in names for part in parts]

    def _holds(self, block: str) -> bool:
        assert self._storage is not None
        return all(self._storage.index.find(self._names(block), None) or (False,))

    def _levels_of(self, block: str) -> int:
        assert self._levels is not None
        return functools.reduce(operator.and_, map(self._levels.having, self._names(block)))

    def _names(self, block: str) -> list[str]:
        return [self._objects.names(self._generation, [block], rank)[0] for rank in self._ranks]
