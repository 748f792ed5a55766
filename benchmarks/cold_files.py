"""Stores and loads that come from the disk and not from the page cache, against fio in the same run.

    python -m benchmarks.cold_files --directory DIR [--objects 504] [--rates 0.5 1 1.5] [--format json]

DIR: on the disk in question. Objects of 2 MiB go through a daemon's write and read tasks, with and without
`storage.file.direct_io`. fio moves as many bytes in as many files by direct I/O, with as many threads as the file
backend has, and from memory in large pages, as staging is. Before each load the page cache drops the files. A store
through the page cache ends when the file system has written it back. CPU is of the whole process. Every byte is
compared after the timed part. Needs fio.

--rates: also measure direct I/O with the disk limited to so many GB/s each way. The cores of a virtual machine often
serve its disk as well, so whatever else they do slows that disk down; a disk at a rate of its own leaves them time.
Needs root and the blkio controller of cgroup v1 (with cgroup v2, run the whole benchmark under `systemd-run --scope
-p "IOReadBandwidthMax=DEVICE RATE" -p "IOWriteBandwidthMax=DEVICE RATE"` instead).
"""

from __future__ import annotations

import argparse
import contextlib
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

import structlog
import uvloop

from tests.support.page_cache import pages_in_memory
from transferd.cli.bench.harness import RUNS, Row, machine, print_report, report, row
from transferd.cli.bench.storage import InProcess, run_task
from transferd.cli.replay.kvdata import KvData
from transferd.config import from_tree
from transferd.daemon.daemon import Daemon
from transferd.storage.file import DIRECT_THREADS
from transferd.tasks import ReadStorageTask, WriteStorageTask
from transferd.tiers.segment import attach_arrays

BLKIO = Path("/sys/fs/cgroup/blkio")
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
    where.mkdir(parents=True)
    for way, into, cpu in (("write", figures.store, figures.store_cpu), ("read", figures.load, figures.load_cpu)):
        command = [
            "fio", "--name=cold", f"--directory={where}", f"--rw={way}", "--bs=2m", "--direct=1", "--ioengine=psync",
            f"--numjobs={DIRECT_THREADS}", f"--nrfiles={objects // DIRECT_THREADS}", "--filesize=2m", "--openfiles=1",
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
    emptied(where)


async def transferd(directory: Path, objects: int, figures: Figures, *, direct_io: bool) -> None:
    """Write and read the objects once, through a daemon of their own."""
    store = directory / "blocks"
    section = {"path": str(store), "capacity": "1TiB", "direct_io": direct_io}
    cache = CACHE | {"device_blocks": objects, "host_blocks": 0}
    tree = {"cache": cache, "storage": {"backend": "file", "file": section}, "metrics": {"listen": ""}}
    transport = InProcess()
    daemon = Daemon(from_tree(tree), transport=transport)
    daemon.default.coordinator.deliver = transport.deliver
    await daemon.open()
    try:
        data = KvData([attach_arrays(daemon.default.cache.handle(b"bench", 0).data)])
        gigabytes = objects * daemon.default.objects.slot_bytes / 1e9
        blocks = list(range(objects))
        for block in blocks:
            data.fill(block, block)
        keys = [str(block) for block in blocks]
        before = time.process_time()
        seconds = await run_task(daemon, transport, 0, WriteStorageTask(task_id="w", keys=keys, gpu_block_ids=blocks))
        figures.store_cpu.append((time.process_time() - before) / gigabytes)
        if not direct_io:
            seconds += written_back(store)
        figures.store.append(gigabytes / seconds)
        dropped(store)
        data.poison(blocks)
        before = time.process_time()
        seconds = await run_task(daemon, transport, 1, ReadStorageTask(task_id="r", keys=keys, gpu_block_ids=blocks))
        figures.load_cpu.append((time.process_time() - before) / gigabytes)
        figures.load.append(gigabytes / seconds)
        assert all(data.verify(block, block) is None for block in blocks), "wrong bytes"
        figures.cached.append(sum(map(pages_in_memory, files(store))) * mmap.PAGESIZE / 2**20)
        del data
    finally:
        await daemon.stop(lambda: 10.0)
        emptied(store)


def emptied(place: Path) -> None:
    """Give the bytes back to the disk. The files stay until the end: ext4 passes over each freed inode for minutes."""
    for path in place.rglob("*"):
        if path.is_file():
            os.truncate(path, 0)


def blkio_group() -> Path:
    """Where this process is in the blkio controller of cgroup v1; a path that does not exist if there is none."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "blkio" in controllers.split(","):
            return BLKIO / path.lstrip("/")
    return BLKIO / "none"


@contextlib.contextmanager
def limited(directory: Path, rate: float) -> Iterator[None]:
    """Limit what this process and its children move to and from the disk of `directory`; rate: GB/s each way."""
    device = os.stat(directory).st_dev
    node = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    disk = node.parent if (node / "partition").exists() else node  # a partition cannot be limited
    home = blkio_group()
    group = home / f"transferd-cold-{os.getpid()}"
    group.mkdir()
    try:
        for way in ("read", "write"):
            (group / f"blkio.throttle.{way}_bps_device").write_text(
                f"{(disk / 'dev').read_text().strip()} {rate * 1e9:.0f}"
            )
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (home / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


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


def rows(ways: dict[str, Figures], objects: int, suffix: str = "") -> list[Row]:
    limit = ways["fio"]
    found = []
    for what in ("store", "load"):
        speeds, cpus = getattr(limit, what), getattr(limit, f"{what}_cpu")
        for name, figures in ways.items():
            found.append(
                row(f"{what}, {name}{suffix}", getattr(figures, what), "GB/s", statistics.median(speeds), "GB/s fio")
            )
        for name, figures in ways.items():
            own = getattr(figures, f"{what}_cpu")
            found.append(row(f"CPU of a {what}, {name}{suffix}", own, "s/GB", statistics.median(cpus), "s/GB fio"))
    for name, figures in ways.items():
        if figures.cached and not suffix:
            held = f"page cache after {objects * 2 / 1024:.3g} GiB, {name}"
            found.append(row(held, figures.cached, "MiB", objects * 2.0, "MiB stored"))
    return found


def measure(place: Path, objects: int, names: tuple[str, ...]) -> dict[str, Figures]:
    """Runs of each way, in rotating order, in directories of their own."""
    ways = {name: Figures() for name in names}
    for run in range(RUNS):
        for name in names[run % len(names) :] + names[: run % len(names)]:
            where = place / f"{run}-{name}"
            if name == "fio":
                fio(where, objects, ways[name])
            else:
                uvloop.run(transferd(where, objects, ways[name], direct_io=name == "direct I/O"))
    return ways


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--objects", type=int, default=504, help=f"blocks of one task; a multiple of {DIRECT_THREADS}")
    parser.add_argument("--rates", type=float, nargs="+", default=[], metavar="GB/S")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    arguments = parser.parse_args()
    if shutil.which("fio") is None:
        sys.exit("fio is not installed")
    if arguments.objects < 1 or arguments.objects % DIRECT_THREADS:
        parser.error(f"--objects: expected a multiple of {DIRECT_THREADS}, fio's threads, got {arguments.objects}")
    if any(not rate > 0 for rate in arguments.rates):
        parser.error(f"--rates: expected GB/s above 0, got {arguments.rates}")
    if arguments.rates and not os.access(blkio_group() / "cgroup.procs", os.W_OK):
        sys.exit(f"--rates needs root and the blkio controller of cgroup v1, and {blkio_group()} cannot be written")
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    before, objects = machine(), arguments.objects
    with tempfile.TemporaryDirectory(prefix="transferd-cold-", dir=arguments.directory) as directory:
        place = Path(directory)
        found = rows(measure(place / "full", objects, ("fio", "direct I/O", "page cache")), objects)
        for rate in arguments.rates:
            with limited(place, rate):
                found += rows(measure(place / f"{rate}", objects, ("fio", "direct I/O")), objects, f", {rate:g} GB/s")
    print_report(report("cold-files", before, found), arguments.format)


if __name__ == "__main__":
    main()
