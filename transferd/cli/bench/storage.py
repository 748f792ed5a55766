"""Storage: write and read tasks through a whole rank, compared with the backend's own raw call on the same bytes.

Ours copies from the device, seals and stores, and for a read does the reverse and verifies. Raw only passes ready
bytes to the backend. So a ratio near 1 means that the I/O hides the copy and the checksum.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from transferd.blocks.formats import FOOTER_BYTES
from transferd.blocks.layout import build_layout
from transferd.cli.bench.harness import RUNS, Row, Rows, row, timed
from transferd.cli.bench.subject import OBJECTS, Raw, Subject, counted_in_files
from transferd.cli.replay.kvdata import KvData
from transferd.config import from_tree
from transferd.daemon.daemon import Daemon
from transferd.errors import ConfigError, InvariantError
from transferd.runtime.compat import Runner
from transferd.storage.file_io import map_files
from transferd.tasks import ReadStorageTask, Status, Task, TaskResult, WriteStorageTask
from transferd.tiers.segment import attach_arrays
from transferd.wire.transport import ServerTransport

CACHE = {"ranks": 1, "layers": 16, "kv_heads": 4, "head_dim": 128, "block_size": 64, "device_blocks": 2 * OBJECTS}


class InProcess(ServerTransport):
    """Takes the place of the sockets: tasks go in and results come out in this process."""

    endpoints = ("in-process",)

    def __init__(self) -> None:
        self.waiting: dict[int, asyncio.Future[TaskResult]] = {}

    def start(self, *_: object) -> None:
        """No messages arrive; `submit` hands tasks to the coordinator."""

    def peer(self, _name: bytes) -> None:
        """Nobody is connected."""

    def close(self) -> None:
        """Nothing to close."""

    def deliver(self, _client: bytes, seq: int, result: TaskResult) -> None:
        future = self.waiting.pop(seq)
        if not future.done():  # cancelled by Ctrl-C
            future.set_result(result)

    async def submit(self, daemon: Daemon, seq: int, task: Task) -> TaskResult:
        future = self.waiting[seq] = asyncio.get_running_loop().create_future()
        daemon.default.coordinator.submit(b"bench", seq, task)
        result: TaskResult = await future
        return result


def run(backend: str) -> Rows:
    """Rows of one backend. Raises ConfigError if it cannot run here."""
    map_files()  # as `transferd serve` does
    with (
        tempfile.TemporaryDirectory(prefix="transferd-bench-") as directory,
        _subjects(backend, Path(directory)) as subjects,
    ):
        for subject in subjects:
            yield from measure(subject)


def measure(subject: Subject) -> list[Row]:
    """Rows of one subject: our write and read compared with the raw ones, and the raw ones with a memcpy."""
    import uvloop

    with Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(subject))


@contextlib.contextmanager
def _subjects(backend: str, directory: Path) -> Iterator[list[Subject]]:
    each = build_layout(from_tree({"cache": CACHE}).geometry).block_bytes + FOOTER_BYTES
    if backend == "file":
        full = OBJECTS * counted_in_files(directory, each)
        section = {"backend": "file", "file": {"path": str(directory / "blocks")}}
        section_full = {"backend": "file", "file": {"path": str(directory / "full"), "capacity": full}}
        yield [
            Subject("file", section, lambda nbytes: _RawFile(directory / "raw", nbytes)),
            Subject("file (full)", section_full, lambda nbytes: _RawFile(directory / "raw, full", nbytes)),
        ]
    elif backend == "memory":
        full = OBJECTS * each
        yield [
            Subject("memory", {"backend": "memory", "memory": {"capacity": "2GiB"}}, _RawMemory),
            Subject("memory (full)", {"backend": "memory", "memory": {"capacity": full}}, _RawMemory),
        ]
    elif backend == "mooncake":
        from transferd.cli.bench.mooncake import subjects

        with subjects(directory) as pools:
            yield pools
    else:
        raise ConfigError("--backend", "expected one of file, memory, mooncake", backend)


async def _run(subject: Subject) -> list[Row]:
    tree = {
        "cache": CACHE | {"host_blocks": 0},
        "host": {"staging": subject.staging},
        "storage": subject.section,
        "metrics": {"listen": ""},
    }
    config, transport = from_tree(tree), InProcess()
    daemon = Daemon(config, transport=transport, storage=subject.storage(config) if subject.storage else None)
    daemon.default.coordinator.deliver = transport.deliver
    await daemon.open()
    try:
        return await _measure(subject, daemon, transport)
    finally:
        await daemon.stop(lambda: 10.0)


async def _measure(subject: Subject, daemon: Daemon, transport: InProcess) -> list[Row]:
    caches = [attach_arrays(daemon.default.cache.handle(b"bench", 0).data)]
    data = KvData(caches)
    object_bytes = daemon.default.objects.slot_bytes
    nbytes = OBJECTS * object_bytes
    source, target = list(range(OBJECTS)), list(range(OBJECTS, 2 * OBJECTS))
    for block in source:
        data.fill(block, block)
    raw = subject.raw(object_bytes)
    writes, reads, raw_writes, raw_reads, memcpy = [], [], [], [], []
    buffer = np.ones(nbytes, dtype=np.uint8)
    other = np.zeros_like(buffer)
    for number in range(RUNS + 1):
        keys = [f"run{number}-{block}" for block in source]
        memcpy.append(timed(lambda: np.copyto(other, buffer)))
        raw_writes.append(timed(lambda n=number: raw.write(n)))  # type: ignore[misc]
        task: Task = WriteStorageTask(task_id=f"w{number}", keys=keys, gpu_block_ids=source)
        writes.append(await run_task(daemon, transport, 2 * number, task))
        data.poison(target)
        raw_reads.append(timed(lambda n=number: raw.read(n)))  # type: ignore[misc]
        task = ReadStorageTask(task_id=f"r{number}", keys=keys, gpu_block_ids=target)
        reads.append(await run_task(daemon, transport, 2 * number + 1, task))
        for block in source:
            if data.verify(OBJECTS + block, block) is not None:
                raise InvariantError("a read delivered wrong bytes")
        raw.forget(number, daemon.default.objects.names("", daemon.default.objects.ids(keys), 0))
    raw.close()
    del caches, data

    def speeds(seconds: list[float]) -> list[float]:
        return [nbytes / s / 1e9 for s in seconds[1:]]

    def limit(seconds: list[float]) -> float:
        return statistics.median(speeds(seconds))

    name, size = subject.name, f"{object_bytes / 2**20:.3g} MiB objects"
    return [
        row(f"{name} write, {size}", speeds(writes), "GB/s", limit(raw_writes), "GB/s raw"),
        row(f"{name} read, {size}", speeds(reads), "GB/s", limit(raw_reads), "GB/s raw"),
        row(f"raw write{_of(subject)}", speeds(raw_writes), "GB/s", limit(memcpy), "GB/s memcpy"),
        row(f"raw read{_of(subject)}", speeds(raw_reads), "GB/s", limit(memcpy), "GB/s memcpy"),
    ]


def _of(subject: Subject) -> str:
    return f", {subject.name}" if subject.storage or "(" in subject.name else ""


async def run_task(daemon: Daemon, transport: InProcess, seq: int, task: Task) -> float:
    """Seconds that a task takes. Raises RuntimeError if it is not OK."""
    before = time.perf_counter()
    result = await transport.submit(daemon, seq, task)
    seconds = time.perf_counter() - before
    if result.status is not Status.OK:
        raise RuntimeError(f"a benchmark task ended badly: {result}")
    return seconds


class _RawFile(Raw):
    """Plain files: open, write or read, close."""

    def __init__(self, directory: Path, object_bytes: int) -> None:
        self._directory = directory
        self._directory.mkdir()
        self._data = os.urandom(object_bytes)
        # As many buffers as objects: reading all into one would measure the processor's cache.
        self._into = [memoryview(bytearray(object_bytes)) for _ in range(OBJECTS)]

    def write(self, number: int) -> None:
        for i in range(OBJECTS):
            fd = os.open(self._directory / f"{number}-{i}", os.O_WRONLY | os.O_CREAT, 0o600)
            os.write(fd, self._data)
            os.close(fd)

    def read(self, number: int) -> None:
        for i in range(OBJECTS):
            fd = os.open(self._directory / f"{number}-{i}", os.O_RDONLY)
            if os.readv(fd, [self._into[i]]) != len(self._into[i]):
                raise InvariantError("a raw read came back short")
            os.close(fd)


class _RawMemory(Raw):
    """A dict of bytes."""

    def __init__(self, object_bytes: int) -> None:
        self._data = bytes(object_bytes)
        self._into = [bytearray(object_bytes) for _ in range(OBJECTS)]
        self._objects: dict[int, bytes] = {}

    def write(self, number: int) -> None:
        view = memoryview(self._data)
        for i in range(OBJECTS):
            self._objects[number * OBJECTS + i] = bytes(view)

    def read(self, number: int) -> None:
        for i in range(OBJECTS):
            self._into[i][:] = self._objects[number * OBJECTS + i]

    def forget(self, number: int, names: Sequence[str]) -> None:  # noqa: ARG002 - it has its own
        """Free objects outside `read`, because freeing takes longer when the C library returns memory at once."""
        for i in range(OBJECTS):
            del self._objects[number * OBJECTS + i]

    def close(self) -> None:
        self._objects.clear()
