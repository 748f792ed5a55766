"""A tensor-parallel group over two nodes: two real daemons in two network namespaces, over tcp with CURVE.

Every byte is compared. Each daemon is killed in each phase of a task, by the gates of tests/machine/faults.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.integration.caches import Caches, fill, snapshot
from tests.machine.faults.contents import CACHE, holds_content, write_content
from tests.machine.faults.gates import MODEL, VARIABLE
from tests.machine.faults.keeper import Keeper, Message
from tests.support.nodes import Namespace, namespaces
from transferd import ReadStorageTask, Status, TaskResult, WriteStorageTask
from transferd.blocks.formats import key_digest
from transferd.client.group import GroupClient
from transferd.client.launch import DaemonProcess, start
from transferd.errors import RequestError, TransferError
from transferd.runtime.compat import timeout
from transferd.wire.curve import ClientCurve
from transferd.wire.transport import ZmqClientTransport

pytestmark = pytest.mark.one_loop  # the daemons are in processes of their own

RANKS = 2  # of each node
PORT = 7801
BLOCKS = 4  # of a task: two chunks of two
START_S, GATE_S, ANSWER_S = 120.0, 60.0, 60.0
PHASES = {  # and the kind of task that has it
    "push": "write", "gather": "write", "store": "write",
    "match": "read", "load": "read", "scatter": "read", "result": "read",
}  # fmt: skip


class Site:
    """One node: a namespace, its daemon with its own store and keys, and who holds its gates."""

    def __init__(self, namespace: Namespace, number: int, directory: Path, client_keys: Path) -> None:
        self.namespace = namespace
        self.number = number
        self.endpoint = f"tcp://{namespace.address}:{PORT}"
        self.keeper = Keeper(directory / f"gates{number}.sock")
        self.public, secret = zmq.curve_keypair()
        self._directory = directory
        key_file = directory / f"daemon{number}.secret"
        key_file.write_bytes(secret)
        key_file.chmod(0o600)
        self._curve = {"secret_key_file": str(key_file), "client_keys_dir": str(client_keys)}
        self.daemon: DaemonProcess | None = None

    def start(self, **storage: Any) -> None:
        place = {"ranks": RANKS, "first_rank": RANKS * self.number, "group_ranks": 2 * RANKS}
        tree = {
            "server": {"endpoint": self.endpoint, "curve": self._curve},
            "cache": CACHE | place | {"device": "tests.machine.faults.gates:GatedShm"},
            "host": {"staging": "2MiB"},
            "storage": {"backend": "tests.machine.faults.gates:GatedFile", "model": MODEL}
            | {"file": {"path": str(self.store)}}
            | storage,
        }
        prefix = (*self.namespace.prefix, "env", f"{VARIABLE}={self.keeper.path}")
        self.daemon = start(tree, self._directory, name=f"daemon{self.number}", wait=False, prefix=prefix)

    @property
    def store(self) -> Path:
        return self._directory / f"blocks{self.number}"

    def kill(self) -> None:
        assert self.daemon is not None
        self.daemon.kill()

    def stop(self) -> None:
        if self.daemon is not None and self.daemon.process.poll() is None:
            self.daemon.stop()


class World:
    """Both nodes, and the group as its engine has it. caches: of all ranks, in the group's order."""

    def __init__(self, sites: list[Site], client_keys: tuple[bytes, bytes]) -> None:
        self.sites = sites
        self._keys = client_keys
        self.group = self.client()
        self.caches: Caches = []

    def client(self, order: tuple[int, ...] = (0, 1)) -> GroupClient:
        sites = [self.sites[number] for number in order]
        transports = [ZmqClientTransport(site.endpoint, curve=ClientCurve(site.public, *self._keys)) for site in sites]
        return GroupClient([site.endpoint for site in sites], transports=transports, connect_timeout=START_S)

    async def attach(self) -> None:
        self.caches = [await client.attach(rank) for client in self.group.clients for rank in range(RANKS)]

    async def write(self, name: str, keys: list[str], blocks: list[int]) -> TaskResult:
        for key, block in zip(keys, blocks, strict=True):
            write_content(self.caches, block, key)
        return await self.group.submit(WriteStorageTask(task_id=name, keys=keys, gpu_block_ids=blocks))

    def wipe(self, blocks: list[int]) -> None:
        for cache in self.caches:
            for layers in cache.values():
                for array in layers:
                    array[blocks] = 0


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[tuple[list[Site], tuple[bytes, bytes]]]:
    keys = zmq.curve_keypair()
    allowed = tmp_path / "clients"
    allowed.mkdir(mode=0o700)
    (allowed / "engine").write_bytes(keys[0])
    with namespaces(2) as nodes:
        made = [Site(namespace, number, tmp_path, allowed) for number, namespace in enumerate(nodes)]
        try:
            for site in made:
                site.start()
            yield made, keys
        finally:
            for site in made:
                site.stop()


@pytest.fixture
async def world(sites: tuple[list[Site], tuple[bytes, bytes]]) -> AsyncIterator[World]:
    made = World(*sites)
    async with contextlib.AsyncExitStack() as stack:
        for site in made.sites:
            await site.keeper.open()
            stack.push_async_callback(site.keeper.close)
        await stack.enter_async_context(made.group)
        await made.attach()
        yield made


async def test_two_nodes_are_one_group_and_every_byte_arrives_on_its_rank(world: World) -> None:
    group = world.group
    keys = [f"k{i}" for i in range(BLOCKS)]
    written = await world.write("w", keys, [0, 1, 2, 3])
    assert (written.status, written.block_ids) == (Status.OK, [0, 1, 2, 3])
    assert [rank.rank for rank in written.ranks] == [0, 1, 2, 3]
    assert written.bytes == sum(rank.bytes for rank in written.ranks)
    assert await group.match([*keys, "x"]) == BLOCKS
    assert await group.exists(["x", *keys]) == [False, True, True, True, True]
    world.wipe([8, 9, 10, 11])
    read = await group.submit(ReadStorageTask(task_id="r", keys=keys, gpu_block_ids=[8, 9, 10, 11]))
    assert (read.status, read.block_ids) == (Status.OK, [8, 9, 10, 11])
    assert all(holds_content(world.caches, 8 + i, key) for i, key in enumerate(keys))
    stats = await group.stats()
    assert (stats["ready"], stats["ranks"]) == (True, [2, 2])
    assert [one["fingerprint"] for one in _engines(stats)] == [_engines(stats)[0]["fingerprint"]] * 2
    assert [one["first_rank"] for one in _engines(stats)] == [0, 2]
    _forget(world.sites[1], "k1")
    world.wipe([12, 13, 14, 15])
    task = ReadStorageTask(task_id="s", keys=keys, gpu_block_ids=[12, 13, 14, 15], prefix=False)
    sparse = await group.submit(task)
    assert (sparse.status, sparse.block_ids, sparse.error) == (Status.PARTIAL, [12, 14, 15], None)
    assert all(holds_content(world.caches, 12 + i, keys[i]) for i in (0, 2, 3))
    assert await group.match(keys) == 1, "a hole on one node is a hole in the group"
    assert await group.exists(keys) == [True, False, True, True]
    await group.pause()
    waiting = await group.push(ReadStorageTask(task_id="p", keys=keys[:1], gpu_block_ids=[16]))
    assert await group.cancel("p")
    assert (await waiting).status is Status.CANCELLED
    await group.resume()
    await group.set_generation("next")
    gone = await group.submit(ReadStorageTask(task_id="g", keys=keys, gpu_block_ids=[8, 9, 10, 11]))
    assert gone.status is Status.MISS


def _engines(stats: dict[str, Any]) -> list[dict[str, Any]]:
    return [node["engines"]["default"] for node in stats["nodes"].values()]


def _forget(site: Site, key: str) -> None:
    """One rank of this node has an object no more; the store's index learns it from the next read."""
    paths = [path for path in site.store.rglob("*") if path.is_file() and key_digest(key) in str(path)]
    assert len(paths) == RANKS
    paths[0].unlink()


async def test_nodes_in_another_order_or_of_another_generation_are_no_group(world: World) -> None:
    with pytest.raises(RequestError, match=r"its first rank is 2; in this order of nodes it must be 0") as refusal:
        async with world.client(order=(1, 0)):
            pass
    assert refusal.value.reason == "group_mismatch"
    assert world.sites[1].endpoint in str(refusal.value)
    await world.group.clients[1].set_generation("ahead")
    with pytest.raises(RequestError, match="its generation is 'ahead'"):
        async with world.client():
            pass
    keys = ["a", "b"]
    mixed = await world.write("w", keys, [0, 1])
    assert (mixed.status, mixed.block_ids) == (Status.FAILED, [])
    assert mixed.error is not None
    assert mixed.error.code == "generation_mismatch"


# Each phase has a death, and each node dies in writes and in reads: what a death does depends on the phase, and only
# the place of its ranks in the result on the node.
DEATHS = {0: ("push", "store", "load", "result"), 1: ("gather", "match", "scatter")}


@pytest.mark.timeout(600)  # each death is a loss to be noticed and a start
@pytest.mark.parametrize("victim", DEATHS)
async def test_a_daemon_that_dies_in_any_phase_fails_the_task_in_time_and_the_group_goes_on(
    world: World, victim: int
) -> None:
    assert {phase for phases in DEATHS.values() for phase in phases} == PHASES.keys()
    site, survivor = world.sites[victim], world.sites[1 - victim]
    stored = [f"stored-{i}" for i in range(BLOCKS)]
    assert (await world.write("before", stored, [0, 1, 2, 3])).status is Status.OK
    for phase in DEATHS[victim]:
        kind = PHASES[phase]
        print(f"node {victim} dies in {phase}")
        targets = [8, 9, 10, 11]
        keys = stored if kind == "read" else [f"{phase}-{i}" for i in range(BLOCKS)]
        world.wipe(targets)
        if kind == "write":
            for key, block in zip(keys, targets, strict=True):
                write_content(world.caches, block, key)
        task = (ReadStorageTask if kind == "read" else WriteStorageTask)(
            task_id=f"in {phase}", keys=keys, gpu_block_ids=targets, timeout=600.0
        )
        if phase != "push":
            site.keeper.arm(phase, _in_the_middle(phase))
        running = asyncio.ensure_future(world.group.submit(task))
        await (asyncio.sleep(0) if phase == "push" else site.keeper.reached(GATE_S))
        site.kill()
        site.keeper.release()
        async with timeout(ANSWER_S):  # far from the task's own timeout: the loss ends it
            result = await running
        assert (result.status, result.block_ids) == (Status.FAILED, []), result
        assert result.error is not None
        assert (result.error.code, site.endpoint in result.error.message) == ("daemon_lost", True), result
        assert survivor.endpoint not in result.error.message
        assert [rank.rank for rank in result.ranks] == [0, 1, 2, 3]
        # The blocks are ours again: on the node that lives, nobody writes to them any more.
        fill(world.caches, targets, seed=len(phase))
        left = world.caches[RANKS * (1 - victim) :][:RANKS]
        ours = snapshot(left, targets)
        await world.group.clients[1 - victim].pause()
        assert snapshot(left, targets) == ours, "a byte was written after the result"
        await world.group.clients[1 - victim].resume()
        site.start()
        await world.group.wait_ready(START_S)
        again = await world.group.clients[victim].reattach(START_S)
        world.caches[2 * victim : 2 * victim + RANKS] = [again[rank] for rank in range(RANKS)]
        await _all_is_well(world, phase, keys)


def _in_the_middle(phase: str) -> Callable[[list[Message]], bool]:
    """The second passage of some rank: it stands in its second chunk. Lookups come once per rank."""
    if phase == "match":
        return lambda _: True
    return lambda seen: len(seen) > RANKS


async def _all_is_well(world: World, when: str, keys: list[str]) -> None:
    """What was stored before is intact or a miss; and new work goes well, byte for byte."""
    there = await world.group.exists(keys)
    known = [key for key, found in zip(keys, there, strict=True) if found]
    if known:
        blocks = list(range(16, 16 + len(known)))
        task = ReadStorageTask(task_id=f"known after {when}", keys=known, gpu_block_ids=blocks, prefix=False)
        result = await world.group.submit(task)
        assert result.block_ids, result
        for key, block in zip(known, blocks, strict=True):
            assert block not in result.block_ids or holds_content(world.caches, block, key)
    fresh = [f"after-{when}-{i}" for i in range(2)]
    assert (await world.write(f"write after {when}", fresh, [4, 5])).status is Status.OK
    world.wipe([6, 7])
    read = await world.group.submit(ReadStorageTask(task_id=f"read after {when}", keys=fresh, gpu_block_ids=[6, 7]))
    assert read.status is Status.OK, read
    assert all(holds_content(world.caches, 6 + i, key) for i, key in enumerate(fresh))


async def test_a_node_that_cannot_be_reached_is_lost_and_comes_back(world: World) -> None:
    cut = world.sites[1]
    write_content(world.caches, 0, "a")
    cut.keeper.arm("gather", lambda _: True)
    running = asyncio.ensure_future(
        world.group.submit(WriteStorageTask(task_id="w", keys=["a"], gpu_block_ids=[0], timeout=600.0))
    )
    await cut.keeper.reached(GATE_S)
    cut.namespace.cut()
    async with timeout(ANSWER_S):
        result = await running
    assert result.status is Status.FAILED
    assert result.error is not None
    assert (result.error.code, cut.endpoint in result.error.message) == ("daemon_lost", True)
    with pytest.raises(TransferError, match=cut.endpoint):
        await world.group.match(["a"])
    cut.keeper.release()
    cut.namespace.mend()
    await world.group.wait_ready(START_S)
    await _all_is_well(world, "the cut", ["a"])
