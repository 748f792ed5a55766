"""Prefill to decode, in both modes: two daemons, real pools and transfer engines, every byte compared."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.caches import Caches, attach, fill, snapshot, wipe
from tests.support.sabotage import FILE_VARIABLE, Saboteur
from transferd import Client, HandoverFailed, Status
from transferd.blocks.formats import key_digest
from transferd.blocks.keys import block_keys
from transferd.cli.pool.local import Master
from transferd.cli.pool.master import master_executable
from transferd.client.launch import DaemonProcess, running
from transferd.errors import RequestError
from transferd.runtime.compat import timeout
from transferd.tasks import ReceiveTask, SendTask, SwapInTask

pytestmark = [
    pytest.mark.skipif(master_executable() is None, reason="mooncake-transfer-engine is not installed"),
    pytest.mark.one_loop,
]

BLOCK = 8
TOKENS = list(range(1000, 1000 + 5 * BLOCK + 3))  # five full blocks and three tokens
BLOCKS = 6
MODES = ("storage", "direct")


def config(mode: str, master: Master | None, **cache: Any) -> dict[str, dict[str, Any]]:
    storage: dict[str, Any] = {"backend": "none"}
    if mode == "storage":
        assert master is not None
        mooncake = {"master_server_addr": master.address, "global_segment_size": "32MiB", "local_buffer_size": "16MiB"}
        storage = {"backend": "mooncake", "mooncake": mooncake}
    shape = {"ranks": 2, "layers": 3, "kv_heads": 2, "head_dim": 16, "block_size": BLOCK, "device_blocks": 64}
    return {
        "cache": shape | {"host_blocks": 0} | cache,
        "host": {"staging": "64KiB"},
        "storage": storage,
        "pd": {"mode": mode, "staging": "64KiB"},
    }


@dataclass
class Side:
    """One engine: its daemon, its client, its device memory."""

    daemon: DaemonProcess
    client: Client
    caches: Caches


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    """One pool for all tests, each of which has a model of its own."""
    pool = Master(tmp_path_factory.mktemp("pool") / "master.log")
    pool.start()
    yield pool
    pool.stop()


@contextlib.asynccontextmanager
async def side(name: str, tree: dict[str, dict[str, Any]], directory: Path) -> AsyncIterator[Side]:
    tree["storage"]["model"] = directory.name
    with running(tree, directory, name=name) as daemon:
        async with Client(daemon.endpoint) as client:
            yield Side(daemon, client, await attach(client, tree["cache"]["ranks"]))


@contextlib.asynccontextmanager
async def pair(mode: str, master: Master | None, directory: Path, **decode: Any) -> AsyncIterator[tuple[Side, Side]]:
    async with (
        side("prefill", config(mode, master), directory) as prefill,
        side("decode", config(mode, master, **decode), directory) as other,
    ):
        yield prefill, other


@pytest.mark.parametrize("mode", MODES)
async def test_a_sequence_arrives_whole_its_incomplete_block_too(mode: str, master: Master, tmp_path: Path) -> None:
    async with pair(mode, master, tmp_path) as (prefill, decode):
        source, target = [7, 3, 11, 2, 30, 9], [1, 2, 3, 4, 5, 6]
        fill(prefill.caches, source, seed=1)
        written = asyncio.ensure_future(prefill.client.write_all("r1", TOKENS, source))
        if mode == "storage":
            await written
        read = await decode.client.read_all("r1", TOKENS, target, peer=prefill.client.pd_address)
        assert read.block_ids == target
        assert (await written).block_ids == source
        assert snapshot(decode.caches, target) == snapshot(prefill.caches, source)


@pytest.mark.parametrize("mode", MODES)
async def test_a_sequence_arrives_in_host_blocks_before_there_are_device_blocks(
    mode: str, master: Master, tmp_path: Path
) -> None:
    """And leaves from host blocks as well."""
    async with pair(mode, master, tmp_path, host_blocks=16) as (prefill, decode):
        source, host, target = [7, 3, 11, 2, 30, 9], [5, 4, 3, 2, 1, 0], [1, 2, 3, 4, 5, 6]
        fill(prefill.caches, source, seed=1)
        wipe(decode.caches, list(range(64)))
        before = snapshot(decode.caches, list(range(64)))
        written = asyncio.ensure_future(prefill.client.write_all("r1", TOKENS, source))
        if mode == "storage":
            await written
        peer = prefill.client.pd_address
        read = await decode.client.read_all("r1", TOKENS, cpu_block_ids=host, peer=peer)
        assert read.block_ids == host
        await written
        assert snapshot(decode.caches, list(range(64))) == before, "no device block is touched"
        task = SwapInTask(task_id="up", gpu_block_ids=target, cpu_block_ids=host)
        assert (await decode.client.submit(task)).status is Status.OK
        assert snapshot(decode.caches, target) == snapshot(prefill.caches, source)
        with pytest.raises(RequestError, match="not both"):
            await decode.client.read_all("r2", TOKENS, target, cpu_block_ids=host, peer=peer)
        # Back again, out of the host blocks.
        back = asyncio.ensure_future(decode.client.write_all("r3", TOKENS[::-1], cpu_block_ids=host))
        if mode == "storage":
            await back
        peer = decode.client.pd_address
        assert (await prefill.client.read_all("r3", TOKENS[::-1], [40, 41, 42, 43, 44, 45], peer=peer)).block_ids
        assert (await back).block_ids == host
        assert snapshot(prefill.caches, [40, 41, 42, 43, 44, 45]) == snapshot(prefill.caches, source)


@pytest.mark.parametrize("mode", MODES)
async def test_many_sequences_at_once_share_a_small_staging(mode: str, master: Master, tmp_path: Path) -> None:
    """40 blocks in two directions' worth of tasks through 16 slots a rank; the receivers come first."""
    async with pair(mode, master, tmp_path) as (prefill, decode):
        fill(prefill.caches, list(range(64)), seed=2)
        sequences = [[3 * i for i in range(n, n + 10)] for n in range(4)]
        tokens = [[1000 * n + i for i in range(10 * BLOCK)] for n in range(4)]
        targets = [list(range(10 * n, 10 * n + 10)) for n in range(4)]

        async def write(n: int) -> None:
            await prefill.client.write_all(f"r{n}", tokens[n], sequences[n])

        async def read(n: int) -> None:
            await decode.client.read_all(f"r{n}", tokens[n], targets[n], peer=prefill.client.pd_address)

        if mode == "storage":
            await asyncio.gather(*(write(n) for n in range(4)))
            await asyncio.gather(*(read(n) for n in range(4)))
        else:
            await asyncio.gather(*(read(n) for n in range(4)), *(write(3 - n) for n in range(4)))
        for n in range(4):
            assert snapshot(decode.caches, targets[n]) == snapshot(prefill.caches, sequences[n])
        for one in (prefill, decode):
            assert (await one.client.stats())["staging"]["used"] == 0


@pytest.mark.parametrize("mode", MODES)
async def test_less_than_everything_is_an_error_that_maps_to_502(mode: str, master: Master, tmp_path: Path) -> None:
    async with pair(mode, master, tmp_path) as (prefill, decode):
        full, peer = TOKENS[: 5 * BLOCK], prefill.client.pd_address
        fill(prefill.caches, [1, 2, 3, 4, 5], seed=3)
        writing = asyncio.ensure_future(prefill.client.write_all("r1", full, [1, 2, 3, 4, 5], timeout=60))
        if mode == "storage":
            await writing
        with pytest.raises(HandoverFailed) as failure:  # its last block has three tokens; P's sequence ends before it
            await decode.client.read_all("r1", TOKENS, [1, 2, 3, 4, 5, 6], peer=peer, timeout=60)
        assert failure.value.http_status == 502
        assert failure.value.reason == {"storage": "blocks_missing", "direct": "blocks_mismatch"}[mode]
        if mode == "direct":
            with pytest.raises(HandoverFailed):
                await writing


@pytest.mark.parametrize("mode", MODES)
async def test_another_layout_is_never_delivered(mode: str, master: Master, tmp_path: Path) -> None:
    async with pair(mode, master, tmp_path, head_dim=32) as (prefill, decode):
        fill(prefill.caches, [1, 2, 3, 4, 5, 6], seed=4)
        wipe(decode.caches, list(range(64)))
        before = snapshot(decode.caches, list(range(64)))
        writing = asyncio.ensure_future(prefill.client.write_all("r1", TOKENS, [1, 2, 3, 4, 5, 6], timeout=60))
        if mode == "storage":
            await writing
        with pytest.raises(HandoverFailed) as failure:
            await decode.client.read_all("r1", TOKENS, [1, 2, 3, 4, 5, 6], peer=prefill.client.pd_address, timeout=60)
        assert failure.value.reason == {"storage": "blocks_missing", "direct": "layout_mismatch"}[mode]
        assert snapshot(decode.caches, list(range(64))) == before
        if mode == "direct":
            with pytest.raises(HandoverFailed):
                await writing
            assert set((await decode.client.stats())["pd"]["refused"]) == {"layout_mismatch"}


async def test_a_failed_attempt_can_be_made_again_at_once(master: Master, tmp_path: Path) -> None:
    async with pair("storage", master, tmp_path) as (prefill, decode):
        with pytest.raises(HandoverFailed):
            await decode.client.read_all("r1", TOKENS, [1, 2, 3, 4, 5, 6])
        await prefill.client.write_all("r1", TOKENS, [1, 2, 3, 4, 5, 6])
        assert (await decode.client.read_all("r1", TOKENS, [1, 2, 3, 4, 5, 6])).block_ids == [1, 2, 3, 4, 5, 6]


async def test_bad_input_is_the_callers_fault_not_a_502(tmp_path: Path) -> None:
    async with side("only", config("direct", None), tmp_path) as node:
        with pytest.raises(RequestError, match="peer"):
            await node.client.read_all("r1", TOKENS, [1, 2, 3, 4, 5, 6])
        with pytest.raises(RequestError, match="host:port"):
            await node.client.read_all("r1", TOKENS, [1, 2, 3, 4, 5, 6], peer="nowhere")
        with pytest.raises(RequestError, match="gpu_block_ids"):
            await node.client.write_all("r1", TOKENS, [1, 2, 3])
        with pytest.raises(RequestError, match="token_ids is empty"):
            await node.client.write_all("r1", [], [])


async def test_a_side_that_never_comes_is_a_failure_by_the_deadline(tmp_path: Path) -> None:
    async with pair("direct", None, tmp_path) as (prefill, decode):
        ids = [1, 2, 3, 4, 5, 6]
        with pytest.raises(HandoverFailed) as failure:
            await prefill.client.write_all("nobody-reads", TOKENS, ids, timeout=0.5)
        assert failure.value.reason == "expired"
        with pytest.raises(HandoverFailed) as failure:
            await decode.client.read_all("nobody-writes", TOKENS, ids, peer=prefill.client.pd_address, timeout=0.5)
        assert failure.value.reason == "expired"
        with pytest.raises(HandoverFailed) as failure:
            await decode.client.read_all("nobody-there", TOKENS, ids, peer="127.0.0.1:1", timeout=60)
        assert failure.value.reason == "peer_lost"
        await expect_nothing_left(prefill, decode)


async def test_a_cancelled_side_ends_the_other_one_at_once(tmp_path: Path) -> None:
    async with pair("direct", None, tmp_path) as (prefill, decode):
        ids = [1, 2, 3, 4, 5, 6]
        task = SendTask(task_id="send", transfer_id="r1", keys=block_keys(TOKENS, BLOCK), gpu_block_ids=ids, timeout=60)
        receive = ReceiveTask(
            task_id="receive",
            transfer_id="r1",
            peer=prefill.client.pd_address,
            keys=block_keys(TOKENS[::-1], BLOCK)[:6],
            gpu_block_ids=ids,
            timeout=60,
        )
        waiting = await decode.client.push(receive)
        while (await prefill.client.stats())["pd"]["waiting"] != 2:  # noqa: ASYNC110 - as below
            await asyncio.sleep(0.01)
        await decode.client.cancel("receive")
        assert (await waiting).status is Status.CANCELLED
        while (await prefill.client.stats())["pd"]["waiting"]:  # noqa: ASYNC110 - until it has heard
            await asyncio.sleep(0.01)
        sending = await prefill.client.push(task)
        await prefill.client.cancel("send")
        assert (await sending).status is Status.CANCELLED
        await expect_nothing_left(prefill, decode)


BIG = {"layers": 4, "head_dim": 128, "block_size": BLOCK, "kv_heads": 32, "device_blocks": 128}  # 1 MiB a block
SABOTAGED = {"device": "tests.support.sabotage:SabotagedDevice"}


async def begun(node: Side, block: int) -> None:
    """Until bytes have arrived in this block of rank 0."""
    array = node.caches[0]["key"][0]
    async with timeout(60):
        while not array[block].any():  # noqa: ASYNC110 - memory tells nobody
            await asyncio.sleep(0.001)


@pytest.fixture
def saboteur(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Saboteur:
    order = tmp_path / "order"
    monkeypatch.setenv(FILE_VARIABLE, str(order))
    return Saboteur(order)


@contextlib.asynccontextmanager
async def big_transfer(
    directory: Path, saboteur: Saboteur
) -> AsyncIterator[tuple[Side, Side, list[asyncio.Future[Any]]]]:
    """128 MiB a rank under way, its first bytes there; rank 1 of the receiver stands still, so it cannot end."""
    trees = [config("direct", None, **BIG), config("direct", None, **BIG, **SABOTAGED)]
    for tree in trees:
        tree["pd"]["staging"] = tree["host"]["staging"] = "8MiB"
    async with side("prefill", trees[0], directory) as prefill, side("decode", trees[1], directory) as decode:
        tokens, ids = list(range(128 * BLOCK)), list(range(128))
        for cache in prefill.caches:
            for plane in cache.values():
                for layer in plane:
                    layer[:] = 7
        wipe(decode.caches, ids)
        peer = prefill.client.pd_address
        with saboteur.order("copy_in", 1, "stall"):
            under_way: list[asyncio.Future[Any]] = [
                asyncio.ensure_future(prefill.client.write_all("big", tokens, ids, timeout=60)),
                asyncio.ensure_future(decode.client.read_all("big", tokens, ids, peer=peer, timeout=60)),
            ]
            await begun(decode, 0)
            yield prefill, decode, under_way


async def test_a_sender_killed_in_the_middle_leaves_a_failed_result(tmp_path: Path, saboteur: Saboteur) -> None:
    async with big_transfer(tmp_path, saboteur) as (prefill, decode, (writing, reading)):
        prefill.daemon.kill()
        saboteur.lift()
        with pytest.raises(HandoverFailed) as failure:
            await reading
        assert failure.value.reason == "peer_lost"
        assert failure.value.result.block_ids == []
        with pytest.raises(HandoverFailed) as failure:
            await writing
        assert failure.value.reason == "daemon_lost"
        assert (await decode.client.stats())["ready"]
        await expect_nothing_left(decode)


async def test_a_receiver_killed_in_the_middle_leaves_a_failed_result(tmp_path: Path, saboteur: Saboteur) -> None:
    async with big_transfer(tmp_path, saboteur) as (prefill, decode, (writing, reading)):
        decode.daemon.kill()
        with pytest.raises(HandoverFailed) as failure:
            await writing
        assert failure.value.reason == "peer_lost"
        assert failure.value.result.block_ids == []
        with pytest.raises(HandoverFailed) as failure:
            await reading
        assert failure.value.reason == "daemon_lost"
        await expect_nothing_left(prefill)


async def test_a_sender_stopped_in_the_middle_costs_the_receiver_its_deadline_and_no_more(tmp_path: Path) -> None:
    tree = config("direct", None)
    async with side("prefill", tree, tmp_path) as prefill, side("decode", tree, tmp_path) as decode:
        ids = [1, 2, 3, 4, 5, 6]
        fill(prefill.caches, ids, seed=5)
        peer = prefill.client.pd_address
        reading = asyncio.ensure_future(decode.client.read_all("r1", TOKENS, ids, peer=peer, timeout=1))
        prefill.daemon.signal(signal.SIGSTOP)
        with pytest.raises(HandoverFailed) as failure:
            await reading
        assert failure.value.reason == "expired"
        prefill.daemon.signal(signal.SIGCONT)
        await prefill.client.wait_ready(60)
        both = await asyncio.gather(
            prefill.client.write_all("r2", TOKENS, ids), decode.client.read_all("r2", TOKENS, ids, peer=peer)
        )
        assert [result.block_ids for result in both] == [ids, ids]
        assert snapshot(decode.caches, ids) == snapshot(prefill.caches, ids)


async def expect_nothing_left(*nodes: Side) -> None:
    """No slot, no transfer, no waiting receiver; what is on its way out gets there."""
    async with timeout(60):
        for node in nodes:
            while True:
                stats = await node.client.stats()
                pd = stats["pd"]
                if not (stats["staging"]["used"] or pd["sending"] or pd["receiving"] or pd["waiting"]):
                    break
                await asyncio.sleep(0.01)


async def test_an_object_with_another_number_of_tokens_is_never_taken_for_this_one(tmp_path: Path) -> None:
    """The object of `…:partial:2` is put in the place of `…:partial:3`, as a faulty pool might."""
    tree = config("direct", None) | {"storage": {"backend": "file"}, "pd": {"mode": "storage"}}
    async with side("only", tree, tmp_path) as node:
        two, three = TOKENS[:-1], TOKENS
        fill(node.caches, [1, 2, 3, 4, 5, 6], seed=6)
        await node.client.write_all("r2", two, [1, 2, 3, 4, 5, 6])
        await node.client.write_all("r3", three, [1, 2, 3, 4, 5, 6])
        for rank in range(2):
            source, target = (stored_as(tmp_path / "blocks", block_keys(t, BLOCK)[-1], rank) for t in (two, three))
            target.write_bytes(source.read_bytes())
        with pytest.raises(HandoverFailed) as failure:
            await node.client.read_all("r3", three, [11, 12, 13, 14, 15, 16])
        assert failure.value.reason == "blocks_missing"
        assert (await node.client.stats())["storage"]["corrupt"] >= 1


def stored_as(directory: Path, key: str, rank: int) -> Path:
    digest = key_digest(key)
    (path,) = (path for path in directory.rglob("*") if digest in path.name and path.name.endswith(f"{rank}"))
    return path
