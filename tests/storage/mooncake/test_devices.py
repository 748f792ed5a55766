"""Rank N's objects pass the RDMA device that is its own, as in FastDeploy's transfer processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.storage.harness import Memory, mooncake_config
from tests.support.waits import until
from transferd.cli.pool.local import Master
from transferd.cli.pool.master import master_executable
from transferd.config import MooncakeStorageSection, Size
from transferd.storage.base import FOUND, STORED, Blob
from transferd.storage.mooncake import client
from transferd.storage.mooncake.client import PoolClient
from transferd.storage.mooncake.store import MooncakeStorage

MIB = 1024**2


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

    def joined(_: object, section: MooncakeStorageSection) -> SimpleNamespace:
        given.append(section.rdma_devices)
        return SimpleNamespace(code=0, store=None)

    library = SimpleNamespace(
        SoftPinAction=None,
        ReplicaStatus=SimpleNamespace(COMPLETE=3),
        TaskStatus=SimpleNamespace(PENDING=0, PROCESSING=1, SUCCESS=2),
    )
    monkeypatch.setattr(client, "_LibraryClient", joined)
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setitem(sys.modules, "mooncake", SimpleNamespace(store=library))
    pool = PoolClient(MooncakeStorageSection(rdma_devices="mlx5_0,mlx5_1", global_segment_size=Size(0)))
    for rank in range(3):
        pool._of(rank)
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
