"""Blocks that are copied between an engine's memory and slots (slots.py), for engines that call and wait.

A call answers by its deadline, whatever the daemon does; from then on nothing of it touches the engine's memory.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from transferd.adapters.common.companion import DaemonFinder
from transferd.adapters.common.entry import EngineFacts
from transferd.adapters.common.link import BlockTasks, Link, StorageTask, failed
from transferd.adapters.common.slots import PARTS, Slots
from transferd.tasks import FAILED, NOT_READY, TaskResult

AT_ONCE = 2  # loads of one call, so that the daemon has work while the call copies
SLACK_S = 2.0  # after its timeout, for the daemon's answer
LEAVE_S = 2.0

Pieces = Sequence[tuple[int, int]]  # a block's memory in this process: addresses and bytes, together those of a slot


class CopiedBlocks:
    """Thread-safe.

    link: of an engine whose memory are these slots. what: the blocks, in messages.
    timeout, load_timeout: seconds for one call.
    """

    def __init__(self, link: Link, slots: Slots, what: str, *, timeout: float, load_timeout: float) -> None:
        self._link, self._slots = link, slots
        self._tasks = BlockTasks(link, what)
        self._timeout, self._load_timeout = timeout, load_timeout
        self._addresses = [int(one.ctypes.data) for one in slots.bytes]
        self._free = deque(range(slots.count))
        self._some_free = threading.Condition()

    def ready(self) -> bool:
        """Whether the daemon serves; waits for one that was asked only just now to map the slots."""
        return self._link.ready or ((left := self._link.patience) > 0 and self._link.wait_ready(left))

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
            task = self._tasks.write([keys[i] for i in which], slots, self._timeout)
            begun.append((which, task, self._submitted(task, slots)))
        for which, task, answer in begun:
            for i, one in zip(which, self._moved(task, answer, give_up), strict=True):
                stored[i] = one
        if start < len(keys):  # for which no daemon or no slot was there
            self._link.count_not_stored(FAILED if self._link.ready else NOT_READY, len(keys) - start)
        return stored

    def load(self, keys: Sequence[str], blocks: Sequence[Pieces]) -> list[bool]:
        """Load blocks to these places; for each whether its bytes are there. Returns by the deadline."""
        give_up = time.monotonic() + self._load_timeout + SLACK_S
        loaded = [False] * len(keys)
        begun: deque[tuple[range, list[int], StorageTask, concurrent.futures.Future[TaskResult]]] = deque()

        def end_one() -> None:
            which, slots, task, answer = begun.popleft()
            there = self._moved(task, answer, give_up)
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
                task = self._tasks.read([keys[i] for i in which], slots, self._load_timeout)
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

    def _submitted(self, task: StorageTask, slots: Sequence[int] = ()) -> concurrent.futures.Future[TaskResult]:
        """The settled result to come; these slots are free from then on."""
        answer: concurrent.futures.Future[TaskResult] = concurrent.futures.Future()

        def done(result: TaskResult) -> None:
            self._give_back(slots)
            answer.set_result(result)

        self._link.submit(task, done)
        return answer

    def _moved(self, task: StorageTask, answer: concurrent.futures.Future[TaskResult], give_up: float) -> list[bool]:
        try:
            result = answer.result(max(0.0, give_up - time.monotonic()))
        except (TimeoutError, concurrent.futures.TimeoutError):
            result = failed(task, "expired", "no answer in time")
        return self._tasks.moved(task, result)


class CopiedObjects(CopiedBlocks):
    """Objects of `nbytes` bytes, as an engine whose memory are these slots. Owns its link and the slots.

    about: the facts about the engine that its slots do not say (EngineFacts).
    """

    def __init__(
        self, nbytes: int, slots: Slots, finder: DaemonFinder, *, timeout: float, load_timeout: float, **about: Any
    ) -> None:
        self.nbytes = nbytes
        self.facts = EngineFacts(ranks=1, blocks=slots.count, page_bytes=[nbytes], memory=slots.offered(), **about)
        self.link = Link(finder, self.facts.name, self.facts.enter, token=self.facts.token)
        what = f"objects of {nbytes} bytes"
        super().__init__(self.link, slots, what, timeout=timeout, load_timeout=load_timeout)

    def close(self) -> None:
        """Leave the daemon, and free the slots."""
        self.link.close(LEAVE_S)
        self._slots.close()
