"""Loads by parts, from a real daemon: what it says of a part is so, and of wrong bytes it does not say it."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.caches import Caches, attach, fill, snapshot, wipe
from tests.support.waits import until
from transferd import Client, ReadStorageTask, Status, WriteStorageTask
from transferd.client.launch import running
from transferd.workers.cpu_blocks import NATIVE

pytestmark = pytest.mark.skipif(not NATIVE, reason="the installation had no compiler")

RANKS, BLOCKS, LAYERS = 2, 70, 7  # more blocks than one call to storage takes
CACHE = {"ranks": RANKS, "layers": LAYERS, "kv_heads": 2, "head_dim": 32, "block_size": 16, "device_blocks": 2 * BLOCKS}
LAYER = 2 * 2 * 32 * 16 * 2  # bytes of a block
KEYS = [f"key {i}" for i in range(BLOCKS)]
SOURCE, TARGET = list(range(BLOCKS)), list(range(BLOCKS, 2 * BLOCKS))
ENDS = {2: 2 * LAYER, 4: 4 * LAYER}


def layers_of(caches: Caches, blocks: list[int], layers: int) -> list[bytes]:
    """The first layers of these blocks, on every rank."""
    return [
        array[block].tobytes()
        for cache in caches
        for of_plane in cache.values()
        for array in of_plane[:layers]
        for block in blocks
    ]


@dataclasses.dataclass
class Stored:
    client: Client
    caches: Caches
    place: Path
    said: list[int] = dataclasses.field(default_factory=list)
    wrong: list[int] = dataclasses.field(default_factory=list)
    tasks: int = 0

    async def load(self, **more: Any) -> Any:
        """Load all blocks; what is said of a part is compared with the memory at that moment."""
        self.tasks += 1
        self.said.clear()
        wipe(self.caches, TARGET)

        def progressed(layers: int) -> None:
            self.said.append(layers)
            if layers_of(self.caches, TARGET, layers) != layers_of(self.caches, SOURCE, layers):
                self.wrong.append(layers)

        task = ReadStorageTask(
            task_id=f"r{self.tasks}", keys=KEYS, gpu_block_ids=TARGET, prefix=False, **{"by_parts": True} | more
        )
        return await self.client.submit(task, progressed=progressed)

    def object(self, key: int, rank: int) -> Path:
        """The file that holds a block of a rank, found by its bytes."""
        wanted = b"".join(of_plane[0][SOURCE[key]].tobytes() for of_plane in self.caches[rank].values())
        files = [path for path in (self.place / "blocks").rglob("*") if path.is_file()]
        (found,) = [path for path in files if "quarantine" not in path.parts and wanted in path.read_bytes()]
        return found


@pytest.fixture(params=["file", "memory", "levels"])
async def stored(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stored]:
    file = {"path": str(tmp_path / "blocks")}
    backends: dict[str, dict[str, Any]] = {
        "file": {"backend": "file", "file": file},
        "memory": {"backend": "memory"},
        "levels": {"levels": ["memory", "file"], "file": file},
    }
    with running({"cache": CACHE, "storage": backends[request.param]}, tmp_path) as daemon:
        async with Client(daemon.endpoint) as client:
            caches = await attach(client, RANKS)
            fill(caches, SOURCE, seed=1)
            write = WriteStorageTask(task_id="w", keys=KEYS, gpu_block_ids=SOURCE)
            assert (await client.submit(write)).status is Status.OK
            yield Stored(client, caches, tmp_path)


async def test_parts_are_said_in_order_and_are_there_on_every_rank(stored: Stored) -> None:
    for _ in range(5):
        result = await stored.load()
        assert (result.status, result.block_ids) == (Status.OK, TARGET)
        assert snapshot(stored.caches, TARGET) == snapshot(stored.caches, SOURCE)
        assert stored.said == [2, 4]
    assert stored.wrong == []
    hits = (await stored.client.stats())["storage"]["hits"]
    assert hits == 5 * RANKS * BLOCKS, "a load counts once, in however many parts it came"


async def test_a_task_without_by_parts_gets_no_progress(stored: Stored) -> None:
    assert (await stored.load(by_parts=False)).status is Status.OK
    assert stored.said == []


@pytest.mark.parametrize("stored", ["file"], indirect=True)
@pytest.mark.parametrize(("layer", "said"), [(0, []), (1, []), (2, [2]), (3, [2]), (4, [2, 4]), (6, [2, 4])])
@pytest.mark.parametrize("key", [0, 66])
async def test_a_damaged_layer_on_one_rank_ends_the_progress(
    stored: Stored, layer: int, said: list[int], key: int
) -> None:
    path = stored.object(key, rank=1)
    data = bytearray(path.read_bytes())
    data[layer * LAYER + 100] ^= 4
    path.write_bytes(data)
    result = await stored.load()
    good = [block for i, block in enumerate(TARGET) if i != key]
    assert (result.status, result.block_ids) == (Status.PARTIAL, good)
    assert (stored.said, stored.wrong) == (said, [])
    left = [i for i in range(BLOCKS) if i != key]
    assert snapshot(stored.caches, good) == snapshot(stored.caches, [SOURCE[i] for i in left])
    await until(lambda: not path.exists(), "the object is set aside")
    assert await stored.client.exists([KEYS[key]]) == [False]
    assert (await stored.load()).block_ids == good, "the rest is found again, by parts"
    assert stored.said == []
