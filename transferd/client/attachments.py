"""The memory that a client has attached, and when that memory is gone.

Another boot_id means another daemon, with its own memory; another epoch means that the cache was cleared. Arrays
attached before show memory that the daemon no longer uses: those ranks are *outdated* until they are attached again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from transferd.client.session import Conversation
from transferd.errors import RequestError, TierError
from transferd.wire import protocol as wire

log = logging.getLogger(__name__)


def arrays(handle: dict[str, Any]) -> dict[str, list[Any]]:
    """Map the memory that a handle names; see Client.attach. Raises TierError."""
    if handle["kind"] == "cuda_ipc":
        from transferd.tiers.cuda.engine import attach  # imported here because it needs CUDA

        return dict(attach(handle["data"]).caches)
    from transferd.tiers.segment import attach_arrays

    if handle["kind"] != "shm":
        raise TierError(f"cannot attach device memory of kind {handle['kind']!r} here; use its adapter")
    return attach_arrays(handle["data"])


def timelines(handle: dict[str, Any]) -> Any:
    """Map the timelines that a handle names; see Client.timelines. Raises TierError."""
    if handle["kind"] != "cuda_ipc":
        return None
    from transferd.tiers.cuda.engine import timelines as mapped  # imported here because it needs CUDA

    return mapped(handle["data"])


class Attachments:
    """Changed by one client, on its loop.

    outdated: attached ranks whose memory is gone, ascending. orphaned: those outdated ranks whose memory belonged to an
    earlier daemon. Only the client knows these; a daemon itself knows what was attached before its own clears.
    changing: how many clears and restores by this client are in progress; these cause no notification.
    """

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._mapped: dict[int, tuple[str, int]] = {}  # rank: boot_id and epoch of the memory
        self._known: tuple[str, int] | None = None  # boot_id and epoch of the last Welcome
        self._reactions: set[asyncio.Task[Any]] = set()  # coroutines that on_new_boot has returned
        self.outdated: list[int] = []
        self.orphaned: list[int] = []
        self.on_new_boot: Callable[[], object] | None = None
        self.changing = 0

    @property
    def attached(self) -> list[int]:
        """Ranks that are attached, or were attached before a restart."""
        return sorted(self._mapped)

    def attach(self, rank: int, handle: dict[str, Any]) -> None:
        """Record a handle from the daemon. A handle without boot_id and epoch means the current ones."""
        now = self._conversation.session
        self._mapped[rank] = handle.get("boot_id", now.boot_id), handle.get("epoch", now.epoch)
        self._look()

    def refusal(self) -> RequestError:
        """The error for a task that names device blocks while there are orphaned ranks."""
        what = f"rank {self.orphaned[0]}: its attached memory is gone with the daemon that created it"
        return RequestError(f"{what}; call reattach() first", code="not_attached")

    def detach(self, rank: int) -> None:
        self._mapped.pop(rank, None)
        self._look()

    def epoch_began(self, epoch: int) -> None:
        """Note that this client itself has cleared or restored the cache."""
        self._known = self._conversation.session.boot_id, epoch
        self._look()

    def again(self) -> list[wire.Control]:
        """The requests to repeat in a new session, which tell the daemon what is mapped, current or outdated."""
        boot_id = self._conversation.session.boot_id
        return [wire.Attach(rank, epoch) for rank, (boot, epoch) in self._mapped.items() if boot == boot_id]

    def renewed(self) -> None:
        """A session or an epoch has begun; notify the engine if another daemon or another client's clear caused it."""
        self._look()
        known, self._known = self._known, (self._conversation.session.boot_id, self._conversation.session.epoch)
        if known not in (None, self._known) and not self.changing:
            self._tell()

    def _look(self) -> None:
        boot_id, epoch = self._conversation.session.boot_id, self._conversation.session.epoch
        # Memory of a later epoch than that of the last Welcome is current, and our knowledge is old.
        self.outdated = [rank for rank, (boot, of) in sorted(self._mapped.items()) if boot != boot_id or of < epoch]
        self.orphaned = [rank for rank in self.outdated if self._mapped[rank][0] != boot_id]

    def _tell(self) -> None:
        if self.on_new_boot is None:
            gone = f"; attach rank {', '.join(map(str, self.outdated))} again" if self.outdated else ""
            what = "%s: the daemon was restarted or its cache was cleared, so all of its blocks are empty%s"
            log.warning(what + " (set Client.on_new_boot to hear of this)", self._conversation.endpoint, gone)
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
