"""examples/plain_files.py, which docs/backends.md names, is a backend that a daemon can use."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.storage.harness import Harness, Open
from transferd import Client, ReadStorageTask, Status, WriteStorageTask
from transferd.config import Config, from_tree
from transferd.daemon.daemon import Daemon
from transferd.storage.base import EXISTS, FOUND, MISSING, STORED, Blob, Outcome, Storage
from transferd.storage.registry import create_storage

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "plain_files", raising=False)
    return "plain_files:PlainFiles"


async def test_the_example_keeps_the_contract(example: str, tmp_path: Path, open_storage: Open) -> None:
    made = create_storage(config(example, tmp_path))
    assert made is not None
    store: Harness = await open_storage(made)
    assert await store.put(("a/b", b"content"), ("c", b"c")) == [STORED, STORED]
    assert await store.put(("a/b", b"content")) == [EXISTS]
    assert await store.storage.exists(["a/b", "c", "d"]) == [True, True, False]
    [one, other, none] = await store.get(("c", 1), ("a/b", 6), ("d", 4))
    assert (one, other[0], none[0]) == ((FOUND, b"c"), MISSING, MISSING)
    await store.storage.quarantine("c")
    assert await store.storage.exists(["c"]) == [False]


async def test_a_daemon_stores_and_loads_by_the_example(example: str, tmp_path: Path) -> None:
    daemon = Daemon(config(example, tmp_path))
    await daemon.open()
    try:
        async with Client(f"ipc://{tmp_path}/socket") as client:
            caches = await client.attach(0)
            arrays = [array for layers in caches.values() for array in layers]
            for array in arrays:
                array[:2] = 7
            written = await client.submit(WriteStorageTask(task_id="w", keys=["a", "b"], gpu_block_ids=[0, 1]))
            read = await client.submit(ReadStorageTask(task_id="r", keys=["a", "b"], gpu_block_ids=[2, 3]))
            assert (written.status, read.status) == (Status.OK, Status.OK)
            assert all((array[2:4] == array[:2]).all() for array in arrays)
            caches.clear()
            arrays.clear()
            del array
    finally:
        await daemon.stop(lambda: 10.0)


def config(example: str, path: Path) -> Config:
    cache = {"ranks": 1, "layers": 2, "kv_heads": 1, "head_dim": 16, "device_blocks": 4, "host_blocks": 0}
    return from_tree(
        {
            "server": {"endpoint": f"ipc://{path}/socket"},
            "cache": cache,
            "storage": {"backend": example, "file": {"path": str(path / "blocks")}},
            "metrics": {"listen": ""},
        }
    )


class Older(Storage):
    """As another package has one: a subclass of Storage itself, with `put` and `get`."""

    backend = "older"

    def __init__(self, config: Config, *, clock: object) -> None:
        self.objects: dict[str, bytes] = {}

    async def open(self) -> None: ...

    async def exists(self, names: Sequence[str]) -> list[bool]:
        return [name in self.objects for name in names]

    async def put(self, blobs: Sequence[Blob]) -> list[Outcome]:
        self.objects |= {blob.name: bytes(blob.data) for blob in blobs}
        return [STORED] * len(blobs)

    async def get(self, blobs: Sequence[Blob]) -> list[Outcome]:
        for blob in blobs:
            blob.data[:] = self.objects[blob.name]
        return [FOUND] * len(blobs)

    async def quarantine(self, name: str) -> None: ...

    async def close(self) -> None: ...

    def statistics(self) -> dict[str, Any]:
        return {}


async def test_a_class_with_only_put_and_get_still_works(monkeypatch: pytest.MonkeyPatch, open_storage: Open) -> None:
    monkeypatch.setitem(sys.modules, "elsewhere", sys.modules[__name__])
    made = create_storage(from_tree({"storage": {"backend": "elsewhere:Older"}}))
    assert isinstance(made, Older)
    store = await open_storage(made)
    assert await store.put(("a", b"content")) == [STORED]
    assert await store.get(("a", 7)) == [(FOUND, b"content")]


class Knowing(Older):
    """As one was written before `Storage.index`: it says without I/O what it has."""

    def find(self, names: Sequence[str], use: object) -> list[bool]:
        return [name in self.objects for name in names]


async def test_a_class_that_knows_its_objects_by_itself_still_does(
    monkeypatch: pytest.MonkeyPatch, open_storage: Open
) -> None:
    monkeypatch.setitem(sys.modules, "elsewhere", sys.modules[__name__])
    store = await open_storage(create_storage(from_tree({"storage": {"backend": "elsewhere:Knowing"}})))
    assert await store.put(("a", b"content")) == [STORED]
    assert store.storage.index.find(["a", "b"], None) == [True, False]
    assert store.storage.index.stored(["a", "b"], None) == [True, False]
    assert store.storage.index.hold("a") is None
