"""The memory that a client has attached, and when it is gone.

Another boot_id is another daemon, with memory of its own; another epoch is a cache that was cleared. Arrays that
were attached before show memory which the daemon does not move any more: those ranks are *outdated* until they
are attached again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from transferd.client.session import Link
from transferd.errors import RequestError, TierError
from transferd.wire import protocol as wire

log = logging.getLogger(__name__)


def arrays(handle: dict[str, Any]) -> dict[str, list[Any]]:
    """Map what a handle names: see Client.attach. Raises TierError."""
    if handle["kind"] == "cuda_ipc":
        from transferd.tiers.cuda.engine import attach  # loads CUDA when it is called

        return dict(attach(handle["data"]).caches)
    from transferd.tiers.segment import attach_arrays

    if handle["kind"] != "shm":
        raise TierError(f"device memory of kind {handle['kind']!r} is attached through its adapter")
    return attach_arrays(handle["data"])


class Attachments:
    """Changed by one client, on its loop.

    outdated: ranks that were attached and whose memory is gone, ascending. orphaned: those of them whose memory was
    made by another daemon; only the client can know, while a daemon knows what was attached before a clear of its own.
    changing: how many clears and restores of the client's own are under way; those are no news to it.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._mapped: dict[int, tuple[str, int]] = {}  # rank: boot_id and epoch of the memory
        self._known: tuple[str, int] | None = None  # boot_id and epoch of the last Welcome
        self._reactions: set[asyncio.Task[Any]] = set()  # coroutines that on_new_boot has returned
        self.outdated: list[int] = []
        self.orphaned: list[int] = []
        self.on_new_boot: Callable[[], object] | None = None
        self.changing = 0

    @property
    def attached(self) -> list[int]:
        """Ranks that were attached, now or before a restart."""
        return sorted(self._mapped)

    def attach(self, rank: int, handle: dict[str, Any]) -> None:
        """The daemon has told this handle. One that does not say which memory it is means the present."""
        now = self._link.session
        self._mapped[rank] = handle.get("boot_id", now.boot_id), handle.get("epoch", now.epoch)
        self._look()

    def refusal(self) -> RequestError:
        """Of a task that names device blocks, while there are orphaned ranks."""
        what = f"rank {self.orphaned[0]}: the memory that was attached here is gone with the daemon that made it"
        return RequestError(f"{what}; call reattach() first", code="not_attached")

    def detach(self, rank: int) -> None:
        self._mapped.pop(rank, None)
        self._look()

    def epoch_began(self, epoch: int) -> None:
        """The client itself has cleared or restored the cache."""
        self._known = self._link.session.boot_id, epoch
        self._look()

    def again(self) -> list[wire.Control]:
        """What another session is told: what is mapped counts in it, too, or the daemon knows that it is outdated."""
        boot_id = self._link.session.boot_id
        return [wire.Attach(rank, epoch) for rank, (boot, epoch) in self._mapped.items() if boot == boot_id]

    def renewed(self) -> None:
        """A session or an epoch has begun; tell the engine if it is another daemon's, or somebody else's clear."""
        self._look()
        known, self._known = self._known, (self._link.session.boot_id, self._link.session.epoch)
        if known not in (None, self._known) and not self.changing:
            self._tell()

    def _look(self) -> None:
        boot_id, epoch = self._link.session.boot_id, self._link.session.epoch
        # Memory of a later epoch than the last Welcome's is newer than what we know.
        self.outdated = [rank for rank, (boot, of) in sorted(self._mapped.items()) if boot != boot_id or of < epoch]
        self.orphaned = [rank for rank in self.outdated if self._mapped[rank][0] != boot_id]

    def _tell(self) -> None:
        if self.on_new_boot is None:
            gone = f"; attach rank {', '.join(map(str, self.outdated))} again" if self.outdated else ""
            what = "%s: the daemon was restarted or its cache was cleared, so all of its blocks are empty%s"
            log.warning(what + " (set Client.on_new_boot to hear of this)", self._link.endpoint, gone)
            return
        try:
            reaction = self.on_new_boot()
        except Exception:
            log.exception("on_new_boot failed")
            return
        if asyncio.iscoroutine(reaction):
            task = asyncio.get_running_loop().create_task(reaction)
            self._reactions.add(task)
            task.add_done_callback(self._reacted)

    def _reacted(self, task: asyncio.Task[Any]) -> None:
        self._reactions.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("on_new_boot failed: %r", error)
