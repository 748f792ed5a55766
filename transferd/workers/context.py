"""The parts that a rank's handlers work with."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from transferd.blocks.formats import ObjectFormat
from transferd.blocks.layout.base import BlockLayout
from transferd.observability.recorder import Recorder
from transferd.runtime.aio import Background
from transferd.runtime.clock import Clock
from transferd.runtime.threads import Direction, Threads
from transferd.storage.admission import SecondUse
from transferd.storage.base import Storage
from transferd.storage.peer.transport import PeerTransport
from transferd.storage.tokens import TokenStorage
from transferd.tiers.base import DeviceTier
from transferd.tiers.extents import Claims
from transferd.tiers.pinned import HostPool, HostRegion
from transferd.tiers.staging import Staging

T = TypeVar("T")

# Checksums of up to this many bytes cost less on the loop than a round trip to a thread.
INLINE_CHECK_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class PeerPath:
    """How a rank reaches other daemons."""

    transport: PeerTransport  # shared by all ranks
    staging: Staging  # the only memory that peers write to
    format: ObjectFormat  # that of the objects sent


@dataclass(frozen=True, slots=True)
class RankContext:
    """One rank's parts. The daemon builds them; the handlers borrow them."""

    rank: int
    object_rank: int  # the rank in object names, counted over all nodes of the group
    layout: BlockLayout
    device: DeviceTier
    host: HostPool | None  # None without a host tier; admission then rejects tasks that need one
    staging: Staging  # always set; storage I/O touches no other memory
    storage: Storage | None  # None without a storage backend; admission then rejects tasks that need one
    format: ObjectFormat
    threads: Threads
    clock: Clock
    recorder: Recorder
    background: Background
    peer: PeerPath | None = None  # set only with pd.mode "direct"
    inline_check_bytes: int = INLINE_CHECK_BYTES
    # set if storage is token-indexed; it then handles reads and writes, and keeps its bytes in `storage` if that is set
    tokens: TokenStorage | None = None
    block_size: int = 0  # tokens per block
    only_flush: bool = False  # write tasks update the token index and move no bytes
    engine: str = ""
    claims: Claims = field(default_factory=Claims)  # of all ranks of all engines
    admission: SecondUse | None = None  # chooses which blocks of a write to store; None stores all
    # How many ranks of the engine make or free memory at once: the threads for that are all engines'.
    setting_up: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(sys.maxsize))

    async def on_slots(self, slots: int, direction: Direction, work: Callable[[], T], what: str) -> T:
        """Do work that reads every byte of so many slots: in a thread, unless a round trip to one costs more."""
        if slots * self.format.checked_bytes <= self.inline_check_bytes:
            return work()
        return await self.threads.run(direction, work, what)

    @property
    def regions(self) -> dict[str, HostRegion]:
        """The rank's host memory, by what it is used for."""
        regions = {"staging": self.staging.memory}
        if self.host is not None:
            regions["host"] = self.host.memory
        if self.peer is not None:
            regions["peer staging"] = self.peer.staging.memory
        return regions
