"""What an operator or an engine does to a store while tasks run, and one disk of two that dies."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

from tests.machine.faults.contents import DEVICE_BLOCKS
from tests.machine.faults.operator import Operator
from tests.machine.faults.resources import SERVE_S, Finding, Scenario, config, in_own_mounts, keys_of, remount, serving
from tests.support import native
from tests.support.looking import new_stats
from transferd import Status

HALF = DEVICE_BLOCKS // 2


async def purged_under_tasks(directory: Path, finding: Finding) -> None:
    async with serving(directory, config(), [], finding) as (_, operator):
        for i in range(4):
            await operator.write(*keys_of(f"before-{i}", DEVICE_BLOCKS))
        began = time.monotonic()
        purge = asyncio.ensure_future(operator.client.purge())
        results = await asyncio.gather(
            *(operator.read([f"before-{i}-0"], [i]) for i in range(4)),
            operator.write([f"during-{i}" for i in range(HALF)], list(range(HALF, DEVICE_BLOCKS))),
        )
        purged = await purge
        finding.seconds = time.monotonic() - began
        finding.told = ["purged", *dict.fromkeys(str(result.status) for result in results)]
        finding.expect(purged.objects >= 8 * DEVICE_BLOCKS, f"purged {purged}")
        odd = [one for one in results if one.status not in (Status.OK, Status.MISS)]
        finding.expect(not odd, f"tasks beside a purge: {odd[:2]}")
        left = await operator.client.match([f"before-{i}-0" for i in range(4)])
        finding.expect(left == 0, f"{left} purged blocks are still there")


async def pinned_store_is_full(directory: Path, finding: Finding) -> None:
    tree = config(file={"path": str(directory / "blocks"), "capacity": "24MiB", "reserve": "0%"})
    tree["engines"] = {"pin_share": 0.5}
    async with serving(directory, tree, [], finding) as (daemon, operator):
        room = await _room(operator)
        pinned = [f"pinned-{i}" for i in range(room // 3)]
        for start in range(0, len(pinned), DEVICE_BLOCKS):
            some = pinned[start : start + DEVICE_BLOCKS]
            await operator.write(some, list(range(len(some))))
            finding.expect(await operator.client.pin(some, 600.0) == len(some), "not all were pinned")
        began = time.monotonic()
        for i in range(2 * room // DEVICE_BLOCKS + 1):
            result = await operator.write(*keys_of(f"more-{i}", DEVICE_BLOCKS))
            finding.expect(result.status is Status.OK, f"a write beside pins: {result}")
        finding.seconds = time.monotonic() - began
        finding.heard(result)
        there = await operator.client.match(pinned)
        finding.expect(there == len(pinned), f"{there} of {len(pinned)} pinned blocks are there")
        finding.expect(daemon.process.poll() is None, "the daemon has ended")


async def _room(operator: Operator) -> int:
    """How many blocks the store holds."""
    await operator.write(["size"], [0])
    storage = (await new_stats(operator.client))["storage"]
    return int(storage["capacity"] / storage["bytes"])


async def one_disk_of_two_dies(directory: Path, finding: Finding) -> None:
    paths = [directory / name for name in ("one", "two")]
    for path in paths:
        path.mkdir()
    mounts = in_own_mounts(" && ".join(f"mount -t tmpfs -o size=64m tmpfs {path}" for path in paths))
    tree = config(file={"path": [str(path) for path in paths], "capacity": "32MiB"})
    async with serving(directory, tree, mounts, finding) as (daemon, operator):
        await operator.write(*keys_of("before", DEVICE_BLOCKS))
        remount(daemon, paths[1], "ro")
        began = time.monotonic()
        written = await operator.write(*keys_of("after", DEVICE_BLOCKS))
        finding.seconds = time.monotonic() - began
        finding.heard(written)
        finding.expect(written.status is Status.OK, f"a write with one disk: {written}")
        loaded = await operator.read(*keys_of("after", DEVICE_BLOCKS))
        finding.expect(loaded.status is Status.OK, f"a read with one disk: {loaded}")
        stats = await new_stats(operator.client)
        names = [one["name"] for one in stats["concerns"] if "disk" in one["name"]]
        finding.told += names
        finding.expect(names == ["disk_failed"], f"concerns: {stats['concerns']}")
        finding.expect(stats["ready"], "not ready with a disk that works")
        remount(daemon, paths[1], "rw")
        while (stats := await new_stats(operator.client))["storage"]["disks_failed"]:
            finding.expect(time.monotonic() - began < SERVE_S + 60.0, "the disk does not return")
            if finding.problems:
                return
            await asyncio.sleep(0.2)
        again = await operator.read(*keys_of("before", DEVICE_BLOCKS))
        finding.expect(again.status is Status.OK, f"what the disk held: {again}")


async def one_member_refuses(directory: Path, finding: Finding) -> None:
    """Member × operation × errno × what a file store does meanwhile (tests/storage/member_faults.py)."""
    program = "from tests.storage.member_faults import main; main()"
    said = await asyncio.to_thread(native.run, program, str(directory), "native", "5", timeout=580)
    report = json.loads(said.splitlines()[-1])
    finding.problems += report["broken"][:10]
    finding.told.append(
        f"{report['cells']} cells, {sum(report['hits'].values())} refusals, {len(report['broken'])} red"
    )


STORE_SCENARIOS = [
    Scenario(
        "one file, folder or the quarantine refuses one call for ever",
        "running, at start, in a purge, a pruning, a scrub, an eviction, a drain, with pins",
        one_member_refuses,
        root=False,
        compiler=True,
        often=False,
        fate="all others are stored, loaded and removed",
    ),
    Scenario("purge of everything while tasks run", "running", purged_under_tasks, root=False),
    Scenario("store a third of which is pinned", "full", pinned_store_is_full, root=False),
    Scenario("one disk of two turns read-only, and returns", "running", one_disk_of_two_dies, often=False),
]
