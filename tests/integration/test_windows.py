"""Windows: objects of three sizes in one arena, an engine for each size, on a real daemon in a process of its own.

The arena is one memfd. Every byte of it is compared with a model that carries tasks out one after the other.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.integration.own_memory import read, write
from transferd import (
    Client,
    Engine,
    Pages,
    ReadStorageTask,
    RequestError,
    Status,
    SwapInTask,
    SwapOutTask,
    TaskResult,
    WriteStorageTask,
    shm_pages,
)
from transferd.client.launch import DaemonProcess, running, start
from transferd.tasks import Task
from transferd.tiers.base import DeviceHandle
from transferd.tiers.owner import as_data, this_process

pytestmark = pytest.mark.one_loop

STEP = 4096  # from one window to the next
ARENA = 12 * 2**20
# Smaller than a step, a few steps, and larger than what is copied on the loop or in one piece; the extension
# (workers/_inplace.c) takes the last two in place, the first one goes through slots of staging.
SIZES = {"small": 3001, "middle": 10 * STEP, "large": 3 * 2**20 - 64}
SECTIONS: dict[str, Any] = {"host": {"staging": "16MiB"}, "metrics": {"listen": ""}}
SEEDS = [int(seed) for seed in os.environ.get("SEEDS", "1 2 3").split()]


def pages(nbytes: int, *, arena: int = ARENA, step: int = STEP) -> Pages:
    """All windows of this size that lie in the arena."""
    count = (arena - nbytes) // step + 1
    return Pages(layers=1, page_bytes=nbytes, blocks=count, identity="test/windows", windows=True)


class Arena:
    """Memory of this process, and what should be in it."""

    def __init__(self, nbytes: int = ARENA, seed: int = 7) -> None:
        self.fd = os.memfd_create("arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, nbytes)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(self.fd, nbytes), dtype=np.uint8)
        self.bytes[:] = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
        self.expected = self.bytes.copy()

    def window(self, size: str, number: int) -> slice:
        return slice(number * STEP, number * STEP + SIZES[size])

    def check(self) -> None:
        if not np.array_equal(self.bytes, self.expected):
            (wrong,) = np.nonzero(self.bytes != self.expected)
            raise AssertionError(f"{len(wrong)} bytes differ, from {wrong[0]} to {wrong[-1]}")


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena()
    yield made
    os.close(made.fd)


@asynccontextmanager
async def engines(endpoint: str, arena: Arena, *, host_blocks: int = 0) -> AsyncIterator[dict[str, Client]]:
    """An engine for each size, all over the same bytes; each offer is checked with a canary."""
    async with AsyncExitStack() as stack:
        clients = {}
        for size, nbytes in SIZES.items():
            client = Client(endpoint, engine=size, await_ready=False)
            clients[size] = await stack.enter_async_context(client)
            layout = pages(nbytes)
            await client.register(Engine(ranks=1, model="m", layout=layout, host_blocks=host_blocks))
            views = layout.views(arena.bytes, [(0, STEP)])
            await client.offer(0, shm_pages(arena.fd, [(0, STEP)]), caches=views)
            await client.wait_ready(60)
        yield clients


async def test_objects_of_three_sizes_come_back_elsewhere_after_a_restart_of_the_daemon_and_nothing_else_is_touched(
    tmp_path: Path, arena: Arena
) -> None:
    # Side by side, at multiples of 4096 that are no multiples of any size, without a gap where sizes allow it.
    stored = {"small": [0, 1, 2, 700], "middle": [3, 13, 24, 701], "large": [40, 808, 1576]}
    elsewhere = {"small": [2303, 2302, 2400, 2401], "middle": [2312, 2322, 2332, 2404], "large": [711, 1479, 2250]}
    with running(SECTIONS, tmp_path) as daemon:
        async with engines(daemon.endpoint, arena) as clients:
            arena.check()  # the canaries have put every byte back
            for size, numbers in stored.items():
                keys = [f"{size} {number}" for number in numbers]
                result = await clients[size].submit(write(f"w {size}", keys, numbers))
                assert (result.status, result.bytes) == (Status.OK, len(numbers) * SIZES[size]), result
            arena.check()
    objects = {
        (size, number): arena.expected[arena.window(size, number)].copy()
        for size, numbers in stored.items()
        for number in numbers
    }
    arena.bytes[:] = 0xA5  # a guard pattern everywhere
    arena.expected[:] = 0xA5
    with running(SECTIONS, tmp_path) as daemon:
        async with engines(daemon.endpoint, arena) as clients:
            for size, targets in elsewhere.items():
                numbers = stored[size]
                keys = [f"{size} {number}" for number in numbers]
                result = await clients[size].submit(read(f"r {size}", keys, targets[: len(keys)]))
                assert (result.status, result.block_ids) == (Status.OK, targets[: len(keys)]), result
                for number, target in zip(numbers, targets, strict=False):
                    arena.expected[arena.window(size, target)] = objects[size, number]
                arena.check()
        report = await stats_of(daemon)
        assert report["storage"]["corrupt"] == 0


async def stats_of(daemon: DaemonProcess) -> dict[str, Any]:
    async with Client(daemon.endpoint, await_ready=False) as client:
        return dict(await client.stats())


async def test_windows_go_to_host_memory_and_back_elsewhere(tmp_path: Path, arena: Arena) -> None:
    with running(SECTIONS, tmp_path) as daemon:
        async with engines(daemon.endpoint, arena, host_blocks=3) as clients:
            for size, number, target in (("small", 5, 2900), ("middle", 7, 1001), ("large", 1, 1500)):
                client = clients[size]
                out = SwapOutTask(task_id="out", gpu_block_ids=[number, number + 1], cpu_block_ids=[0, 2])
                assert (await client.submit(out)).status is Status.OK
                back = SwapInTask(task_id="in", gpu_block_ids=[target], cpu_block_ids=[2])
                assert (await client.submit(back)).status is Status.OK
                arena.expected[arena.window(size, target)] = arena.expected[arena.window(size, number + 1)].copy()
                arena.check()


class Model:
    """Carries out tasks of all engines one after the other, in the order in which the daemon has admitted them."""

    def __init__(self, arena: Arena, chance: random.Random) -> None:
        self.arena, self.chance, self.count = arena, chance, 0
        self.objects: dict[tuple[str, str], npt.NDArray[np.uint8]] = {}

    def task(self, size: str, most: int) -> Task:
        """One task on windows near the start of the arena, so that nearly all share bytes; its effect on the model."""
        self.count += 1
        task_id = f"{self.count}"
        known = [key for of, key in self.objects if of == size]
        numbers = self.apart(size, self.chance.randint(1, 3), most)
        if known and self.chance.random() < 0.6:
            keys = [self.chance.choice(known) for _ in numbers]
            for key, number in zip(keys, numbers, strict=True):
                self.arena.expected[self.arena.window(size, number)] = self.objects[size, key]
            return ReadStorageTask(task_id=task_id, keys=keys, gpu_block_ids=numbers, timeout=60)
        keys = [f"{size} {task_id} {number}" for number in numbers]
        for key, number in zip(keys, numbers, strict=True):
            self.objects[size, key] = self.arena.expected[self.arena.window(size, number)].copy()
        return WriteStorageTask(task_id=task_id, keys=keys, gpu_block_ids=numbers, timeout=60)

    def apart(self, size: str, count: int, most: int) -> list[int]:
        """At most so many windows that share no byte with each other."""
        chosen: list[int] = []
        last = most - -(-SIZES[size] // STEP)
        for _ in range(count):
            number = self.chance.randint(0, max(last, 0))
            if all(abs(number - other) * STEP >= SIZES[size] for other in chosen):
                chosen.append(number)
        return chosen


@pytest.mark.parametrize("seed", SEEDS)
async def test_tasks_of_all_engines_on_overlapping_windows_end_as_if_one_ran_after_the_other(
    seed: int, tmp_path: Path, arena: Arena
) -> None:
    print("seed", seed)
    model = Model(arena, random.Random(seed))
    most = 2 * -(-SIZES["large"] // STEP)
    with running(SECTIONS | {"storage": {"backend": "memory"}}, tmp_path) as daemon:
        async with engines(daemon.endpoint, arena) as clients:
            for _ in range(4):
                for client in clients.values():  # so that all tasks are there before the first one runs
                    await client.pause()
                running_: list[asyncio.Future[TaskResult]] = []
                for _ in range(40):
                    size = model.chance.choice(list(SIZES))
                    running_.append(await clients[size].push(model.task(size, most)))
                await asyncio.gather(*(client.resume() for client in clients.values()))
                results = await asyncio.gather(*running_)
                assert [result.status for result in results] == [Status.OK] * len(results), results
                arena.check()
            for size, client in clients.items():  # what was stored in the middle of it
                for (of, key), content in model.objects.items():
                    if of == size:
                        assert (await client.submit(read(f"last {key}", [key], [9]))).status is Status.OK
                        assert np.array_equal(arena.bytes[arena.window(size, 9)], content), key


async def test_a_task_waits_for_another_engines_on_its_bytes_and_others_do_not(tmp_path: Path, arena: Arena) -> None:
    with running(SECTIONS, tmp_path) as daemon:
        async with engines(daemon.endpoint, arena) as clients:
            small, large = clients["small"], clients["large"]
            assert (await large.submit(write("w", ["k"], [0]))).status is Status.OK
            content = arena.bytes[arena.window("large", 0)].copy()
            await large.pause()
            load = await large.push(read("load", ["k"], [1000]))
            last = 1000 + (SIZES["large"] - 1) // STEP  # the last window of `small` with a byte of it
            waits = await small.push(write("waits", ["after"], [last]))
            beside = await small.submit(write("beside", ["beside"], [last + 1]))
            assert beside.status is Status.OK
            listed = {task["task_id"]: (task["status"], task["waits_for"]) for task in await small.tasks("running")}
            assert listed["waits"] == ("queued", "1 tasks before it on its blocks")
            assert not waits.done()
            await large.resume()
            assert [(await task).status for task in (load, waits)] == [Status.OK, Status.OK]
            assert (await small.submit(read("r", ["after"], [0]))).status is Status.OK
            behind = content[(last - 1000) * STEP :][: SIZES["small"]]
            assert np.array_equal(arena.bytes[: len(behind)], behind), "it has stored what was loaded"


async def test_windows_are_there_again_under_the_daemon_that_follows_one_that_was_killed(
    tmp_path: Path, arena: Arena
) -> None:
    """The clients register and offer the arena again by themselves. What had no answer touches only its windows."""
    model = Model(arena, random.Random(11))
    most = 2 * -(-SIZES["large"] // STEP)
    daemon = start(SECTIONS, tmp_path)
    try:
        async with engines(daemon.endpoint, arena) as clients:
            for size, client in clients.items():
                assert (await client.submit(write("w", ["k"], [model.apart(size, 1, most)[0]]))).status is Status.OK
            stored = {size: await loaded(client, arena, size) for size, client in clients.items()}
            running_ = [
                await clients[size].push(read(f"{size} {number}", ["k"], [number * 8]))
                for number in range(20)
                for size in SIZES
            ]
            daemon.kill()
            results = await asyncio.gather(*running_)
            assert {result.status for result in results} <= {Status.OK, Status.FAILED}
            assert {result.error.code for result in results if result.error is not None} <= {"daemon_lost"}
            touched = max(19 * 8 * STEP + nbytes for nbytes in SIZES.values())
            assert np.array_equal(arena.bytes[touched : GUARD * STEP], arena.expected[touched : GUARD * STEP])
            daemon = start(SECTIONS, tmp_path)
            for size, client in clients.items():
                await client.wait_ready(60)
                assert np.array_equal(await loaded(client, arena, size), stored[size]), size
    finally:
        daemon.stop()


GUARD = 1500  # the step at which `loaded` loads


async def loaded(client: Client, arena: Arena, size: str) -> npt.NDArray[np.uint8]:
    result = await client.submit(read(f"r {os.urandom(4).hex()}", ["k"], [GUARD]))
    assert result.status is Status.OK, result
    found: npt.NDArray[np.uint8] = arena.bytes[arena.window(size, GUARD)].copy()
    return found


async def test_a_cancelled_task_lets_nobody_overtake(tmp_path: Path, arena: Arena) -> None:
    """Of three engines: a load that waits, a cancelled store behind it, and a load behind that one."""
    with running(SECTIONS, tmp_path) as daemon:
        async with engines(daemon.endpoint, arena) as clients:
            for size in SIZES:
                assert (await clients[size].submit(write("w", ["k"], [1]))).status is Status.OK
            content = {size: arena.bytes[arena.window(size, 1)].copy() for size in SIZES}
            await clients["large"].pause()
            first = await clients["large"].push(read("first", ["k"], [1200]))
            middle = await clients["middle"].push(read("cancelled", ["k"], [1205]))
            last = await clients["small"].push(read("last", ["k"], [1207]))
            await clients["middle"].cancel("cancelled")
            assert (await middle).status is Status.CANCELLED
            await clients["large"].resume()
            assert [(await task).status for task in (first, last)] == [Status.OK, Status.OK]
            arena.expected[arena.window("large", 1200)] = content["large"]
            arena.expected[arena.window("small", 1207)] = content["small"]
            arena.check()


async def test_an_engine_that_leaves_while_others_wait_for_its_windows(tmp_path: Path, arena: Arena) -> None:
    with running(SECTIONS, tmp_path) as daemon:
        async with engines(daemon.endpoint, arena) as clients:
            small, large = clients["small"], clients["large"]
            assert (await large.submit(write("w", ["k"], [0]))).status is Status.OK
            await large.pause()
            load = await large.push(read("load", ["k"], [1000]))
            waits = await small.push(write("waits", ["k"], [1003]))
            await large.unregister()
            assert (await load).status is Status.FAILED
            assert (await waits).status is Status.OK
            assert (await small.submit(read("r", ["k"], [2500]))).status is Status.OK
            arena.expected[arena.window("small", 2500)] = arena.expected[arena.window("small", 1003)]
            arena.check()


async def test_targets_of_one_task_that_share_a_byte_are_refused_and_sources_are_not(
    tmp_path: Path, arena: Arena
) -> None:
    with running(SECTIONS, tmp_path) as daemon:
        async with engines(daemon.endpoint, arena) as clients:
            middle = clients["middle"]
            assert (await middle.submit(write("w", ["a", "b"], [0, 9]))).status is Status.OK
            refused = await middle.submit(read("r", ["a", "b"], [100, 109]))
            assert (refused.status, refused.error and refused.error.code) == (Status.REJECTED, "duplicate_id")
            assert refused.error is not None
            assert "blocks 100 and 109 share bytes: windows of 40960, 4096 apart" in refused.error.message
            assert (await middle.submit(read("r2", ["a", "b"], [100, 110]))).status is Status.OK
            for number, target in ((0, 100), (9, 110)):
                arena.expected[arena.window("middle", target)] = arena.expected[arena.window("middle", number)]
            beyond = pages(SIZES["middle"]).blocks
            outside = await middle.submit(write("o", ["c"], [beyond]))
            assert outside.error is not None
            assert outside.error.code == "id_out_of_range"
            assert f"block {beyond} is out of range" in outside.error.message
            arena.check()


async def test_25_million_windows_cost_no_memory_a_window(tmp_path: Path) -> None:
    """A step of 4 bytes, so that the arena has 100 MiB: a table with a byte for each window would have 25 MB."""
    arena = Arena(100 * 2**20)
    layout = pages(SIZES["middle"], arena=100 * 2**20, step=4)
    assert layout.blocks > 25_000_000
    with running(SECTIONS, tmp_path) as daemon:
        before = anonymous_bytes(daemon)
        async with Client(daemon.endpoint, engine="e", await_ready=False) as client:
            await client.register(Engine(ranks=1, model="m", layout=layout))
            await client.offer(0, shm_pages(arena.fd, [(0, 4)]), caches=layout.views(arena.bytes, [(0, 4)]))
            await client.wait_ready(60)
            stored = await client.submit(write("w", ["k"], [layout.blocks - 1]))
            assert stored.status is Status.OK
            loaded = await client.submit(read("r", ["k"], [12_345_678]))
            assert loaded.status is Status.OK
            begin, last = 4 * 12_345_678, 4 * (layout.blocks - 1)
            size = SIZES["middle"]
            arena.expected[begin : begin + size] = arena.expected[last : last + size]
            arena.check()
            staging = 16 * 2**20  # of this engine
            assert anonymous_bytes(daemon) - before < staging + 12 * 2**20
    os.close(arena.fd)


def anonymous_bytes(daemon: DaemonProcess) -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{daemon.pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


# --- what is refused ------------------------------------------------------------------------------

ONE = {"attention": "pages", "layers": 1, "page_bytes": 8192, "identity": "i", "windows": True, "device_blocks": 16}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"layers": 2}, r"cache.windows: requires one layer: a window is one range of bytes \(2\)"),
        ({"attention": "mla"}, r"cache.windows: requires cache.attention = \"pages\" \('mla'\)"),
        ({"ownership": "create"}, r"cache.windows: requires cache.ownership = \"attach\""),
        ({"device": "cuda"}, r"cache.windows: the cuda device cannot have windows; shared memory can"),
        ({"windows": 2}, "Expected `bool`"),
        ({"page_bytes": 0}, "Expected `int` >= 1"),
        ({"page_bytes": 2**31}, r"Expected `int` <= 2147483647 - at `\$.page_bytes`"),
        ({"device_blocks": 0}, "Expected `int` >= 1"),
        ({"device_blocks": 2**31}, r"Expected `int` <= 2147483647 - at `\$.device_blocks`"),
    ],
)
async def test_registrations_of_windows_that_cannot_be_are_refused(
    wrong: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with running(SECTIONS, tmp_path) as daemon:
        async with Client(daemon.endpoint, engine="e", await_ready=False) as client:
            with pytest.raises(RequestError, match=said) as refusal:
                await client.register(Engine(ranks=1, model="m", layout=ONE | wrong))
            assert refusal.value.reason == "bad_value"
            await client.register(Engine(ranks=1, model="m", layout=ONE))  # the daemon lives, and nothing is left


SPOILT_OFFERS: list[tuple[Any, str]] = [
    ([[0, 0]], "the segment of layer 0 has a stride of 0 bytes, at least 1"),
    ([[0, -1]], "starts at byte 0 with a stride of -1"),
    ([[-4096, 4096]], "starts at byte -4096"),
    ([[0, 2**62 + 1]], "with a stride of 4611686018427387905"),
    ([[0, 2**62]], "ends at byte 69175290276410826752 with 16 blocks; its region has 69632 bytes"),
    ([[2**62, 4096]], "ends at byte 4611686018427457536 with 16 blocks; its region has 69632 bytes"),
    ([[1, 4096]], "ends at byte 69633 with 16 blocks; its region has 69632 bytes"),
    ([[0, 4097]], "ends at byte 69647 with 16 blocks; its region has 69632 bytes"),
    ([[0, 4096, 1]], "names region 1; the handle has 1"),
    ([[0, 2**63]], "with a stride of 9223372036854775808"),
    ([[0, "4096"]], "malformed"),
    ([[0, 4096.5]], "malformed"),
    ([[0, 4096], [0, 4096]], "has 2 segments; the layout needs 1"),
    ([], "has 0 segments"),
    (None, "malformed"),
]


async def test_offers_of_windows_that_cannot_be_are_refused_by_what_is_wrong(tmp_path: Path) -> None:
    """Handles made by hand, so that our library refuses nothing itself. Afterwards a right one is taken."""
    nbytes = 15 * 4096 + 8192  # exactly 16 windows
    fd = os.memfd_create("arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    right = shm_pages(fd, [(0, 4096)])
    with running(SECTIONS, tmp_path) as daemon:
        async with Client(daemon.endpoint, engine="e", await_ready=False) as client:
            await client.register(Engine(ranks=1, model="m", layout=ONE))
            for segments, said in SPOILT_OFFERS:
                data = {"fd": fd, "nbytes": nbytes, "segments": segments, "owner": as_data(this_process())}
                with pytest.raises(RequestError) as refusal:
                    await client.offer(0, DeviceHandle("shm", data))
                assert (refusal.value.reason, said in str(refusal.value)) == ("layout_mismatch", True), refusal.value
            await client.offer(0, right)
            await client.wait_ready(60)
    os.close(fd)


async def test_blocks_that_are_no_windows_are_refused_where_windows_would_be_taken(tmp_path: Path) -> None:
    """Too short a stride; a byte of another engine's windows; windows over a byte of another engine's blocks."""
    fd = os.memfd_create("arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 2**20)
    plain = {key: value for key, value in ONE.items() if key != "windows"}

    async def offered(name: str, layout: dict[str, Any], place: tuple[int, int]) -> Client:
        client = await stack.enter_async_context(Client(daemon.endpoint, engine=name, await_ready=False))
        await client.register(Engine(ranks=1, model="m", layout=layout))
        await client.offer(0, shm_pages(fd, [place]))
        return client

    with running(SECTIONS, tmp_path) as daemon:
        async with AsyncExitStack() as stack:
            with pytest.raises(RequestError, match="stride of 4096 bytes, less than its 8192 bytes per block") as found:
                await offered("short", plain, (0, 4096))
            assert found.value.reason == "layout_mismatch"
            windows = await offered("windows", ONE, (0, 4096))
            for name, place in (("over windows", (4096 * 16, 8192)), ("between them", (0, 32768))):
                with pytest.raises(RequestError, match="overlaps that of rank 0 of the engine 'windows'") as found:
                    await offered(name.replace(" ", "-"), plain, place)
                assert found.value.reason == "already_attached"
            await offered("blocks-behind", plain, (4096 * 17, 8192))
            with pytest.raises(RequestError, match="overlaps that of rank 0 of the engine 'blocks-behind'") as found:
                await offered("more-windows", ONE, (4096 * 16, 4096))
            assert found.value.reason == "already_attached"
            await windows.unregister()
    os.close(fd)


async def test_two_ranks_of_one_engine_share_no_byte_of_their_windows(tmp_path: Path) -> None:
    fd = os.memfd_create("arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 2**20)
    with running(SECTIONS, tmp_path) as daemon:
        async with Client(daemon.endpoint, engine="e", await_ready=False) as client:
            await client.register(Engine(ranks=2, model="m", layout=ONE))
            await client.offer(0, shm_pages(fd, [(0, 4096)]))
            with pytest.raises(RequestError, match="overlaps that of rank 0") as refusal:
                await client.offer(1, shm_pages(fd, [(16 * 4096, 4096)]))
            assert refusal.value.reason == "already_attached"
            await client.offer(1, shm_pages(fd, [(17 * 4096, 4096)]))
            await client.wait_ready(60)
    os.close(fd)
