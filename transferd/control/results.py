"""Keeps results for a while, so that a repeated push gets the same answer and the task does not run again."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from transferd.tasks import TaskResult

# Memory of a kept result besides its packed form. Measured; tests/control/test_bytes.py compares.
RESULT_BYTES = 550

_decoder = msgspec.msgpack.Decoder(TaskResult)


class _KeptResult(msgspec.Struct, frozen=True, gc=False):
    """A result, packed: almost none is ever asked for again, and objects would take ten times the memory.

    content: hash of the task that it answers. memory_epoch: of the memory that its blocks are in. expires: monotonic
    seconds.
    """

    packed: bytes
    content: int
    memory_epoch: int
    expires: float

    @property
    def result(self) -> TaskResult:
        return _decoder.decode(self.packed)

    @property
    def nbytes(self) -> int:
        return RESULT_BYTES + len(self.packed)


class ResultCache:
    """Bounded by age (`ttl` seconds), by number (`most`) and by memory (`most_bytes`).

    All results live equally long, so the oldest always expires first.
    """

    def __init__(self, ttl: float, most: int, most_bytes: int) -> None:
        self._ttl = ttl
        self._most = most
        self._most_bytes = most_bytes
        self._kept: OrderedDict[str, _KeptResult] = OrderedDict()
        self.nbytes = 0

    def keep(self, result: TaskResult, content: int, memory_epoch: int, now: float) -> None:
        """Keep a task's first result. Drops one that cannot be packed or exceeds the bound by itself."""
        try:
            packed = bytes(memoryview(msgspec.msgpack.encode(result)))  # an exact copy: msgspec over-allocates
        except UnicodeEncodeError:  # a lone surrogate, as in an error about a file's name
            return
        kept = self._kept[result.task_id] = _KeptResult(packed, content, memory_epoch, now + self._ttl)
        self.nbytes += kept.nbytes
        self.forget(now)

    def recall(self, task_id: str, now: float) -> _KeptResult | None:
        """The task's kept result; None if there is none."""
        kept = self._kept.get(task_id)
        return None if kept is None or kept.expires <= now else kept

    def forget(self, now: float) -> None:
        """Drop expired results, then the oldest ones until the bounds hold."""
        while self._kept:
            task_id, kept = next(iter(self._kept.items()))
            if kept.expires > now and len(self._kept) <= self._most and self.nbytes <= self._most_bytes:
                return
            del self._kept[task_id]
            self.nbytes -= kept.nbytes

    def __contains__(self, task_id: object) -> bool:
        return task_id in self._kept

    def __len__(self) -> int:
        return len(self._kept)
