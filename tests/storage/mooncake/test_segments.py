"""Each rank that a daemon serves lends its part to the pool, as FastDeploy's transfer processes do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.storage.harness import Memory, mooncake_config, pool_storage
from tests.support.simulation.pool import SIM_MASTER, SimPool
from tests.support.waits import until
from transferd.cli.pool.local import Master
from transferd.cli.pool.master import master_executable
from transferd.config import MooncakeStorageSection, Size
from transferd.errors import StorageError
from transferd.storage.base import FOUND, STORED, Blob
from transferd.storage.mooncake.client import NativeClient, PoolClient
from transferd.storage.mooncake.devices import connect
from transferd.storage.mooncake.segments import Segments
from transferd.storage.mooncake.store import MooncakeStorage

MIB = 1024**2


class Pool:
    """Answers calls with scripted codes or errors."""

    def __init__(self, *answers: int | StorageError) -> None:
        self.answers = list(answers)
        self.lent: list[int] = []

    async def call(self, work: object) -> int:
        del work
        answer = self.answers.pop(0) if self.answers else 0
        if isinstance(answer, StorageError):
            raise answer
        self.lent.append(answer)
        return answer


def lending(nbytes: int) -> MooncakeStorageSection:
    return MooncakeStorageSection(segment_per_rank=True, global_segment_size=Size(nbytes))


async def test_a_segment_is_lent_for_each_rank_beyond_the_first_and_stays() -> None:
    pool = Pool()
    segments = Segments(lending(64 * MIB), pool.call)
    for rank in (1, 2, 3, 3):
        segments.began(rank, rank)
    await until(lambda: len(pool.lent) == 2)
    segments.ended(1)
    segments.began(4, 1)  # an engine that starts again finds its room
    segments.began(5, 2)
    await until(lambda: len(pool.lent) == 3)
    assert segments.lent == 4


async def test_a_node_that_lends_nothing_lends_nothing_later_either() -> None:
    pool = Pool()
    segments = Segments(lending(0), pool.call)
    for rank in range(8):
        segments.began(rank, rank)
    await asyncio.sleep(0)
    assert (pool.lent, segments.lent) == ([], 1)


@pytest.mark.parametrize("answer", [StorageError("this Mooncake version lends one segment only"), -1])
async def test_a_segment_that_is_not_lent_is_one_line(answer: int | StorageError) -> None:
    segments = Segments(lending(64 * MIB), Pool(answer).call)
    with capture_logs() as logs:
        for rank in range(2):
            segments.began(rank, rank)
        await until(lambda: bool(logs))
    assert [line["event"] for line in logs] == ["the pool gets no segment for a further rank"]


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


@pytest.mark.skipif(master_executable() is None, reason="mooncake-transfer-engine is not installed")
async def test_a_ranks_objects_pass_the_device_that_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FastDeploy's select_rdma_device: rank N has device N modulo their number. Over TCP; the library is real."""
    moved: dict[str, list[tuple[str, str]]] = {}
    monkeypatch.setattr("mooncake.store.MooncakeDistributedStore", recording(moved))
    with Master(tmp_path / "master.log") as master:
        section = mooncake_config(
            master.address,
            segment_per_rank=True,
            rdma_devices="mlx5_0,mlx5_1",
            global_segment_size=Size(32 * MIB),
        )
        storage = MooncakeStorage(section)
        await storage.open()
        ranks = [Memory(8192, rank) for rank in range(3)]
        for memory in ranks:
            storage.register(memory)
            memory.view[:4096] = bytes([memory.rank + 1]) * 4096
        assert list(moved) == ["mlx5_0", "mlx5_1"]
        blobs = [Blob(f"of rank {memory.rank}", memory.view[:4096]) for memory in ranks]
        assert await storage.put(blobs) == [STORED] * 3
        await until(lambda: len(master.segments()) == 3)
        assert len(set(master.segments())) == 2, "each client lends for its ranks"
        back = [Blob(blob.name, ranks[(i + 1) % 3].view[4096:]) for i, blob in enumerate(blobs)]
        assert await storage.get(back) == [FOUND] * 3
        assert [bytes(blob.data) for blob in back] == [bytes(memory.view[:4096]) for memory in ranks]
        for memory in ranks:
            storage.unregister(memory)
        await storage.close()
    assert {each for each in moved["mlx5_0"] if each[0] == "put"} == {("put", "of rank 0"), ("put", "of rank 2")}
    assert {each for each in moved["mlx5_0"] if each[0] == "get"} == {("get", "of rank 1"), ("get", "of rank 2")}
    assert sorted(moved["mlx5_1"]) == [("get", "of rank 0"), ("put", "of rank 1")]


def test_without_a_segment_for_each_rank_the_library_chooses_from_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr(NativeClient, "__init__", lambda _, section: given.append(section.rdma_devices))
    assert type(connect(MooncakeStorageSection(rdma_devices="mlx5_0,mlx5_1"))) is NativeClient
    assert given == ["mlx5_0,mlx5_1"]


def recording(moved: dict[str, list[tuple[str, str]]]) -> Callable[[], object]:
    """The library's class, except that `moved` gets what each client's devices put and get."""
    import mooncake.store

    real = mooncake.store.MooncakeDistributedStore

    class Recording:
        def __init__(self) -> None:
            self._real = real()

        def __getattr__(self, name: str) -> object:
            return getattr(self._real, name)

        def setup(self, *arguments: object) -> object:
            self._moved = moved.setdefault(str(arguments[5]), [])
            return self._real.setup(*arguments)

        def batch_put_from(self, keys: list[str], *arguments: object) -> object:
            self._moved += [("put", key) for key in keys]
            return self._real.batch_put_from(keys, *arguments)

        def batch_get_into(self, keys: list[str], *arguments: object) -> object:
            self._moved += [("get", key) for key in keys]
            return self._real.batch_get_into(keys, *arguments)

    return Recording
