"""Blocks that are copied between an engine's memory and slots (slots.py), for engines that call and wait.

A call answers by its deadline, whatever the daemon does; from then on nothing of it touches the engine's memory.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import itertools
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from transferd.adapters.common.companion import DaemonFinder
from transferd.adapters.common.link import NOT_CONNECTED, Link, why_not_stored
from transferd.adapters.common.slots import Slots
from transferd.tasks import FAILED, NOT_READY, ReadStorageTask, TaskResult, WriteStorageTask

PARTS = 4  # of the slots in one task, so that copies and storage overlap
AT_ONCE = 2  # loads of one call, so that the daemon has work while the call copies
ENTER_S = 10.0  # for the daemon to map the slots of a new engine, before anything fails
SLACK_S = 2.0  # after its timeout, for the daemon's answer

Pieces = Sequence[tuple[int, int]]  # a block's memory in this process: addresses and bytes, together those of a slot


class CopiedBlocks:
    """Thread-safe.

    link: of an engine whose memory are these slots. what: the blocks, in messages.
    timeout, load_timeout: seconds for one call.
    """

    def __init__(
        self, link: Link, finder: DaemonFinder, slots: Slots, what: str, *, timeout: float, load_timeout: float
    ) -> None:
        self._link, self._finder, self._slots, self._what = link, finder, slots, what
        self._timeout, self._load_timeout = timeout, load_timeout
        self._addresses = [int(one.ctypes.data) for one in slots.bytes]
        self._free = deque(range(slots.count))
        self._some_free = threading.Condition()
        self._numbers = itertools.count()
        self._began = time.monotonic()

    def ready(self) -> bool:
        """Whether the daemon serves; waits for one that was asked only just now to map the slots."""
        left = self._began + ENTER_S - time.monotonic()
        return self._link.ready or (left > 0 and self._finder.listening and self._link.wait_ready(left))

    def store(self, keys: Sequence[str], blocks: Sequence[Pieces]) -> list[bool]:
        """Store the blocks at these places; for each whether it is stored. Returns by the deadline."""
        give_up = time.monotonic() + self._timeout + SLACK_S
        stored, begun, start = [False] * len(keys), [], 0
        while start < len(keys) and (slots := self._take(len(keys) - start, give_up)):
            which = range(start, start + len(slots))
            start += len(slots)
            for i, slot in zip(which, slots, strict=True):
                at = self._addresses[slot]
                for address, size in blocks[i]:
                    ctypes.memmove(at, address, size)
                    at += size
            named = [keys[i] for i in which]
            task = WriteStorageTask(
                task_id=self._task_id("store"), keys=named, gpu_block_ids=slots, timeout=self._timeout
            )
            begun.append((which, task, self._submitted(task, slots)))
        for which, task, answer in begun:
            for i, one in zip(which, self._result(task, answer, give_up), strict=True):
                stored[i] = one
        if start < len(keys):  # for which no daemon or no slot was there
            self._link.count_not_stored(FAILED if self._link.ready else NOT_READY, len(keys) - start)
        return stored

    def load(self, keys: Sequence[str], blocks: Sequence[Pieces]) -> list[bool]:
        """Load blocks to these places; for each whether its bytes are there. Returns by the deadline."""
        give_up = time.monotonic() + self._load_timeout + SLACK_S
        loaded = [False] * len(keys)
        begun: deque[tuple[range, list[int], ReadStorageTask, concurrent.futures.Future[TaskResult]]] = deque()

        def end_one() -> None:
            which, slots, task, answer = begun.popleft()
            there = self._result(task, answer, give_up)
            for i, slot, one in zip(which, slots, there, strict=True):
                at = self._addresses[slot]
                for address, size in blocks[i] if one else ():
                    ctypes.memmove(address, at, size)
                    at += size
                loaded[i] = one
            answer.add_done_callback(lambda _: self._give_back(slots))  # until then the daemon may write there

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
                    timeout=self._load_timeout,
                    prefix=False,
                )
                begun.append((which, slots, task, self._submitted(task)))
                start += len(slots)
            elif begun:
                end_one()
            else:
                break
        return loaded

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

        self._link.submit(task, done)
        return answer

    def _result(self, task: Any, answer: concurrent.futures.Future[TaskResult], give_up: float) -> list[bool]:
        log = self._link.program.log
        try:
            result = answer.result(max(0.0, give_up - time.monotonic()))
        except (TimeoutError, concurrent.futures.TimeoutError):
            log.warning("transferd: no answer in time: %d of %s are given up", len(task.keys), self._what)
            return [False] * len(task.keys)
        moved = result.mask(task)
        if not all(moved):
            if isinstance(task, WriteStorageTask):
                self._link.count_not_stored(why_not_stored(result), moved.count(False))
            if result.error is not None and result.error.code != NOT_CONNECTED:
                what = "transferd: %d of %d of %s were not moved: %s"
                log.warning(what, moved.count(False), len(moved), self._what, result.error.message)
        return moved

    def _task_id(self, deed: str) -> str:
        return f"{deed}-{self._link.life}-{next(self._numbers)}"
