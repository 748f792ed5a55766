"""Joins residency to the sockets: what a daemon holds when `events.endpoint` is set.

Events are collected and sent as one batch by the loop's next turn, so an answer to a client never
waits for them, and what becomes true together is told together.
"""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

from transferd.clock import SYSTEM_CLOCK, Clock
from transferd.config import Config
from transferd.objects import ObjectFormat
from transferd.publisher.sockets import EventSockets
from transferd.residency.claims import Residency
from transferd.storage.base import Storage
from transferd.tasks import Task, TaskResult

log = structlog.get_logger(__name__)


class EventFeed:
    """Publishes every change of residency from `start` to `close`.

    The first batch of a daemon's life and the last are AllBlocksCleared: with a daemon goes what it
    knew, and a subscriber that missed its end learns of it from its successor.
    """

    def __init__(
        self,
        config: Config,
        objects: ObjectFormat,
        storage: Storage | None,
        *,
        generation: str,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """storage: of blocks, as the ranks use it. generation: the one served at the start."""
        self._objects = objects
        self._storage = storage
        self._ranks = range(config.cache.ranks)
        self._generation = generation
        self._token_ids = config.events.token_ids
        tells = storage is not None and storage.tell_departures(self._object_left)
        self.residency = Residency(
            objects,
            block_size=config.cache.block_size,
            max_blocks=config.events.max_blocks,
            token_ids=config.events.token_ids,
            holds=self._holds if tells else lambda _: True,
            tells=tells,
            changed=self._soon,
        )
        self.sockets = EventSockets(config.events, socket_mode=int(config.server.socket_mode, 8), clock=clock)
        self._flush: asyncio.Handle | None = None
        self._running = False

    def start(self) -> None:
        """Bind, and begin with a clean slate. Raises ConfigError."""
        self.sockets.start()
        self._running = True
        self.residency.clear()
        log.info(
            "publishing KV events",
            endpoint=self.sockets.endpoint,
            replay_endpoint=self.sockets.replay_endpoint,
            token_ids=self._token_ids,
        )

    def close(self) -> None:
        """Tell that nothing is here any more, and stop. Idempotent."""
        if self._running:
            self._running = False
            if self._flush is not None:
                self._flush.cancel()
            self.residency.clear()
            self.sockets.publish(self.residency.take())
        self.sockets.close()

    def task_ended(self, task: Task, result: TaskResult) -> None:
        """An admitted task was answered."""
        self.residency.task_ended(task, result, self._generation)

    def generation_changed(self, generation: str) -> None:
        """Objects have other names from now on, and device blocks hold another model's KV."""
        self._generation = generation
        self.residency.clear()

    def statistics(self) -> dict[str, Any]:
        return self.sockets.statistics() | {"announced": self.residency.statistics()}

    def _soon(self) -> None:
        if self._running:
            self._flush = asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        self._flush = None
        self.sockets.publish(self.residency.take())

    def _object_left(self, name: str) -> None:
        block = self._objects.id_of(self._generation, name)
        if block is not None:
            self.residency.object_left(block)

    def _holds(self, block: str) -> bool:
        storage, objects = self._storage, self._objects
        assert storage is not None
        return all(storage.holds(objects.names(self._generation, [block], rank)[0]) for rank in self._ranks)
