"""Each rank that a daemon serves lends its part to the pool, as FastDeploy's transfer processes do."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.storage.harness import Memory, mooncake_config, pool_storage
from tests.support.simulation.pool import SIM_MASTER, SimPool, SimPoolClient
from tests.support.waits import until
from transferd.cli.pool.local import Master
from transferd.cli.pool.master import master_executable
from transferd.config import MooncakeStorageSection, Size
from transferd.errors import StorageError
from transferd.storage.mooncake import MooncakeStorage
from transferd.storage.mooncake.client import PoolClient

MIB = 1024**2


class Pool(SimPool):
    """Answers requests to lend with scripted codes or errors."""

    def __init__(self, *answers: int | Exception) -> None:
        super().__init__()
        self.answers = list(answers)

    def set_up(self, section: MooncakeStorageSection) -> SimPoolClient:
        return Client(self, hard_pin=section.hard_pin)


class Client(SimPoolClient):
    pool: Pool

    def lend(self, nbytes: int, rank: int = 0) -> int:
        answer = self.pool.answers.pop(0) if self.pool.answers else 0
        if isinstance(answer, Exception):
            raise answer
        return answer or super().lend(nbytes, rank)


async def lending(pool: Pool, nbytes: int = 64 * MIB) -> MooncakeStorage:
    section = mooncake_config(SIM_MASTER, segment_per_rank=True, global_segment_size=Size(nbytes))
    storage = MooncakeStorage(section, set_up=pool.set_up)
    await storage.open()
    return storage


async def test_a_segment_is_lent_for_each_rank_beyond_the_first_and_stays() -> None:
    pool = Pool()
    storage = await lending(pool)
    first, *more = (Memory(4096, rank) for rank in (1, 2, 3))
    for memory in (first, *more, more[-1]):
        storage.register(memory)
    await until(lambda: len(pool.lent) == 2)
    storage.unregister(first)
    later = [Memory(4096, rank) for rank in (1, 2)]  # an engine that starts again finds its room
    for memory in later:
        storage.register(memory)
    await until(lambda: len(pool.lent) == 3)
    assert storage._lent == 4
    await storage.close()


async def test_objects_of_several_sizes_of_one_rank_are_one_rank() -> None:
    """V1's keys and scales are engines of one worker, and routing replay's objects one of the same process."""
    pool = Pool()
    storage = await lending(pool)
    workers = [Memory(4096, rank, process) for process, rank in ((11, 0), (11, 0), (12, 1), (12, 1), (13, 0))]
    carrier = Memory(4096)  # between levels: no rank's
    carrier.lender = None
    for memory in (*workers, carrier):
        storage.register(memory)
    await until(lambda: len(pool.lent) == 2)
    storage.unregister(workers[0])
    assert storage._lent == 3, "two ranks of one engine, and one of another"
    await storage.close()


async def test_a_node_that_lends_nothing_lends_nothing_later_either() -> None:
    pool = Pool()
    storage = await lending(pool, 0)
    ranks = [Memory(4096, rank) for rank in range(8)]
    for memory in ranks:
        storage.register(memory)
    await asyncio.sleep(0)
    assert storage._lent == 1
    await storage.close()
    assert not pool.lent


@pytest.mark.parametrize("answer", [StorageError("this Mooncake version lends one segment only"), -1])
async def test_a_segment_that_is_not_lent_is_one_line(answer: int | StorageError) -> None:
    storage = await lending(Pool(answer))
    ranks = [Memory(4096, rank) for rank in range(2)]
    with capture_logs() as logs:
        for memory in ranks:
            storage.register(memory)
        await until(lambda: bool(logs))
    assert [line["event"] for line in logs] == ["the pool gets no segment for a further rank"]
    await storage.close()


async def test_a_bug_while_a_segment_is_lent_is_reported() -> None:
    storage = await lending(Pool(KeyError("wrong")))
    loop, reported = asyncio.get_running_loop(), list[object]()
    loop.set_exception_handler(lambda _, context: reported.append(context.get("exception")))
    ranks = [Memory(4096, rank) for rank in range(2)]
    for memory in ranks:
        storage.register(memory)
    await until(lambda: gc.collect() is not None and reported)
    loop.set_exception_handler(None)
    await storage.close()
    assert [str(one) for one in reported] == ["'wrong'"]


async def test_a_segment_that_was_not_lent_is_lent_for_the_next_rank() -> None:
    pool = Pool(StorageError("no thread"))
    storage = await lending(pool)
    first, second = (Memory(4096, rank) for rank in range(2))
    with capture_logs() as logs:
        storage.register(first)
        storage.register(second)
        await until(lambda: bool(logs))
    storage.unregister(second)
    third = Memory(4096, 1)
    storage.register(third)
    await until(lambda: len(pool.lent) == 1)
    assert storage._lent == 2
    await storage.close()


@pytest.mark.parametrize(("each", "expected"), [(True, 2), (False, 0)])
async def test_a_daemon_lends_for_the_memory_of_its_ranks(each: bool, expected: int) -> None:
    sim = SimPool()
    storage = pool_storage(mooncake_config(SIM_MASTER, segment_per_rank=each), set_up=sim.set_up)
    await storage.open()
    ranks = [Memory(4096) for _ in range(3)]
    for memory in ranks:
        storage.register(memory)
    await until(lambda: len(sim.lent) == expected)
    for memory in ranks:
        storage.unregister(memory)
    storage.register(ranks[0])
    await storage.close()
    assert sim.lent == [64 * MIB] * expected


@pytest.mark.skipif(master_executable() is None, reason="mooncake-transfer-engine is not installed")
async def test_a_real_master_sees_the_memory_of_every_rank(tmp_path: Path) -> None:
    with Master(tmp_path / "master.log") as master:
        section = mooncake_config(master.address, segment_per_rank=True, global_segment_size=Size(32 * MIB))
        storage = pool_storage(section)
        await storage.open()
        ranks = [Memory(4096) for _ in range(4)]
        for memory in ranks:
            storage.register(memory)
        await until(lambda: len(master.segments()) == 4)
        client: PoolClient | None = storage._client
        assert client is not None
        assert client.lend(32 * MIB) == 0
        assert len(master.segments()) == 5
        for memory in ranks:
            storage.unregister(memory)
        await storage.close()
