"""The parts that a rank's handlers work with."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from transferd.blocks.formats import ObjectFormat
from transferd.blocks.layout.base import BlockLayout
from transferd.observability.recorder import Recorder
from transferd.runtime.aio import Background
from transferd.runtime.clock import Clock
from transferd.runtime.threads import Threads
from transferd.storage.admission import SecondUse
from transferd.storage.base import Storage
from transferd.storage.peer.transport import PeerTransport
from transferd.storage.tokens import TokenStorage
from transferd.tiers.base import DeviceTier
from transferd.tiers.extents import Claims
from transferd.tiers.pinned import HostPool, HostRegion
from transferd.tiers.staging import Staging

# Checksums of up to this many bytes cost less on the loop than a round trip to a thread.
INLINE_CHECK_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class PeerPath:
    """How a rank reaches other daemons.

    transport: shared by all ranks. staging: the only memory that peers write to. format: that of the objects sent.
    """

    transport: PeerTransport
    staging: Staging
    format: ObjectFormat


@dataclass(frozen=True, slots=True)
class RankContext:
    """One rank's parts. The daemon builds them; the handlers borrow them.

    host: None without a host tier. storage: None without a storage backend. Admission rejects tasks that need a
    missing one. claims: of all ranks of all engines. tokens: set if storage is token-indexed; it then handles reads and
    writes, and keeps its bytes in `storage` if that is set. block_size: in tokens. only_flush: write tasks update the
    token index and move no bytes. admission: chooses which blocks of a write to store; None: all.
    staging: always set; storage I/O touches no other memory. peer: set only with pd.mode "direct".
    """

    rank: int
    layout: BlockLayout
    device: DeviceTier
    host: HostPool | None
    staging: Staging
    storage: Storage | None
    format: ObjectFormat
    threads: Threads
    clock: Clock
    recorder: Recorder
    background: Background
    peer: PeerPath | None = None
    inline_check_bytes: int = INLINE_CHECK_BYTES
    tokens: TokenStorage | None = None
    block_size: int = 0
    only_flush: bool = False
    engine: str = ""
    claims: Claims = field(default_factory=Claims)
    admission: SecondUse | None = None
    object_rank: int = -1  # the rank in object names, counted over all nodes of the group; -1: the same as `rank`
    # Reading every byte of up to this many slots costs less on the loop than a round trip to a thread.
    cheap_slots: int = field(init=False)

    def __post_init__(self) -> None:
        if self.object_rank < 0:
            object.__setattr__(self, "object_rank", self.rank)
        nbytes = self.format.checked_bytes
        object.__setattr__(self, "cheap_slots", self.inline_check_bytes // nbytes if nbytes else sys.maxsize)

    @property
    def regions(self) -> dict[str, HostRegion]:
        """The rank's host memory, by what it is used for."""
        regions = {"staging": self.staging.memory}
        if self.host is not None:
            regions["host"] = self.host.memory
        if self.peer is not None:
            regions["peer staging"] = self.peer.staging.memory
        return regions
