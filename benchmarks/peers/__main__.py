"""transferd beside other movers of KV caches, in one run: the same blocks, in turn, bytes compared.

    make bench-peers                       installs the peers under build/peers (about 3 GB), and measures
    python -m benchmarks.peers [--directory DIR] [--rounds N] [--only NAME …] [--format json] [--save]

Each round, every peer of a group fills its 256 blocks of 2 MiB with new bytes, stores them, forgets them, loads them
back and has each byte compared; the next round begins with another peer. Right before each store the driver writes and
truncates as many bytes. ratio: the time of the group's limit over the peer's, in the same round; its median over the
rounds. CPU seconds are of all processes of a peer; those of the kernel's own threads are not in it. A peer that cannot
be installed or does not run is a row that says why. --save writes results/peers.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.peers import driver
from benchmarks.peers.driver import Group, Peer
from benchmarks.peers.environments import NIXL, ROOT, fastdeploy, lmcache, own, vllm
from benchmarks.table import peers as table
from transferd.cli.bench.harness import machine

RESULT = ROOT / "benchmarks" / "results" / "peers.json"
BLOCKS, BLOCK_BYTES = 256, 2 * 1024**2
ROUNDS = 5


def program(name: str, *arguments: str) -> tuple[str, ...]:
    return "-m", f"benchmarks.peers.{name}", *arguments


FILES = (
    Peer("LMCache, fs_native", program("lmcache_fs"), lmcache),
    Peer("vLLM, fs tier", program("vllm_fs"), vllm),
    Peer("NIXL, POSIX", program("nixl_posix"), NIXL.python),
)
OURS = (
    Peer("transferd", program("transferd_daemon", "files"), own, checksum=True),
    Peer("transferd, full store", program("transferd_daemon", "full"), own, checksum=True, keeps=True),
)
GROUPS = (
    Group("files, page cache", (Peer("plain, one thread", program("plain"), own), *OURS, *FILES)),
    Group("files, direct I/O", (Peer("plain, one thread", program("plain"), own), *OURS, *FILES), direct=True),
    Group(
        "memory of another process",
        (
            Peer("memcpy, one thread, one process", program("memcpy"), own),
            Peer("transferd, swap to the host pool", program("transferd_daemon", "memory"), own),
            Peer("LMCache, server", program("lmcache_server"), lmcache),
        ),
    ),
    Group(
        "one task, apart from its bytes",
        (
            Peer("bare ZeroMQ echo", program("transferd_tasks", "echo"), own),
            Peer("transferd, swap of one block", program("transferd_tasks", "swap"), own),
            Peer("FastDeploy, cache queue alone", program("fastdeploy_queue"), fastdeploy),
        ),
        calls=200,
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="on the disk in question")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="parts of names of peers, besides the limits")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--save", action="store_true", help="write results/peers.json, for benchmarks/table.py")
    asked = parser.parse_args()
    before, rows = machine(), []
    with tempfile.TemporaryDirectory(prefix="bench-peers-", dir=asked.directory) as place:
        for number, group in enumerate(GROUPS):
            peers = [
                peer
                for index, peer in enumerate(group.peers)
                if not index or not asked.only or any(part.lower() in peer.name.lower() for part in asked.only)
            ]
            chosen, where = dataclasses.replace(group, peers=peers), Path(place, str(number))
            where.mkdir()
            found = driver.run(chosen, where, asked.rounds, asked.blocks, BLOCK_BYTES, told)
            rows += driver.rows(chosen, found, asked.blocks * BLOCK_BYTES)
    tree: dict[str, Any] = {
        "bench": "peers",
        "machine": before | {"load_1min_after": os.getloadavg()[0]},
        "blocks": asked.blocks,
        "block_bytes": BLOCK_BYTES,
        "rounds": asked.rounds,
        "rows": rows,
    }
    text = json.dumps(tree, indent=1)
    if asked.save:
        RESULT.write_text(text + "\n", encoding="utf-8")
    print(text if asked.format == "json" else table(tree))


def told(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
