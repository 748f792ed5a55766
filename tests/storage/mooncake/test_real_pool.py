"""What only a real pool shows: its master and its clients are processes here, and are killed, frozen and restarted."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.storage.harness import Harness, Open, mooncake_config, pool_storage
from tests.support.freezing import freeze, thaw
from transferd.cli.pool.local import Lender, Master, wait_until
from transferd.cli.pool.master import master_executable
from transferd.config import MooncakeStorageSection
from transferd.errors import RequestError, StorageUnavailable
from transferd.runtime.compat import timeout
from transferd.storage.base import FOUND, MISSING, STORED, Found, Outcome, Storage
from transferd.storage.selection import Selection
from transferd.wire.answers import Purged

pytestmark = [
    pytest.mark.skipif(master_executable() is None, reason="mooncake-transfer-engine is not installed"),
    pytest.mark.one_loop,
]
MIB = 1024**2


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    with Master(tmp_path / "master.log", lease_ttl="100ms") as running:
        yield running


def config(master: Master, **more: Any) -> MooncakeStorageSection:
    """timeout: so long that a machine with other things to do does not open the breaker."""
    return mooncake_config(master.address, **{"timeout": 10.0, "probe_interval": 0.2} | more)


async def test_a_killed_master_is_noticed_fails_fast_and_a_restarted_one_is_used_again(
    master: Master, open_storage: Open
) -> None:
    harness = await open_storage(pool_storage(config(master)))
    await harness.put(("before", b"x" * 1000))
    master.stop()
    with pytest.raises(StorageUnavailable):
        await harness.get(("before", 1000))
    for _ in range(50):  # without a breaker each of these would block for seconds
        with pytest.raises(StorageUnavailable, match="until a background probe succeeds"):
            await harness.storage.exists(["before"])
    assert harness.storage.statistics()["breaker"] in ("open", "half_open")
    master.start()
    await until_closed(harness.storage)
    assert await harness.storage.exists(["before"]) == [False], "a restarted master has forgotten everything"
    async with timeout(30):
        while (await harness.put(("after", b"y" * 1000)))[0].found is not Found.STORED:  # noqa: ASYNC110 - as below
            await asyncio.sleep(0.1)  # the segment is mounted again about a second later
    assert await get_within_lease(harness, ("after", 1000)) == [(FOUND, b"y" * 1000)]


async def test_a_purge_for_all_nodes_removes_what_fits_and_nothing_else(master: Master, open_storage: Open) -> None:
    pages = f"127.0.0.1:{master.metrics_port}"
    one, other = [await open_storage(pool_storage(config(master, master_pages=pages))) for _ in range(2)]
    names = [f"{model}/f/g/{key:040x}/0" for model in ("m", "n") for key in range(3)]
    assert await one.put(*((name, name.encode()) for name in [*names, "foreign"])) == [STORED] * 7
    assert await one.storage.purge_shared(Selection(model="x")) == Purged()
    with pytest.raises(RequestError, match="does not know how long"):
        await one.storage.purge_shared(Selection(unused_s=1.0))
    would = await one.storage.purge_shared(Selection(frozenset(names[:2])), dry_run=True)
    assert await other.storage.exists(names) == [True] * 6
    assert await one.storage.purge_shared(Selection(frozenset(names[:2]))) == would == Purged(2, 2 * len(names[0]))
    assert await other.storage.exists(names) == [False, False, True, True, True, True]
    assert (await one.storage.purge_shared(Selection(model="n"))).objects == 3
    assert (await one.storage.purge_shared(Selection())).objects == 1
    assert await other.storage.exists([*names, "foreign"]) == [False] * 6 + [True], "it has no name of ours"


async def test_a_frozen_master_opens_the_breaker_while_the_call_still_hangs(master: Master, open_storage: Open) -> None:
    harness = await open_storage(pool_storage(config(master, timeout=1.0)))
    freeze(master.pid)
    hanging = asyncio.ensure_future(harness.storage.exists(["x"]))
    async with timeout(60):
        while harness.storage.statistics()["breaker"] == "closed":  # noqa: ASYNC110 - as below
            await asyncio.sleep(0.01)
    with pytest.raises(StorageUnavailable):
        await harness.storage.exists(["y"])
    thaw(master.pid)
    async with timeout(60):
        await asyncio.wait([hanging])
    hanging.exception()
    await until_closed(harness.storage)


async def test_a_full_pool_makes_room_and_a_pinned_one_and_a_small_one_are_full(
    master: Master, open_storage: Open
) -> None:
    harness = await open_storage(pool_storage(config(master, global_segment_size=16 * MIB)))
    [outcome] = await harness.put(("too large", bytes(17 * MIB)))
    assert outcome.error is not None
    assert outcome.error.reason == "storage_full"
    async with timeout(60):
        for i in range(40):
            harness.reuse_memory()
            while await harness.put((f"loose {i}", bytes([i]) * MIB)) != [STORED]:
                harness.reuse_memory()
                await asyncio.sleep(0.02)  # what was stored just now is leased, all of it
    found: list[tuple[Outcome, bytes]] = []
    async with timeout(60):
        while not found or any(outcome == MISSING for outcome, _ in found):  # the full pool evicts what has no lease
            left = await harness.storage.exists([f"loose {i}" for i in range(40)])
            assert 0 < sum(left) <= 16, "others made room"
            harness.reuse_memory()
            found = await get_within_lease(harness, *((f"loose {i}", MIB) for i in range(40) if left[i]))
    assert found == [(FOUND, bytes([i]) * MIB) for i in range(40) if left[i]]

    pinning = await open_storage(pool_storage(config(master, global_segment_size=0, hard_pin=True)))
    outcomes = []
    for i in range(17):
        pinning.reuse_memory()
        outcomes += await pinning.put((f"pinned {i}", bytes([i]) * MIB))
    full = [outcome for outcome in outcomes if outcome != STORED]
    assert full
    assert {outcome.error.reason for outcome in full if outcome.error} == {"storage_full"}
    there = [outcome == STORED for outcome in outcomes]
    assert await pinning.storage.exists([f"pinned {i}" for i in range(17)]) == there, "and none was pushed out"
    assert pinning.storage.statistics()["breaker"] == "closed", "a full pool answers"


async def test_a_large_object_finds_room_where_the_oldest_objects_are_small(
    master: Master, open_storage: Open, tmp_path: Path
) -> None:
    """Each refused put has the master evict a twentieth of its objects, and here that is not enough bytes for one.

    The length is one of which the allocator loses a ninth, so the pool never looks full enough to evict by itself.
    """
    nbytes = 256 * 1024 + 128
    with Lender(master, 16 * MIB, tmp_path / "lender.log"):
        harness = await open_storage(pool_storage(config(master, global_segment_size=0)))
        for first in range(0, 1000, 100):
            await harness.put(*((f"small {i}", bytes(2176)) for i in range(first, first + 100)))
        for i in range(60):
            harness.reuse_memory()
            assert await harness.put((f"large {i}", bytes([i]) * nbytes)) == [STORED]
        assert await get_within_lease(harness, ("large 59", nbytes)) == [(FOUND, bytes([59]) * nbytes)]
        assert harness.storage.statistics()["waited_for_room"] > 20, "or this test shows nothing"


async def test_a_put_that_its_client_died_in_is_never_seen_and_the_next_one_takes_over(
    master: Master, open_storage: Open, tmp_path: Path
) -> None:
    """The writer is killed while the memory it writes to stands still, so its put is begun and not ended."""
    with Lender(master, 32 * MIB, tmp_path / "lender.log") as lender:
        harness = await open_storage(pool_storage(config(master, global_segment_size=0)))
        size = 8 * MIB
        writer = start_writer(master.address, "contested", str(size))
        assert writer.stdin is not None
        assert writer.stdout is not None
        with writer:
            try:
                assert writer.stdout.readline() == b"ready\n"
                begun = put_starts(master)
                freeze(lender.pid)
                writer.stdin.write(b"go\n")
                writer.stdin.flush()
                assert await asyncio.to_thread(wait_until, lambda: put_starts(master) > begun)
                assert await harness.storage.exists(["contested"]) == [False]
            finally:
                writer.kill()
        thaw(lender.pid)
        [(outcome, _)] = await harness.get(("contested", size))
        assert outcome == MISSING, "half an object is none"
        harness.reuse_memory()
        assert await harness.put(("contested", b"\x5a" * size)) == [STORED]
        harness.reuse_memory()
        assert await get_within_lease(harness, ("contested", size)) == [(FOUND, b"\x5a" * size)]
        statistics = harness.storage.statistics()
        assert (statistics["contested"], statistics["taken_over"]) == (1, 1)


async def get_within_lease(harness: Harness, *wanted: tuple[str, int]) -> list[tuple[Outcome, bytes]]:
    """Get again what a busy machine read for longer than the pool's lease of 100 ms: the storage says that it did."""
    async with timeout(60):
        while True:
            harness.reuse_memory()
            found = await harness.get(*wanted)
            if not any("LEASE_EXPIRED" in str(outcome.error) for outcome, _ in found):
                return found


def start_writer(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, Path(__file__).with_name("writer.py"), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def put_starts(master: Master) -> int:
    return sum(master.counter(f"master_{kind}_start_requests_total") for kind in ("put", "batch_put"))


async def until_closed(storage: Storage) -> None:
    async with timeout(60):
        while storage.statistics()["breaker"] != "closed":  # noqa: ASYNC110 - a breaker tells nobody
            await asyncio.sleep(0.05)
