"""Memory that goes in other ways: holes, a successor's truncation, broken pages, and the daemon's own segments.

As in test_memory.py, daemon and engines are processes of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.caches import attach, fill, snapshot, wipe
from tests.integration.test_handover import BLOCK, TOKENS, pair
from tests.integration.test_token_storage import install_sdk
from tests.integration.test_token_storage import read as read_path
from tests.integration.test_token_storage import tree as token_tree
from tests.integration.test_token_storage import write as write_path
from tests.machine.hostile import broken_page
from tests.machine.hostile.test_memory import (
    ALICE,
    BLOCKS,
    BOB,
    MEMORY,
    PAGE,
    SHM,
    World,
    made_world,
    pytestmark,
    stored,
    world,
)
from tests.support.waits import until
from transferd import Client, HandoverFailed, ReadStorageTask, Status, WriteStorageTask
from transferd.cli.pool.master import master_executable
from transferd.client.launch import DaemonProcess, running
from transferd.errors import RequestError
from transferd.runtime.compat import wait_for

__all__ = ["pytestmark", "stored", "world"]  # fixtures, and why these tests may be skipped

EVERYTHING = list(range(BLOCKS))
WITHIN_S = 60.0


# --- what an engine does to its own -----------------------------------------------------------------


def test_holes_are_zeros_and_cost_nobody_a_task(stored: World) -> None:
    """A sealed memfd may have holes punched, too. Whoever touches such a page gets a new one."""
    good = stored.engine(BOB, "good")
    mine = good.make("")
    good.paint("", 7)
    assert good.offer(mine) == "ok"
    for kind in ("name", "descriptor"):
        bad = stored.engine(ALICE, f"bad-{kind}")
        name = stored.name() if kind == "name" else ""
        fd = bad.make(name)
        assert bad.offer(name or fd) == "ok"
        bad.paint(name, 5)
        assert bad.write(f"k-{kind}", EVERYTHING)[:2] == ["ok", BLOCKS]
        for round_ in range(3):
            key = f"{kind}{round_}"
            assert bad.punch(name) == "ok"
            assert bad.write(f"z-{key}", [0, 1])[:2] == ["ok", 2], "zeros are bytes like others"
            assert bad.punch(name) == "ok"
            assert bad.read(f"k-{kind}", [2, 3])[:2] == ["ok", 2]
            assert bad.read(f"z-{key}", [4, 5])[:2] == ["ok", 2]
            assert [bad.colours(name, block) for block in (2, 3, 4, 5, 6)] == [[5], [5], [0], [0], [0]]
            assert good.write(f"g-{key}", [0, 1])[:2] == ["ok", 2]
        bad.end()
    assert good.read("g-name0", [2, 3])[:2] == ["ok", 2]
    assert good.colours("", 2) == [7]
    assert stored.alive


def test_a_hole_that_cannot_be_filled_costs_its_engine_its_tasks() -> None:
    """/dev/shm is full: the page that the daemon touches cannot be made. In a mount namespace of this test."""
    command = (
        f"mount -t tmpfs -o size=10m none /dev/shm && exec {sys.executable} -m tests.machine.hostile.test_lost_memory"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run(["unshare", "-m", "sh", "-c", command], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def full() -> None:
    with made_world(MEMORY) as world:
        bad, good = world.engine(ALICE, "bad"), world.engine(ALICE, "good")
        name, mine = world.name(), good.make("")
        bad.make(name)
        assert (bad.offer(name), good.offer(mine)) == ("ok", "ok")
        assert bad.write("k", EVERYTHING)[:2] == ["ok", BLOCKS]
        assert bad.punch(name) == "ok"
        with open(SHM / world.name(), "wb") as filler:
            room = os.statvfs(SHM)
            os.posix_fallocate(filler.fileno(), 0, room.f_bavail * room.f_frsize)
            for task in (bad.read("k", EVERYTHING), bad.write("x", EVERYTHING)):
                assert task[2] == "device_lost", task
            assert bad.offer(name, False, 0, True).startswith("memory_unusable")
            assert good.write("g", [0, 1])[:2] == ["ok", 2]
        os.unlink(SHM / world.names[-1])
        assert bad.offer(name) == "ok"
        assert bad.read("k", EVERYTHING)[:2] == ["ok", BLOCKS]
        assert world.alive


def test_a_successor_takes_the_file_of_an_engine_that_was_killed(stored: World) -> None:
    """The predecessor is killed with loads under way; its successor opens the same name at once, and empties it."""
    good = stored.engine(BOB, "good")
    mine = good.make("")
    good.paint("", 9)
    assert good.offer(mine) == "ok"
    name = stored.name()
    for life, deed in enumerate(("smaller", "to nothing and back", "a new file")):
        old = stored.engine(ALICE, f"e{life}")
        old.make(name)
        old.paint(name, life + 1)
        assert old.offer(name) == "ok"
        assert old.write(f"k{life}", EVERYTHING)[:2] == ["ok", BLOCKS]
        assert old.process.stdin is not None
        for turn in range(8):
            old.process.stdin.write(json.dumps(["read" if turn % 2 else "write", f"k{life}", EVERYTHING]) + "\n")
        old.process.stdin.flush()
        assert old.process.stdout is not None
        old.process.stdout.readline()  # the first has ended, and others follow
        os.kill(old.process.pid, signal.SIGKILL)
        if deed == "a new file":
            os.unlink(SHM / name)
        else:
            os.truncate(SHM / name, 0 if deed == "to nothing and back" else PAGE + 4096)
        new = stored.engine(ALICE, f"e{life}-next")
        new.make(name)  # as long as before
        assert new.offer(name) == "ok"
        assert new.read(f"k{life}", EVERYTHING)[:2] == ["ok", BLOCKS]
        assert new.colours(name, 0) == new.colours(name, BLOCKS - 1) == [life + 1]
        assert good.write(f"g{life}", [0, 1])[:2] == ["ok", 2]
        new.end()
        os.unlink(SHM / name)
    assert good.read("g0", [2])[:2] == ["ok", 1]
    assert good.colours("", 2) == [9]
    assert stored.alive


@pytest.fixture
def breakable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Daemons that start now have pages that can be broken."""
    if why := broken_page.obstacle():
        pytest.skip(f"this kernel cannot mark a page as broken: {why}")
    broken_page.opened_at_start(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")


@pytest.mark.usefixtures("breakable")  # before `stored`, which starts the daemon
@pytest.mark.parametrize(
    ("stored", "first"),
    [*itertools.product(("memory", "file", "file, direct"), ("read", "write")), ("memory", "nothing")],
    indirect=["stored"],
)
def test_a_broken_page_costs_its_engine_its_tasks(stored: World, first: str) -> None:
    """Broken hardware below the memory of one engine, as the daemon sees it. The rest of that memory is in use."""
    bad, good = stored.engine(ALICE, "bad"), stored.engine(BOB, "good")
    name, mine = stored.name(), good.make("")
    bad.make(name)
    good.paint("", 7)
    assert (bad.offer(name), good.offer(mine)) == ("ok", "ok")
    bad.paint(name, 5)
    assert bad.write("k", EVERYTHING)[:2] == ["ok", BLOCKS]
    with open(SHM / name, "r+b") as memory:
        broken_page.break_page(stored.daemon.pid, name, memory.fileno(), 3 * PAGE + 4096)
    tasks = {"read": ("read", "write"), "write": ("write", "read"), "nothing": ()}[first]
    results = [bad.read("k", EVERYTHING) if task == "read" else bad.write("x", EVERYTHING) for task in tasks]
    assert not results or results[0][2] == "device_lost", results
    # The page is broken in the daemon's old mapping only. The client repeats its offer with the next Welcome, and the
    # daemon maps the memory anew: the second task may come after that, and then moves all its blocks.
    assert all(code == "device_lost" or moved == ["ok", BLOCKS] for *moved, code, _ in results[1:]), results
    assert good.write("g", [0, 1])[:2] == ["ok", 2]
    assert good.read("g", [4, 5])[:2] == ["ok", 2]
    assert good.colours("", 4) == [7]
    bad.renew(name)
    assert bad.offer(name) == "ok", "other memory, where nothing is broken"
    assert bad.read("k", EVERYTHING)[:2] == ["ok", BLOCKS]
    assert [bad.colours(name, block) for block in EVERYTHING] == [[5]] * BLOCKS
    assert stored.alive


def test_a_page_that_the_kernel_declares_broken_costs_its_engine_its_tasks(stored: World) -> None:
    """The same by MADV_HWPOISON, which most kernels are built without."""
    bad, good = stored.engine(0, "bad"), stored.engine(BOB, "good")
    name, mine = stored.name(), good.make("")
    bad.make(name)
    assert (bad.offer(name), good.offer(mine)) == ("ok", "ok")
    assert bad.write("k", EVERYTHING)[:2] == ["ok", BLOCKS]
    poisoned = bad.poison(name, 3)
    if poisoned != "ok":
        pytest.skip(f"this kernel cannot declare a page broken (CONFIG_MEMORY_FAILURE): {poisoned}")
    for task in (bad.read("k", EVERYTHING), bad.write("x", EVERYTHING)):
        assert task[2] == "device_lost", task
    assert good.write("g", [0, 1])[:2] == ["ok", 2]
    assert stored.alive


# --- the daemon's own memory ------------------------------------------------------------------------

LONGEST_FILE = 1024**2  # half of a rank's memory; the log, which says more on a busy machine, takes far less
SHAPE = {"ranks": 2, "layers": 2, "kv_heads": 2, "head_dim": 64, "block_size": 256, "device_blocks": 8}


@pytest.fixture(params=["memory", "file"])
def own(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """A world whose daemon makes the memory of an engine of its own."""
    file = {"backend": "file", "file": {"path": str(tmp_path / "store"), "capacity": "1GiB"}}
    storage = MEMORY if request.param == "memory" else file
    with made_world(storage, cache=SHAPE | {"host_blocks": 2, "device": "shm", "ownership": "create"}) as made:
        yield made


def segments(daemon: DaemonProcess) -> list[str]:
    """The daemon's named memory, as anybody sees it."""
    maps = Path(f"/proc/{daemon.process.pid}/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[-1] for line in maps if "/dev/shm/transferd.rank" in line}
    return sorted(path for path in paths if not path.endswith("(deleted)"))


@pytest.mark.one_loop
@pytest.mark.parametrize(
    ("own", "left"), [("memory", 0), ("memory", 4096), ("memory", 300_000), ("file", 4096)], indirect=["own"]
)
async def test_the_daemons_own_memory_that_a_client_truncates_is_made_anew(own: World, left: int) -> None:
    good = await asyncio.to_thread(own.engine, BOB, "good")
    assert good.offer(good.make("")) == "ok"
    async with Client(own.endpoint, connect_timeout=WITHIN_S) as client:
        anew = asyncio.Event()
        client.on_new_boot = anew.set
        caches, boot, blocks = await attach(client), client.boot_id, list(range(8))
        fill(caches, blocks, seed=1)
        before, keys = snapshot(caches, blocks), [f"k{number}" for number in blocks]
        done = await client.submit(WriteStorageTask(task_id="w", keys=keys, gpu_block_ids=blocks))
        assert done.status is Status.OK
        for life in range(3):
            paths = segments(own.daemon)
            assert len(paths) == 2
            anew.clear()
            os.truncate(paths[life % 2], left)
            for turn in range(2):
                kind = ReadStorageTask if turn == 0 else WriteStorageTask
                lost = await client.submit(kind(task_id=f"l{life}{turn}", keys=keys, gpu_block_ids=blocks, timeout=20))
                assert lost.error is not None
                assert lost.error.code in ("device_lost", "not_attached"), lost
                assert not lost.block_ids, lost
            assert good.write(f"g{life}", [0, 1])[:2] == ["ok", 2], "another engine notices nothing"
            await wait_for(anew.wait(), WITHIN_S)
            made = await client.reattach(WITHIN_S)
            caches = [made[rank] for rank in range(2)]
            wipe(caches, blocks)
            again = await client.submit(ReadStorageTask(task_id=f"r{life}", keys=keys, gpu_block_ids=blocks))
            assert (again.status, again.block_ids) == (Status.OK, blocks)
            assert snapshot(caches, blocks) == before
            assert not set(paths) & set(segments(own.daemon)), "the old memory is gone"
        report = await client.stats()
        assert (client.boot_id, client.generation, report["ready"]) == (boot, "", True)
    assert own.alive


@contextlib.asynccontextmanager
async def without_room(own: World) -> AsyncIterator[tuple[Client, Callable[[], None]]]:
    """An engine whose memory was lost and cannot be made again, and a function that makes room."""
    async with Client(own.endpoint, connect_timeout=WITHIN_S) as client:
        client.on_new_boot = lambda: None
        caches, paths = await attach(client), segments(own.daemon)
        fill(caches, [1], seed=1)
        task = WriteStorageTask(task_id="w", keys=["k"], gpu_block_ids=[1])
        assert (await client.submit(task)).status is Status.OK
        pid = own.daemon.process.pid
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (LONGEST_FILE, resource.RLIM_INFINITY))
        os.truncate(paths[0], 0)
        await client.submit(ReadStorageTask(task_id="r", keys=["k"], gpu_block_ids=[2]))
        await until(lambda: "cannot be made again" in own.daemon.log, "it says so", within=WITHIN_S)
        assert not (await client.stats())["ready"]
        yield client, lambda: resource.prlimit(pid, resource.RLIMIT_FSIZE, before) and None
    assert own.alive


@pytest.mark.one_loop
async def test_lost_memory_that_cannot_be_made_again_is_made_when_there_is_room(own: World) -> None:
    async with without_room(own) as (client, make_room):
        make_room()
        await client.reattach(WITHIN_S)
        found = await client.submit(ReadStorageTask(task_id="again", keys=["k"], gpu_block_ids=[2]))
        assert (found.status, found.block_ids) == (Status.OK, [2])


@pytest.mark.one_loop
async def test_a_clear_while_memory_is_lost_closes_the_generation_and_the_cache_stays_cleared(own: World) -> None:
    """An engine that clears its cache has new weights next, whatever state the daemon's memory is in."""
    async with without_room(own) as (client, make_room):
        await client.clear_cache()
        make_room()
        with pytest.raises(RequestError, match="ended with a clear"):
            await client.restore_cache("")
        await client.restore_cache("new weights")
        await client.reattach(WITHIN_S)
        gone = await client.submit(ReadStorageTask(task_id="again", keys=["k"], gpu_block_ids=[2]))
        assert gone.status is Status.MISS


# --- the other ways of a block ----------------------------------------------------------------------


@pytest.mark.one_loop
@pytest.mark.skipif(master_executable() is None, reason="mooncake-transfer-engine is not installed")
@pytest.mark.parametrize("side", ["sender", "receiver"])
async def test_a_direct_handover_over_memory_that_vanishes_fails_and_both_daemons_live(
    tmp_path: Path, side: str
) -> None:
    blocks = [1, 2, 3, 4, 5, 6]
    async with pair("direct", None, tmp_path) as (prefill, decode):
        lost, other = (prefill, decode) if side == "sender" else (decode, prefill)
        anew = asyncio.Event()
        lost.client.on_new_boot, other.client.on_new_boot = anew.set, lambda: None
        os.truncate(segments(lost.daemon)[0], 4096)
        results = await asyncio.gather(
            prefill.client.write_all("r1", TOKENS, blocks, timeout=5),
            decode.client.read_all("r1", TOKENS, blocks, peer=prefill.client.pd_address, timeout=5),
            return_exceptions=True,
        )
        assert all(isinstance(result, HandoverFailed) for result in results), results
        await wait_for(anew.wait(), WITHIN_S)
        made = await lost.client.reattach(WITHIN_S)
        lost.caches = [made[rank] for rank in range(2)]
        fill(prefill.caches, blocks, seed=3)
        wipe(decode.caches, blocks)
        await asyncio.gather(
            prefill.client.write_all("r2", TOKENS, blocks),
            decode.client.read_all("r2", TOKENS, blocks, peer=prefill.client.pd_address),
        )
        assert snapshot(decode.caches, blocks) == snapshot(prefill.caches, blocks)
        assert all(one.daemon.process.poll() is None for one in (prefill, decode))


@contextlib.asynccontextmanager
async def tokens(directory: Path, driver: str) -> AsyncIterator[tuple[DaemonProcess, Client, asyncio.Event]]:
    sections: dict[str, Any] = token_tree(directory, driver=driver)
    with running(sections, directory) as daemon:
        async with Client(daemon.endpoint, connect_timeout=WITHIN_S) as client:
            anew = asyncio.Event()
            client.on_new_boot = anew.set
            yield daemon, client, anew


@pytest.mark.one_loop
@pytest.mark.parametrize("driver", ["open", "sdk"])
async def test_token_storage_over_memory_that_vanishes_fails_and_serves_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: str
) -> None:
    install_sdk(tmp_path, monkeypatch)
    path, blocks = TOKENS[: 4 * BLOCK], [1, 2, 3, 4]
    async with tokens(tmp_path, driver) as (daemon, client, anew):
        caches = await attach(client)
        fill(caches, blocks, seed=4)
        before = snapshot(caches, blocks)
        assert (await client.submit(write_path("w", path, blocks))).status is Status.OK
        os.truncate(segments(daemon)[1], 4096)
        for task in (read_path("r", path, blocks), write_path("x", [9, *path[1:]], blocks)):
            lost = await client.submit(task)
            assert lost.error is not None
            assert lost.error.code in ("device_lost", "not_attached"), lost
        await wait_for(anew.wait(), WITHIN_S)
        made = await client.reattach(WITHIN_S)
        caches = [made[rank] for rank in range(2)]
        wipe(caches, blocks)
        assert (await client.submit(read_path("again", path, blocks))).block_ids == blocks
        assert snapshot(caches, blocks) == before
        assert daemon.process.poll() is None


if __name__ == "__main__":
    full()
