"""A half of an engine, in a process of its own, as the vLLM adapter makes one; without vLLM.

    python -m tests.machine.hostile.half ENDPOINT NAME RANK|- RANKS TOKEN|- MODEL STAYS

With a rank it is that rank's worker: it has memory, which it offers (rank 0 registers the engine). Without, it is the
scheduler's half: it pushes tasks. STAYS: 1 if it keeps its name however long another engine has it, else 0. It reads
one JSON command a line and prints one answer a line.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import mmap
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import numpy as np

from transferd.adapters.common import link
from transferd.adapters.common.companion import DaemonFinder
from transferd.adapters.common.entry import EngineFacts, OfferedMemory
from transferd.adapters.common.link import Link
from transferd.adapters.common.memory import shared_memory_at
from transferd.adapters.vllm.settings import VLLM
from transferd.runtime.compat import Self
from transferd.tasks import ReadStorageTask, Task, TaskResult, WriteStorageTask

BLOCKS, PAGE = 8, 4096
WAIT_S = 60.0


class Half:
    """In the test's process. Owns the half's."""

    def __init__(
        self,
        endpoint: str,
        name: str,
        rank: int | None,
        *,
        token: str = "",
        ranks: int = 1,
        model: str = "m",
        stays: bool = False,
    ) -> None:
        given = [endpoint, name, "-" if rank is None else str(rank), str(ranks), token or "-", model, str(int(stays))]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.machine.hostile.half", *given], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()

    def ask(self, what: str, *given: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([what, *given]).encode() + b"\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()


class _Serving:
    """In the half's process. Every public method is a command."""

    def __init__(self, endpoint: str, name: str, rank: str, ranks: str, token: str, model: str, stays: str) -> None:
        if stays == "1":
            link.PATIENT_LOOKS = sys.maxsize
        self._lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: self._lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("vllm.transferd").addHandler(handler)
        finder = DaemonFinder(VLLM, endpoint=endpoint)
        if rank == "-":
            self._link = Link(finder, name, token=None if token == "-" else token)
            return
        fd = os.memfd_create("kv", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, BLOCKS * PAGE)
        self._bytes = np.frombuffer(mmap.mmap(fd, BLOCKS * PAGE), dtype=np.uint8)
        where = shared_memory_at(self._bytes.ctypes.data, self._bytes.nbytes)
        memory = OfferedMemory(int(rank), where, ((0, PAGE),), self._bytes)
        facts = EngineFacts(name, model, "", "half", int(ranks), BLOCKS, [PAGE], memory, "" if token == "-" else token)
        self._link = Link(finder, name, facts.enter, token=facts.token)

    def ready(self) -> bool:
        return self._link.ready

    def boot(self) -> str:
        """The boot id of the daemon that serves it; "" if none does."""
        return self._link._entered if self._link.ready else ""

    def belong(self, token: str) -> None:
        self._link.belong(token)

    def reset(self) -> bool:
        return self._link.reset()

    def lines(self) -> list[str]:
        """What it has logged so far."""
        return self._lines

    def paint(self, block: int, value: int) -> str:
        """Fill a block; return its digest."""
        self._bytes.reshape(BLOCKS, PAGE)[block] = value
        return self.digest(block)

    def digest(self, block: int) -> str:
        return hashlib.sha256(self._bytes.reshape(BLOCKS, PAGE)[block].tobytes()).hexdigest()

    def save(self, key: str, block: int) -> list[Any]:
        return self._done(WriteStorageTask(task_id=f"s{key}{block}", keys=[key], gpu_block_ids=[block]))

    def load(self, key: str, block: int) -> list[Any]:
        task = ReadStorageTask(task_id=f"l{key}{block}", keys=[key], gpu_block_ids=[block], prefix=False)
        return self._done(task)

    def exists(self, *keys: str) -> list[bool]:
        return self._link.exists(keys)

    def _done(self, task: Task) -> list[Any]:
        answers: queue.SimpleQueue[TaskResult] = queue.SimpleQueue()
        self._link.submit(task, answers.put)  # type: ignore[arg-type]
        result = answers.get(timeout=WAIT_S)
        return [str(result.status), None if result.error is None else result.error.code, list(result.block_ids)]


def main(arguments: list[str]) -> None:
    serving = _Serving(*arguments)
    for line in sys.stdin:
        what, *given = json.loads(line)
        print(json.dumps(getattr(serving, what)(*given)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
