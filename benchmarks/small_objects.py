"""What small objects cost the file backend, beside the system calls of one file each, and of one file for all.

    python -m benchmarks.small_objects [--directory DIR] [--format json]

A daemon in a process of its own stores 1024 objects of each size in one task and loads them back in another. Its
store is full, so each object is written over the file of one that leaves. Beside it, one thread makes the same calls on
files of its own: rename, open, write, close, rename; and open, read, close. Then it writes and reads the same bytes in
one file: what a format without a file for each object could save. Everything is in the page cache. Every byte is
compared after the timed part.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from transferd import ReadStorageTask, Status, SyncClient, WriteStorageTask
from transferd.blocks.formats import FOOTER_BYTES
from transferd.cli.bench.harness import RUNS, Row, machine, print_report, report, row, timed
from transferd.cli.bench.subject import counted_in_files
from transferd.client.launch import running

KIB = (4, 16, 64, 256, 1024)  # sizes of objects
OBJECTS = 1024
DIRECTORIES = 256  # that raw files lie in, as those of the backend do
WARM_UP = 2  # runs before the first that counts: the store fills up

Figures = dict[str, list[float]]


class Daemon:
    """One whose objects have this size."""

    def __init__(self, client: SyncClient, nbytes: int) -> None:
        self._client = client
        self._blocks = [
            layer.reshape(OBJECTS, -1).view(np.uint8) for layers in client.attach(0).values() for layer in layers
        ]
        assert sum(part.shape[1] for part in self._blocks) == nbytes
        self._numbers = itertools.count()

    def run(self, figures: Figures) -> None:
        number = next(self._numbers)
        keys, ids = [f"{number}-{i}" for i in range(OBJECTS)], list(range(OBJECTS))
        wanted = [np.random.default_rng((number, part)).bytes(area.nbytes) for part, area in enumerate(self._blocks)]
        for area, content in zip(self._blocks, wanted, strict=True):
            area.reshape(-1)[:] = np.frombuffer(content, np.uint8)
        store = WriteStorageTask(task_id=f"w{number}", keys=keys, gpu_block_ids=ids)
        figures["store"].append(timed(lambda: self._ok(store)))
        for area in self._blocks:
            area[:] = 0xA5
        load = ReadStorageTask(task_id=f"r{number}", keys=keys, gpu_block_ids=ids)
        figures["load"].append(timed(lambda: self._ok(load)))
        assert all(area.tobytes() == content for area, content in zip(self._blocks, wanted, strict=True)), "wrong bytes"

    def _ok(self, task: WriteStorageTask | ReadStorageTask) -> None:
        result = self._client.submit(task)
        if result.status is not Status.OK:
            raise OSError(f"a task ended badly: {result}")


class Raw:
    """System calls of one thread, on objects of this size."""

    def __init__(self, directory: Path, nbytes: int) -> None:
        self._objects = [os.urandom(nbytes + FOOTER_BYTES) for _ in range(8)]
        self._room = nbytes + 4096  # of an object in the one file: blocks of the file system
        self._directories = [directory / f"{i:02x}" for i in range(DIRECTORIES)]
        for path in self._directories:
            path.mkdir(parents=True)
        self._paths = [f"{self._directories[i % DIRECTORIES]}/0-{i}" for i in range(OBJECTS)]
        for i, file in enumerate(self._paths):
            Path(file).write_bytes(self._content(i))
        self._one = os.open(directory / "one", os.O_RDWR | os.O_CREAT, 0o600)
        self._target = np.zeros((OBJECTS, nbytes + FOOTER_BYTES), np.uint8)
        self._numbers = itertools.count(1)

    def close(self) -> None:
        os.close(self._one)

    def run(self, figures: Figures) -> None:
        figures["store, a file each"].append(timed(self._write_over))
        figures["load, a file each"].append(self._loaded(self._read_each))
        figures["store, one file"].append(timed(self._write_in_one))
        figures["load, one file"].append(self._loaded(self._read_from_one))

    def _content(self, i: int) -> bytes:
        return self._objects[i % len(self._objects)]

    def _loaded(self, load: Callable[[], None]) -> float:
        self._target[:] = 0xA5
        seconds = timed(load)
        assert all(self._target[i].tobytes() == self._content(i) for i in range(OBJECTS)), "wrong bytes"
        return seconds

    def _write_over(self) -> None:
        number, paths = next(self._numbers), self._paths
        for i, old in enumerate(paths):
            new = f"{self._directories[(i + number) % DIRECTORIES]}/{number}-{i}"
            os.rename(old, f"{new}~")
            fd = os.open(f"{new}~", os.O_WRONLY)
            os.pwrite(fd, self._content(i), 0)
            os.close(fd)
            os.rename(f"{new}~", new)
            paths[i] = new

    def _read_each(self) -> None:
        for path, target in zip(self._paths, self._target, strict=True):
            fd = os.open(path, os.O_RDONLY)
            os.preadv(fd, [target.data], 0)
            os.close(fd)

    def _write_in_one(self) -> None:
        for i in range(OBJECTS):
            os.pwrite(self._one, self._content(i), i * self._room)

    def _read_from_one(self) -> None:
        for i, target in enumerate(self._target):
            os.preadv(self._one, [target.data], i * self._room)


def measure(kib: int, directory: Path) -> list[Row]:
    nbytes = kib * 1024
    cache = {"ranks": 1, "layers": 1, "kv_heads": 1, "head_dim": nbytes // 256, "block_size": 64}
    capacity = (OBJECTS + OBJECTS // 16) * counted_in_files(directory, nbytes + FOOTER_BYTES)
    tree: dict[str, Any] = {
        "cache": cache | {"device_blocks": OBJECTS, "host_blocks": 0},
        "storage": {"backend": "file", "file": {"path": str(directory / "store"), "capacity": capacity}},
    }
    figures: Figures = defaultdict(list)
    with running(tree, directory, name="small") as daemon, SyncClient(daemon.endpoint) as client:
        ours, raw = Daemon(client, nbytes), Raw(directory / "raw", nbytes)
        for _ in range(WARM_UP + RUNS):
            ours.run(figures)
            raw.run(figures)
        raw.close()
    rows = []
    for what in ("store", "load"):
        us = {name: [one / OBJECTS * 1e6 for one in times[WARM_UP:]] for name, times in figures.items()}
        limit = statistics.median(us[f"{what}, a file each"])
        for name, title in ((what, f"{what}, {kib} KiB"), (f"{what}, one file", f"{what}, {kib} KiB, raw, one file")):
            rows.append(row(title, us[name], "us/object", limit, "us raw, a file each"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="on the disk in question")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    arguments = parser.parse_args()
    before, rows = machine(), []
    with tempfile.TemporaryDirectory(prefix="transferd-small-", dir=arguments.directory) as place:
        for kib in KIB:  # nothing is removed before the end: ext4 passes over freed inodes for minutes
            (where := Path(place) / str(kib)).mkdir()
            rows += measure(kib, where)
    print_report(report("small-objects", before, rows), arguments.format)


if __name__ == "__main__":
    main()
