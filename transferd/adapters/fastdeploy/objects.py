"""Named objects of one size between FastDeploy's host memory and the daemon's storage.

FastDeploy's memory is private to its process, so an object passes through a slot of ours, which the daemon maps.
Objects of one size are an engine of their own at the daemon, because a block has one size.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import itertools
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence

from transferd.adapters.common.entry import EngineFacts
from transferd.adapters.common.link import Link, failed, why_not_stored
from transferd.adapters.common.packaged import nobody_listens
from transferd.adapters.common.program import Program
from transferd.adapters.common.slots import Slots
from transferd.adapters.fastdeploy.companion import Companion
from transferd.blocks.fingerprint import Facts
from transferd.tasks import ReadStorageTask, TaskResult, WriteStorageTask

log = logging.getLogger(__name__)

FASTDEPLOY = Program("FastDeploy", __package__ or __name__)
BUFFER_BYTES = 256 * 1024**2  # of slots for objects of one size
LEAST_SLOTS, MOST_SLOTS = 4, 64
TASK_TIMEOUT_S = 30.0  # as FastDeploy's storage tasks
SLACK_S = 2.0  # after that, for the daemon's answer
LEAVE_S = 2.0


class NodeDaemon:
    """The node's daemon as a Link looks for it (common/companion.py, DaemonFinder)."""

    program = FASTDEPLOY

    def __init__(self, companion: Companion, *, starts: bool = True) -> None:
        """starts: False if another part of this process starts the daemon again when it ends."""
        self._companion, self._starts = companion, starts
        self._lock = threading.Lock()

    @property
    def starting(self) -> bool:
        return nobody_listens(self._companion.endpoint)

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


class Objects:
    """Objects of one size. Thread-safe.

    Transfers answer by their deadline. A slot is free again only when the daemon's result is settled, and it never
    touches FastDeploy's memory.
    """

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
        self.nbytes, self.name, self.token = nbytes, name, secrets.token_hex(16)
        count = min(MOST_SLOTS, max(LEAST_SLOTS, BUFFER_BYTES // nbytes))
        self._slots = Slots(nbytes, count)
        self._addresses = [int(slot.__array_interface__["data"][0]) for slot in self._slots.bytes]
        self._free: queue.Queue[int] = queue.Queue()
        for slot in range(count):
            self._free.put(slot)
        engine = EngineFacts(
            name=self.name, model=model, generation="", identity=kind, ranks=1, blocks=count,
            page_bytes=[nbytes], memory=self._slots.offered(), token=self.token, fingerprint=facts, first_rank=rank,
            group_ranks=of,
        )  # fmt: skip
        self.link = Link(daemon, self.name, engine.enter, token=self.token)  # type: ignore[arg-type]
        self._numbers = itertools.count()

    def store(self, keys: Sequence[str], addresses: Sequence[int]) -> list[bool]:
        """Store objects from these addresses. For each whether it is stored."""
        return self._move(keys, addresses, self._stored)

    def load(self, keys: Sequence[str], addresses: Sequence[int]) -> list[bool]:
        """Load objects to these addresses. For each whether its bytes are there; else nothing was written."""
        return self._move(keys, addresses, self._loaded)

    def _move(
        self,
        keys: Sequence[str],
        addresses: Sequence[int],
        move: Callable[[list[str], list[int], list[int], float], list[bool]],
    ) -> list[bool]:
        give_up = time.monotonic() + TASK_TIMEOUT_S
        moved: list[bool] = []
        while len(moved) < len(keys):
            slots = self._take(len(keys) - len(moved), give_up)
            if not slots:
                log.warning("%d objects wait too long for a slot: the daemon does not answer", len(keys) - len(moved))
                break
            part = slice(len(moved), len(moved) + len(slots))
            moved += move(list(keys[part]), list(addresses[part]), slots, give_up)
        return moved + [False] * (len(keys) - len(moved))

    def _take(self, most: int, give_up: float) -> list[int]:
        taken: list[int] = []
        with contextlib.suppress(queue.Empty):
            taken.append(self._free.get(timeout=max(0.0, give_up - time.monotonic())))
            while len(taken) < min(most, self._slots.count):
                taken.append(self._free.get_nowait())
        return taken

    def _stored(self, keys: list[str], addresses: list[int], slots: list[int], give_up: float) -> list[bool]:
        for address, slot in zip(addresses, slots, strict=True):
            ctypes.memmove(self._addresses[slot], address, self.nbytes)
        task = WriteStorageTask(task_id=self._id("store"), keys=keys, gpu_block_ids=slots, timeout=_left(give_up))
        result = self._carried_out(task, slots, give_up)
        stored = result.mask(task)
        if not all(stored):
            self.link.count_not_stored(why_not_stored(result), stored.count(False))
            _say(result, "stored", stored)
        return stored

    def _loaded(self, keys: list[str], addresses: list[int], slots: list[int], give_up: float) -> list[bool]:
        task = ReadStorageTask(
            task_id=self._id("load"), keys=keys, gpu_block_ids=slots, timeout=_left(give_up), prefix=False
        )
        loaded: list[bool] = []

        def empty(result: TaskResult) -> None:
            loaded.extend(result.mask(task))
            for address, slot, there in zip(addresses, slots, loaded, strict=True):
                if there:
                    ctypes.memmove(address, self._addresses[slot], self.nbytes)

        result = self._carried_out(task, slots, give_up, empty)
        if not all(loaded):
            _say(result, "loaded", loaded)
        return loaded or [False] * len(keys)

    def _carried_out(
        self,
        task: ReadStorageTask | WriteStorageTask,
        slots: list[int],
        give_up: float,
        use: Callable[[TaskResult], None] = lambda _: None,
    ) -> TaskResult:
        """The settled result, after `use` of it in this thread; a failed one, without that, past the deadline.

        The slots are freed after `use`, or when the daemon has settled what is late.
        """
        answer: concurrent.futures.Future[TaskResult] = concurrent.futures.Future()
        lock, late = threading.Lock(), [False]

        def done(result: TaskResult) -> None:
            with lock:
                if late[0]:
                    self._free_all(slots)
                answer.set_result(result)

        self.link.submit(task, done)
        try:
            result = answer.result(_left(give_up) + SLACK_S)
        except (TimeoutError, concurrent.futures.TimeoutError):
            with lock:
                if not answer.done():
                    late[0] = True
                    return failed(task, "expired", "no answer by the deadline")
            result = answer.result()
        use(result)
        self._free_all(slots)
        return result

    def _free_all(self, slots: list[int]) -> None:
        for slot in slots:
            self._free.put(slot)

    def _id(self, deed: str) -> str:
        return f"{deed}-{self.link.life}-{next(self._numbers)}"

    def close(self) -> None:
        self.link.close(LEAVE_S)
        self._slots.close()


def _left(give_up: float) -> float:
    return max(0.001, give_up - time.monotonic())


def _say(result: TaskResult, deed: str, moved: Sequence[bool]) -> None:
    if result.error is not None:
        log.warning("%d of %d objects were not %s: %s", moved.count(False), len(moved), deed, result.error.message)
