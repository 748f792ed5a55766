"""Engines that register with daemons of two nodes and offer pages are one group; two groups share what they store."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from transferd import Engine, GroupClient, Pages, ReadStorageTask, Status, WriteStorageTask, shm_pages
from transferd.config import from_tree
from transferd.daemon.daemon import Daemon
from transferd.errors import RequestError
from transferd.tiers.offered import DIRECTORY

NODES, RANKS, BLOCKS = 2, 2, 8
SIZES = [48, 33]
PAGES = Pages(layers=2, page_bytes=SIZES, blocks=BLOCKS, identity="test/group")
ROW = 100
SEGMENTS = [[(ROW * rank, ROW * RANKS), (ROW * rank + 48, ROW * RANKS)] for rank in range(RANKS)]
NBYTES = ROW * RANKS * BLOCKS


@pytest.fixture
async def endpoints(tmp_path: Path) -> AsyncIterator[list[str]]:
    """Two daemons without [cache], each with a store of its own. Over tcp, nobody can offer memory by its name."""
    async with contextlib.AsyncExitStack() as stack:
        daemons = []
        for number in range(NODES):
            tree = {
                "server": {"endpoint": f"ipc://{tmp_path}/s{number}"},
                "host": {"staging": "64KiB"},
                "storage": {"backend": "file", "file": {"path": str(tmp_path / f"blocks{number}")}},
                "metrics": {"listen": ""},
            }
            daemon = Daemon(from_tree(tree))
            await daemon.open()
            stack.push_async_callback(daemon.stop, lambda: 5.0)
            daemons.append(daemon)
        yield [daemon.transport.endpoints[0] for daemon in daemons]


@contextlib.contextmanager
def memory(name: str) -> Iterator[tuple[str, npt.NDArray[np.uint8]]]:
    """One node's memory of one engine: its name, and its bytes."""
    path = DIRECTORY / f"test.{os.getpid()}.{name}"
    path.write_bytes(bytes(NBYTES))
    try:
        yield path.name, np.memmap(path, dtype=np.uint8, mode="r+")
    finally:
        path.unlink()


@contextlib.asynccontextmanager
async def group_of(
    endpoints: list[str], name: str, pages: Pages = PAGES
) -> AsyncIterator[tuple[GroupClient, list[npt.NDArray[np.uint8]]]]:
    """An engine over both nodes, registered, its memory offered; and its bytes by node."""
    with contextlib.ExitStack() as stack:
        memories = [stack.enter_context(memory(f"{name}{number}")) for number in range(NODES)]
        async with GroupClient(endpoints, engine=name, await_ready=False) as group:
            for number, (client, (where, raw)) in enumerate(zip(group.clients, memories, strict=True)):
                engine = Engine(
                    ranks=RANKS, model="m", layout=pages, first_rank=RANKS * number, group_ranks=RANKS * NODES
                )
                await client.register(engine)
                for rank in range(RANKS):
                    views = pages.views(raw, SEGMENTS[rank])
                    await client.offer(rank, shm_pages(where, SEGMENTS[rank]), caches=views)
            await group.wait_ready(60)
            yield group, [raw for _, raw in memories]


def block(raw: npt.NDArray[np.uint8], rank: int, number: int) -> bytes:
    pages = zip(SEGMENTS[rank], SIZES, strict=True)
    return b"".join(raw[offset + number * stride :][:nbytes].tobytes() for (offset, stride), nbytes in pages)


def blocks(raws: list[npt.NDArray[np.uint8]], numbers: list[int]) -> list[bytes]:
    return [block(raw, rank, number) for raw in raws for rank in range(RANKS) for number in numbers]


async def test_a_group_of_registered_engines_moves_its_pages_and_another_one_reads_them(endpoints: list[str]) -> None:
    chance = np.random.default_rng(9)
    async with group_of(endpoints, "llama-0") as (zero, raws), group_of(endpoints, "llama-1") as (one, others):
        for raw in raws:
            raw[:] = chance.integers(0, 256, NBYTES, dtype=np.uint8)
        before = [raw.copy() for raw in raws]
        written = await zero.submit(WriteStorageTask(task_id="w", keys=["a", "b", "c"], gpu_block_ids=[6, 1, 3]))
        assert (written.status, written.bytes) == (Status.OK, 3 * NODES * RANKS * sum(SIZES))
        assert [rank.rank for rank in written.ranks] == [0, 1, 2, 3]
        assert await one.exists(["x", "a", "b", "c"]) == [False, True, True, True], "they say the same: they share"
        task = ReadStorageTask(task_id="r", keys=["c", "x", "a"], gpu_block_ids=[0, 4, 7], prefix=False)
        for group, into in ((zero, raws), (one, others)):
            result = await group.submit(task)
            assert (result.status, result.block_ids, result.error) == (Status.PARTIAL, [0, 7], None)
            assert blocks(into, [0, 7]) == blocks(before, [3, 6])
        assert blocks(raws, [1, 2, 3, 4, 5, 6]) == blocks(before, [1, 2, 3, 4, 5, 6])
        assert blocks(others, [1, 2, 3, 4, 5, 6]) == [bytes(sum(SIZES))] * 6 * NODES * RANKS


async def test_groups_that_mean_something_else_share_nothing(endpoints: list[str]) -> None:
    stranger = Pages(layers=2, page_bytes=SIZES, blocks=BLOCKS, identity="test/group/fp8")
    async with group_of(endpoints, "llama-0") as (zero, _), group_of(endpoints, "qwen", stranger) as (other, _):
        written = await zero.submit(WriteStorageTask(task_id="w", keys=["a"], gpu_block_ids=[0]))
        assert written.status is Status.OK
        assert await zero.exists(["a"]) == [True]
        assert await other.exists(["a"]) == [False]


async def test_the_end_of_an_engine_on_one_node_is_the_groups_refusal_and_names_the_node(endpoints: list[str]) -> None:
    async with group_of(endpoints, "llama-0") as (group, _):
        await group.clients[1].unregister()
        result = await group.submit(WriteStorageTask(task_id="w", keys=["a"], gpu_block_ids=[0]))
        assert result.status in (Status.REJECTED, Status.FAILED)
        assert result.block_ids == []
        assert result.error is not None
        assert (result.error.code, endpoints[1] in result.error.message) == ("unknown_engine", True)
        with pytest.raises(RequestError, match=endpoints[1]) as refusal:
            await group.match(["a"])
        assert refusal.value.reason == "unknown_engine"
