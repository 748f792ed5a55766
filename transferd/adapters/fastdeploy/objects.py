"""Named objects of one size between FastDeploy's host memory and the daemon's storage.

FastDeploy's memory is private to its process, so an object passes through a slot of ours, which the daemon maps.
Objects of one size are an engine of their own at the daemon, because a block has one size.
"""

from __future__ import annotations

import secrets
import threading

from transferd.adapters.common.companion import DaemonFinder
from transferd.adapters.common.copied import CopiedObjects
from transferd.adapters.common.program import Program
from transferd.adapters.common.slots import Slots
from transferd.adapters.fastdeploy.companion import Companion
from transferd.blocks.fingerprint import Facts

FASTDEPLOY = Program("FastDeploy", __package__ or __name__)
BUFFER_BYTES = 256 * 1024**2  # of slots for objects of one size
LEAST_SLOTS, MOST_SLOTS = 4, 64
TASK_TIMEOUT_S = 30.0  # as FastDeploy's storage tasks


class NodeDaemon(DaemonFinder):
    """The node's daemon."""

    def __init__(self, companion: Companion, *, starts: bool = True) -> None:
        """starts: False if another part of this process starts the daemon again when it ends."""
        super().__init__(FASTDEPLOY, endpoint=companion.endpoint)
        self._companion, self._starts = companion, starts
        self._lock = threading.Lock()

    @property
    def starting(self) -> bool:
        return not self.listening

    def find(self) -> str:
        """The endpoint. Starts a daemon of ours if there is none. Raises OSError."""
        if self._starts:
            with self._lock:
                self._companion.look()
        return self._companion.endpoint

    def close(self, timeout: float) -> None:
        """Does nothing: `leave` ends it."""

    def leave(self) -> None:
        """This process uses the daemon no more."""
        self._companion.close()


class Objects(CopiedObjects):
    """Objects of one size. Thread-safe. Transfers answer by their deadline."""

    def __init__(
        self,
        nbytes: int,
        daemon: NodeDaemon,
        model: str,
        facts: Facts,
        name: str,
        kind: str,
        rank: int = 0,
        of: int = 0,
    ) -> None:
        """name: the engine's. kind: what the objects are; others are never taken for them.

        rank, of: the number in a tensor-parallel group of so many, which chooses the RDMA device; 0: no group.
        Raises TierError without memory for the slots.
        """
        count = min(MOST_SLOTS, max(LEAST_SLOTS, BUFFER_BYTES // nbytes))
        super().__init__(
            nbytes, Slots(nbytes, count), daemon, timeout=TASK_TIMEOUT_S, load_timeout=TASK_TIMEOUT_S, name=name,
            model=model, generation="", identity=kind, token=secrets.token_hex(16), fingerprint=facts, first_rank=rank,
            group_ranks=of,
        )  # fmt: skip
