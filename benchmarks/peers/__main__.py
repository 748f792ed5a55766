"""transferd beside other movers of KV caches, in one run: the same blocks, in turn, bytes compared.

    make bench-peers                       installs the peers under build/peers (about 3 GB), and measures
    python -m benchmarks.peers [--of SET] [--directory DIR] [--rounds N] [--only NAME …] [--format json] [--save]

Each round, every peer of a group fills its 256 blocks of 2 MiB with new bytes, stores them, forgets them, loads them
back and has each byte compared; the next round begins with another peer. Right before each store the driver writes and
truncates as many bytes. ratio: the time of the group's limit over the peer's, in the same round; its median over the
rounds. CPU seconds are of all processes of a peer; those of the kernel's own threads are not in it. A peer that cannot
be installed or does not run is a row that says why. --save writes results/SET.json.

--of peers      all that is above (the default)
--of hicache    storage backends of SGLang (`make sglang-gains` runs it, too)
--of lmcache    L2 backends of LMCache (`make lmcache-gains`)
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
from benchmarks.peers.environments import NIXL, ROOT, fastdeploy, lmcache, own, sglang, vllm
from benchmarks.table import peers as table
from transferd.cli.bench.harness import machine

RESULTS = ROOT / "benchmarks" / "results"
ROUNDS = 5


def program(name: str, *arguments: str) -> tuple[str, ...]:
    return "-m", f"benchmarks.peers.{name}", *arguments


FILES = (
    Peer("LMCache, fs_native", program("lmcache_l2", "fs_native"), lmcache),
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
PLAIN = Peer("plain, one thread", program("plain"), own)
HICACHE = (
    PLAIN,
    Peer("HiCacheFile", program("sglang_pages", "file"), sglang),
    Peer("transferd", program("sglang_pages", "transferd"), sglang, checksum=True),
    Peer("Mooncake, memory by tcp", program("sglang_pages", "mooncake"), sglang),
)
L2 = (
    PLAIN,
    Peer("LMCache, fs", program("lmcache_l2", "fs"), lmcache),
    Peer("LMCache, fs_native", program("lmcache_l2", "fs_native"), lmcache),
    Peer("transferd", program("lmcache_l2", "transferd"), lmcache, checksum=True),
    Peer("transferd, in place", program("lmcache_l2", "transferd-in-place"), lmcache, checksum=True),
)
MIB = 1024**2
SETS = {
    "peers": GROUPS,
    "hicache": (
        Group("512 pages of 64 KiB", HICACHE, blocks=512, block_bytes=MIB // 16),
        Group("256 pages of 256 KiB", HICACHE, blocks=256, block_bytes=MIB // 4),
        Group("128 pages of 1 MiB", HICACHE, blocks=128, block_bytes=MIB),
        Group("48 pages of 4 MiB", HICACHE, blocks=48, block_bytes=4 * MIB),
    ),
    "lmcache": (
        Group("512 objects of 64 KiB", L2, blocks=512, block_bytes=MIB // 16),
        Group("256 objects of 256 KiB", L2, blocks=256, block_bytes=MIB // 4),
        Group("128 objects of 1 MiB", L2, blocks=128, block_bytes=MIB),
        Group("48 objects of 4 MiB", L2, blocks=48, block_bytes=4 * MIB),
        Group("48 objects of 4 MiB, past the page cache", L2, direct=True, blocks=48, block_bytes=4 * MIB),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="on the disk in question")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--blocks", type=int, help="instead of a group's own number")
    parser.add_argument("--of", choices=SETS, default="peers", help="which groups (see above)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="parts of names of peers, besides the limits")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--save", action="store_true", help="write results/SET.json, for benchmarks/table.py")
    asked = parser.parse_args()
    before, rows = machine(), []
    with tempfile.TemporaryDirectory(prefix="bench-peers-", dir=asked.directory) as place:
        for number, group in enumerate(SETS[asked.of]):
            peers = [
                peer
                for index, peer in enumerate(group.peers)
                if not index or not asked.only or any(part.lower() in peer.name.lower() for part in asked.only)
            ]
            blocks = asked.blocks or group.blocks
            chosen, where = dataclasses.replace(group, peers=peers), Path(place, str(number))
            where.mkdir()
            found = driver.run(chosen, where, asked.rounds, blocks, group.block_bytes, told)
            rows += driver.rows(chosen, found, blocks * group.block_bytes)
    tree: dict[str, Any] = {
        "bench": "peers",
        "machine": before | {"load_1min_after": os.getloadavg()[0]},
        "rounds": asked.rounds,
        "rows": rows,
    }
    if asked.of == "peers":  # the groups of other sets have sizes of their own, in their names
        tree |= {"blocks": asked.blocks or GROUPS[0].blocks, "block_bytes": GROUPS[0].block_bytes}
    text = json.dumps(tree, indent=1)
    if asked.save:
        (RESULTS / f"{asked.of}.json").write_text(text + "\n", encoding="utf-8")
    print(text if asked.format == "json" else table(tree))


def told(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
