"""Stores and loads that come from the disk and not from the page cache, against fio in the same run.

    python -m benchmarks.cold_files --directory DIR [--objects 512] [--format json]

DIR: on the disk in question. Objects of 2 MiB go through a daemon's write and read tasks, with and without
`storage.file.direct_io`. fio moves as many bytes in as many files by direct I/O, with as many threads as the file
backend has, and from memory in large pages, as staging is. Before each load the page cache drops the files. A store
through the page cache ends when the file system has written it back. CPU is of the whole process. Every byte is
compared after the timed part. Needs fio.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
import uvloop

from tests.support.page_cache import pages_in_memory
from transferd.cli.bench.harness import RUNS, Row, machine, report, row, tell
from transferd.cli.bench.storage import InProcess, run_task
from transferd.cli.replay.kvdata import KvData
from transferd.config import from_tree
from transferd.daemon.daemon import Daemon
from transferd.storage.file import MAX_THREADS
from transferd.tasks import ReadStorageTask, WriteStorageTask
from transferd.tiers.segment import attach_arrays

BLOCKS = 128  # of a task
CACHE = {"ranks": 1, "layers": 16, "kv_heads": 4, "head_dim": 128, "block_size": 64}
OBJECT_BYTES = 2 * 1024**2
LIBC = ctypes.CDLL(None, use_errno=True)
# For fio, whose buffers would be in pages of 4 KiB, at a third of the speed: malloc asks for large ones (glibc 2.35).
LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


@dataclass
class Figures:
    """Of one way, by run: GB/s and CPU seconds per GB of stores and loads; MiB of its files in the page cache."""

    store: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    store_cpu: list[float] = field(default_factory=list)
    load_cpu: list[float] = field(default_factory=list)
    cached: list[float] = field(default_factory=list)


def fio(directory: Path, objects: int, figures: Figures) -> None:
    """Write and read the files once."""
    where = directory / "fio"
    where.mkdir()
    for way, into, cpu in (("write", figures.store, figures.store_cpu), ("read", figures.load, figures.load_cpu)):
        command = [
            "fio", "--name=cold", f"--directory={where}", f"--rw={way}", "--bs=2m", "--direct=1", "--ioengine=psync",
            f"--numjobs={MAX_THREADS}", f"--nrfiles={objects // MAX_THREADS}", "--filesize=2m", "--openfiles=1",
            "--file_service_type=sequential", "--create_on_open=1", "--fallocate=native", "--thread",
            "--group_reporting", "--output-format=json", "--iomem_align=2m",
        ]  # fmt: skip
        done = subprocess.run(command, check=True, capture_output=True, env=os.environ | LARGE_PAGES)
        [job] = json.loads(done.stdout)["jobs"]
        did, seconds = job[way], job[way]["runtime"] / 1000
        assert did["io_bytes"] == objects * OBJECT_BYTES, did
        into.append(did["io_bytes"] / seconds / 1e9)
        # usr_cpu and sys_cpu are of one thread's time, as a mean over all.
        busy = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
        cpu.append(busy / (did["io_bytes"] / 1e9))
    shutil.rmtree(where)


async def transferd(directory: Path, objects: int, figures: Figures, *, direct_io: bool) -> None:
    """Write and read the objects once, through a daemon of their own."""
    store = directory / "blocks"
    section = {"path": str(store), "capacity": "1TiB", "direct_io": direct_io}
    cache = CACHE | {"device_blocks": BLOCKS, "host_blocks": 0}
    tree = {"cache": cache, "storage": {"backend": "file", "file": section}, "metrics": {"listen": ""}}
    transport = InProcess()
    daemon = Daemon(from_tree(tree), transport=transport)
    daemon.default.coordinator.listeners.deliver = transport.deliver
    await daemon.open()
    try:
        data = KvData([attach_arrays(daemon.default.cache.handle(b"bench", 0).data)])
        nbytes = objects * daemon.default.objects.slot_bytes
        blocks = list(range(BLOCKS))
        seconds = cpu = 0.0
        for start in range(0, objects, BLOCKS):
            for block in blocks:
                data.fill(block, start + block)
            keys = [f"{start + block}" for block in blocks]
            task = WriteStorageTask(task_id=f"w{start}", keys=keys, gpu_block_ids=blocks)
            before = time.process_time()
            seconds += await run_task(daemon, transport, start, task)
            cpu += time.process_time() - before
        if not direct_io:
            seconds += written_back(store)
        figures.store.append(nbytes / seconds / 1e9)
        figures.store_cpu.append(cpu / (nbytes / 1e9))
        dropped(store)
        seconds = cpu = 0.0
        for start in range(0, objects, BLOCKS):
            data.poison(blocks)
            keys = [f"{start + block}" for block in blocks]
            read = ReadStorageTask(task_id=f"r{start}", keys=keys, gpu_block_ids=blocks)
            before = time.process_time()
            seconds += await run_task(daemon, transport, objects + start, read)
            cpu += time.process_time() - before
            assert all(data.verify(block, start + block) is None for block in blocks), "wrong bytes"
        figures.load.append(nbytes / seconds / 1e9)
        figures.load_cpu.append(cpu / (nbytes / 1e9))
        figures.cached.append(sum(map(pages_in_memory, files(store))) * mmap.PAGESIZE / 2**20)
        del data
    finally:
        await daemon.stop(lambda: 10.0)
        shutil.rmtree(store)


def files(store: Path) -> Iterator[Path]:
    return (path for path in (store / "objects").rglob("*") if path.is_file())


def written_back(store: Path) -> float:
    """Seconds until the file system has written everything back."""
    before, fd = time.perf_counter(), os.open(store, os.O_RDONLY)
    LIBC.syncfs(fd)
    os.close(fd)
    return time.perf_counter() - before


def dropped(store: Path) -> None:
    """The page cache drops the files."""
    written_back(store)
    for path in files(store):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    assert sum(map(pages_in_memory, files(store))) == 0, "this file system keeps its files in memory"


def rows(ways: dict[str, Figures], objects: int) -> list[Row]:
    limit = ways["fio"]
    found = []
    for what in ("store", "load"):
        speeds, cpus = getattr(limit, what), getattr(limit, f"{what}_cpu")
        for name, figures in ways.items():
            found.append(row(f"{what}, {name}", getattr(figures, what), "GB/s", statistics.median(speeds), "GB/s fio"))
        for name, figures in ways.items():
            own = getattr(figures, f"{what}_cpu")
            found.append(row(f"CPU of a {what}, {name}", own, "s/GB", statistics.median(cpus), "s/GB fio"))
    for name, figures in ways.items():
        if figures.cached:
            held = f"page cache after {objects * 2 / 1024:.3g} GiB, {name}"
            found.append(row(held, figures.cached, "MiB", objects * 2.0, "MiB stored"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--objects", type=int, default=512, help=f"a multiple of {BLOCKS}")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    arguments = parser.parse_args()
    if shutil.which("fio") is None:
        sys.exit("fio is not installed")
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    before, objects = machine(), arguments.objects
    ways = {name: Figures() for name in ("fio", "direct I/O", "page cache")}
    for run in range(RUNS):
        with tempfile.TemporaryDirectory(prefix="transferd-cold-", dir=arguments.directory) as place:
            turns: list[Any] = [
                lambda: fio(Path(place), objects, ways["fio"]),
                lambda: uvloop.run(transferd(Path(place), objects, ways["direct I/O"], direct_io=True)),
                lambda: uvloop.run(transferd(Path(place), objects, ways["page cache"], direct_io=False)),
            ]
            for turn in turns[run % 3 :] + turns[: run % 3]:
                turn()
    tree = report("cold-files", before, rows(ways, objects))
    tell(tree, arguments.format)


if __name__ == "__main__":
    main()
