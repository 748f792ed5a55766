"""Objects of one size as an engine of slots, and which sizes a store has.

Mooncake's objects have any size, and lie in any memory of the process. So an object is copied between that memory and a
slot, which the daemon maps; a call answers by its deadline, and from then on nothing of it touches the caller's memory.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import itertools
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transferd.adapters.common.companion import DaemonFinder
from transferd.adapters.common.entry import EngineFacts
from transferd.adapters.common.link import NOT_CONNECTED, Link, why_not_stored
from transferd.adapters.common.slots import Slots
from transferd.adapters.mooncake_store.settings import MOONCAKE, StoreSettings
from transferd.tasks import ReadStorageTask, TaskResult, WriteStorageTask

LEAST_SLOTS, MOST_SLOTS = 4, 4096
PARTS = 4  # of the slots in one task, so that copies and storage overlap
AT_ONCE = 2  # loads of one call, so that the daemon has work while the call copies
ENTER_S = 10.0  # for the daemon to map the slots of a new size, before anything fails
SLACK_S = 2.0  # after its timeout, for the daemon's answer
LEAVE_S = 2.0

Pieces = Sequence[tuple[int, int]]  # an object's memory in the process: addresses and bytes


class AttachedSize:
    """Objects of `nbytes` bytes at the daemon. Thread-safe. Raises TierError without memory for slots."""

    def __init__(self, nbytes: int, engine: str, model: str, chosen: StoreSettings, finder: DaemonFinder) -> None:
        self.nbytes = nbytes
        self._chosen, self._finder = chosen, finder
        count = min(MOST_SLOTS, max(LEAST_SLOTS, chosen.buffer_bytes // nbytes))
        self._slots = Slots(nbytes, count)
        self._addresses = [int(one.ctypes.data) for one in self._slots.bytes]
        self._free = deque(range(count))
        self._some_free = threading.Condition()
        self._numbers = itertools.count()
        weights = f"{chosen.weights} (asserted)" if chosen.weights else "as the engine's keys say"
        self.facts = EngineFacts(
            name=engine,
            model=model,
            generation=chosen.generation,
            identity="mooncake store",
            ranks=1,
            blocks=count,
            page_bytes=[nbytes],
            memory=self._slots.offered(),
            fingerprint={"interface": "Mooncake's store", "bytes of an object": nbytes, "weights": weights},
        )
        self.link = Link(finder, engine, self.facts.enter)
        self._began = time.monotonic()

    def ready(self) -> bool:
        """Whether the daemon serves; waits for one that was asked only just now to map the slots."""
        left = self._began + ENTER_S - time.monotonic()
        return self.link.ready or (left > 0 and self._finder.listening and self.link.wait_ready(left))

    def exists(self, keys: Sequence[str]) -> list[bool]:
        return self.link.exists(keys) if keys and self.ready() else [False] * len(keys)

    def store(self, keys: Sequence[str], objects: Sequence[Pieces]) -> list[bool]:
        """Store the objects at these places; for each whether it is stored. Returns by the deadline."""
        give_up = time.monotonic() + self._chosen.timeout + SLACK_S
        stored, begun, start = [False] * len(keys), [], 0
        while start < len(keys) and (slots := self._take(len(keys) - start, give_up)):
            which = range(start, start + len(slots))
            start += len(slots)
            for i, slot in zip(which, slots, strict=True):
                at = self._addresses[slot]
                for address, size in objects[i]:
                    ctypes.memmove(at, address, size)
                    at += size
            named = [keys[i] for i in which]
            task = WriteStorageTask(
                task_id=self._task_id("store"), keys=named, gpu_block_ids=slots, timeout=self._chosen.timeout
            )
            begun.append((which, task, self._submitted(task, slots)))
        for which, task, answer in begun:
            for i, one in zip(which, self._result(task, answer, give_up), strict=True):
                stored[i] = one
        return stored

    def load(self, keys: Sequence[str], objects: Sequence[Pieces]) -> list[bool]:
        """Load objects to these places; for each whether its bytes are there. Returns by the deadline."""
        give_up = time.monotonic() + self._chosen.load_timeout + SLACK_S
        loaded = [False] * len(keys)
        begun: deque[tuple[range, list[int], ReadStorageTask, Any]] = deque()

        def end_one() -> None:
            which, slots, task, answer = begun.popleft()
            there = self._result(task, answer, give_up)
            for i, slot, one in zip(which, slots, there, strict=True):
                at = self._addresses[slot]
                for address, size in objects[i] if one else ():
                    ctypes.memmove(address, at, size)
                    at += size
                loaded[i] = one
            if answer.done():
                self._give_back(slots)
            else:  # the daemon may still write there
                answer.add_done_callback(lambda _: self._give_back(slots))

        start = 0
        while begun or start < len(keys):
            # who holds a part must not wait for slots that others hold in the same way
            wait = time.monotonic() if begun else give_up
            slots = self._take(len(keys) - start, wait) if start < len(keys) and len(begun) < AT_ONCE else []
            if slots:
                which = range(start, start + len(slots))
                task = ReadStorageTask(
                    task_id=self._task_id("load"),
                    keys=[keys[i] for i in which],
                    gpu_block_ids=slots,
                    timeout=self._chosen.load_timeout,
                    prefix=False,
                )
                begun.append((which, slots, task, self._submitted(task)))
                start += len(slots)
            elif begun:
                end_one()
            else:
                break
        return loaded

    def close(self) -> None:
        self.link.close(LEAVE_S)
        self._slots.close()

    def _take(self, wanted: int, give_up: float) -> list[int]:
        """Slots for one task, at least one; none if the time is up, or no daemon serves."""
        if not self.ready():
            return []
        with self._some_free:
            self._some_free.wait_for(lambda: self._free, max(0.0, give_up - time.monotonic()))
            most = min(wanted, len(self._free), max(1, self._slots.count // PARTS))
            return [self._free.popleft() for _ in range(most)]

    def _give_back(self, slots: Sequence[int]) -> None:
        with self._some_free:
            self._free.extend(slots)
            self._some_free.notify_all()

    def _submitted(
        self, task: ReadStorageTask | WriteStorageTask, slots: Sequence[int] = ()
    ) -> concurrent.futures.Future[TaskResult]:
        """The settled result to come; these slots are free from then on."""
        answer: concurrent.futures.Future[TaskResult] = concurrent.futures.Future()

        def done(result: TaskResult) -> None:
            self._give_back(slots)
            answer.set_result(result)

        self.link.submit(task, done)
        return answer

    def _result(self, task: Any, answer: concurrent.futures.Future[TaskResult], give_up: float) -> list[bool]:
        try:
            result = answer.result(max(0.0, give_up - time.monotonic()))
        except (TimeoutError, concurrent.futures.TimeoutError):
            what = "transferd: the daemon has not answered in time: %d objects of %d bytes are given up"
            MOONCAKE.log.warning(what, len(task.keys), self.nbytes)
            return [False] * len(task.keys)
        moved = result.mask(task)
        if not all(moved):
            if isinstance(task, WriteStorageTask):
                self.link.count_not_stored(why_not_stored(result), moved.count(False))
            if result.error is not None and result.error.code != NOT_CONNECTED:
                what = "transferd: %d of %d objects of %d bytes were not moved: %s"
                MOONCAKE.log.warning(what, moved.count(False), len(moved), self.nbytes, result.error.message)
        return moved

    def _task_id(self, deed: str) -> str:
        return f"{deed}-{self.link.life}-{next(self._numbers)}"


class KnownSizes:
    """The sizes of objects that this user's processes have stored, in a file: a key alone does not show a size.

    Thread-safe. Each line is a size; another process may add one at any time.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seen = -1
        self._sizes: list[int] = []
        self._lock = threading.Lock()

    def all(self) -> list[int]:
        with self._lock:
            try:
                if (length := self._file.stat().st_size) != self._seen:
                    lines = self._file.read_text(encoding="ascii", errors="replace").splitlines()
                    found = [int(line) for line in lines if line.isdigit() and int(line)]
                    self._sizes, self._seen = list(dict.fromkeys([*self._sizes, *found])), length
            except OSError:
                pass
            return list(self._sizes)

    def add(self, nbytes: int) -> None:
        if nbytes in self.all():
            return
        with self._lock:
            self._sizes.append(nbytes)
            try:
                self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with self._file.open("a", encoding="ascii") as file:
                    file.write(f"{nbytes}\n")
            except OSError as error:
                MOONCAKE.log.warning("transferd: other processes will not find objects of %d bytes: %s", nbytes, error)
