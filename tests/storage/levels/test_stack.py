"""Several levels as one storage: the order of use in each, random calls against a model, and a stack of one level."""

from __future__ import annotations

import asyncio
import random
import sys
from collections import OrderedDict
from pathlib import Path

import pytest

from tests.storage.harness import Harness, Open, file_config, memory_config
from tests.support.blobs import get, promise, put
from tests.support.gated_storage import gated, stack
from tests.support.waits import until
from transferd.config import Config, LevelSection, from_tree
from transferd.errors import Closed, ConfigError, StorageError
from transferd.storage.base import FOUND, STORED, Blob, Found, Item, Storage
from transferd.storage.file import FileStorage
from transferd.storage.levels.stack import LevelsStorage
from transferd.storage.lru import Use
from transferd.storage.memory import MemoryStorage
from transferd.storage.registry import create_storage

NBYTES = 1000


def name(i: int) -> str:
    return f"demo/0123456789abcdef/RL-1/{i:02x}/0"


def content(i: int) -> bytes:
    return random.Random(i).randbytes(NBYTES)


def memory_above_file(path: Path, sizes: list[int]) -> list[Storage]:
    return [
        MemoryStorage(memory_config(sizes[0] * NBYTES)),
        FileStorage(file_config(path, sizes[1] * NBYTES), unit=1),
    ]


def memory_above_file_above_memory(path: Path, sizes: list[int]) -> list[Storage]:
    return [*memory_above_file(path, sizes), gated(MemoryStorage(memory_config(sizes[2] * NBYTES)), "last")]


class Model:
    """Each level as a plain LRU, the least recently used first."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.levels: list[OrderedDict[int, None]] = [OrderedDict() for _ in sizes]

    def use(self, i: int) -> None:
        for level in self.levels:
            if i in level:
                level.move_to_end(i)

    def add(self, number: int, i: int) -> None:
        level = self.levels[number]
        level[i] = None
        level.move_to_end(i)
        while len(level) > self.sizes[number]:
            level.popitem(last=False)

    def where(self, i: int) -> int | None:
        return next((number for number, level in enumerate(self.levels) if i in level), None)


async def settled(store: Harness) -> LevelsStorage:
    levels = store.storage
    assert isinstance(levels, LevelsStorage)
    await levels.flush(30)
    await levels._promotions.running.settled()
    levels._touch_now()
    return levels


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("make", [memory_above_file, memory_above_file_above_memory])
async def test_each_level_evicts_in_the_order_of_all_uses(
    open_storage: Open, tmp_path: Path, make: object, seed: int
) -> None:
    sizes = [4, 9, 16] if make is memory_above_file_above_memory else [4, 9]
    assert callable(make)
    each = make(tmp_path, sizes)
    sections = {one.backend: LevelSection(promote=1) for one in each[1:]}
    store, model, rng = await open_storage(stack(*each, **sections)), Model(sizes), random.Random(seed)
    for _ in range(200):
        i = rng.randrange(24)
        store.reuse_memory()
        if rng.random() < 0.5:
            [outcome] = await store.put((name(i), content(i)))
            assert outcome.found in (Found.STORED, Found.EXISTS)
            at = model.where(i)
            model.use(i)
            for number in range(len(sizes)):
                if i not in model.levels[number] and (number == 0 or at is None or number > at or at > 0):
                    model.add(number, i)
        else:
            [(outcome, data)] = await store.get((name(i), NBYTES))
            at = model.where(i)
            assert (outcome.level if outcome.found is Found.FOUND else None) == at
            assert at is None or data == content(i)
            model.use(i)
            if at:
                model.add(at - 1, i)
        levels = await settled(store)
        for number, level in enumerate(levels.all_levels):
            there = {i for i in range(24) if level.storage.index.find([name(i)], None) == [True]}
            assert there == set(model.levels[number]), (seed, number)
        assert not levels.unsaved


@pytest.mark.parametrize("seed", range(4))
async def test_random_calls_get_right_bytes_and_what_was_stored_is_there(
    open_storage: Open, tmp_path: Path, seed: int
) -> None:
    """Nothing is damaged, and there is room for all: so nothing may be missing, whatever the order of events."""
    rng = random.Random(seed)
    store = await open_storage(stack(*memory_above_file(tmp_path, [6, 100])))
    stored: set[int] = set()
    for _ in range(150):
        store.reuse_memory()
        numbers = rng.sample(range(60), rng.randint(1, 6))
        if rng.random() < 0.5:
            outcomes = await store.put(*((name(i), content(i)) for i in numbers))
            assert {outcome.found for outcome in outcomes} <= {Found.STORED, Found.EXISTS}
            stored.update(numbers)
        elif rng.random() < 0.8:
            for i, (outcome, data) in zip(numbers, await store.get(*((name(i), NBYTES) for i in numbers)), strict=True):
                assert (outcome.found is Found.FOUND) == (i in stored), (seed, i)
                assert i not in stored or data == content(i)
        else:
            assert await store.storage.exists([name(i) for i in numbers]) == [i in stored for i in numbers]


async def test_objects_copied_down_are_there_after_a_restart(open_storage: Open, tmp_path: Path) -> None:
    store = await open_storage(stack(*memory_above_file(tmp_path, [10, 50])))
    assert await store.put(*((name(i), content(i)) for i in range(8))) == [STORED] * 8
    await store.levels.flush(30)
    await store.storage.close()
    again = await open_storage(stack(*memory_above_file(tmp_path, [10, 50])))
    got = await again.get(*((name(i), NBYTES) for i in range(8)))
    assert [(outcome.level, data) for outcome, data in got] == [(1, content(i)) for i in range(8)]


async def test_a_level_that_hangs_at_close_keeps_no_other_from_closing(open_storage: Open, tmp_path: Path) -> None:
    hangs = asyncio.Event()

    class Hangs(MemoryStorage):
        async def close(self) -> None:
            await hangs.wait()
            await super().close()

    lower = FileStorage(file_config(tmp_path, 50 * NBYTES), unit=1)
    store = await open_storage(stack(Hangs(memory_config(10 * NBYTES)), lower))
    closing = asyncio.ensure_future(store.storage.close())
    await until(lambda: lower._directory.home.lock.problem(), "it has closed, and another daemon may have it")
    assert not closing.done()
    hangs.set()
    await closing


async def test_statistics_have_a_row_for_each_level(open_storage: Open, tmp_path: Path) -> None:
    store = await open_storage(stack(*memory_above_file(tmp_path, [10, 50])))
    await store.put((name(1), content(1)))
    await store.levels.flush(30)
    assert [outcome for outcome, _ in await store.get((name(1), NBYTES))] == [FOUND]
    rows = store.storage.statistics()["levels"]
    assert [(row["name"], row["objects"], row["bytes"], row["capacity"], row["hits"]) for row in rows] == [
        ("memory", 1, NBYTES, 10 * NBYTES, 1),
        ("file", 1, NBYTES, 50 * NBYTES, 0),
    ]
    assert [(row["pending_bytes"], row["lost"], row["available"]) for row in rows] == [(0, 0, True)] * 2


def test_one_level_is_the_backend_itself() -> None:
    config = from_tree({"cache": {}, "storage": {"levels": ["memory"]}})
    assert type(create_storage(config)) is MemoryStorage
    two = create_storage(from_tree({"cache": {}, "storage": {"levels": ["memory", "file"]}}))
    assert isinstance(two, LevelsStorage)
    assert (two.backend, two.names) == ("memory>file", ["memory", "file"])
    assert type(create_storage(Config())) is FileStorage


def test_an_unknown_level_is_named() -> None:
    with pytest.raises(ConfigError, match=r"storage\.levels: expected one of memory, file"):
        create_storage(from_tree({"cache": {}, "storage": {"levels": ["memory", "tape"]}}))


@pytest.mark.parametrize("shared", [False, True], ids=["a store", "a hand-over"])
async def test_pins_cost_a_store_and_a_load_nothing(open_storage: Open, shared: bool) -> None:
    """Calls are counted, of Python and of C: 20,000 pins once made a write of 8 blocks twenty times as slow."""
    calls: list[int] = []
    for count in (10, 20_000):
        bucket = gated(MemoryStorage(memory_config(2**30)), "object", asks=True)
        first = MemoryStorage(memory_config(2**30))
        store = await open_storage(stack(first, bucket))
        names = [f"demo/0123456789abcdef/RL-1/{i:05x}/0" for i in range(count + 8)]
        slot = store.buffer(64, b"p" * 64)
        items = [Item(one, 64, Use(), 0) for one in names[8:]]
        for start in range(0, count, 512):
            some = items[start : start + 512]
            assert set(await store.storage.store(some, None, [slot] * len(some))) == {STORED}
        await store.levels.flush(60)
        keeper = store.storage.keeper
        assert keeper is not None
        assert all(await keeper.pin("me", names[8:], 60.0, 0.5))
        store.levels._touch_now()  # the uses so far
        await store.levels._sweep._starting.settled()
        seen = 0

        def profile(_frame: object, event: str, _argument: object) -> None:
            nonlocal seen
            seen += event in ("call", "c_call")

        use = Use()
        use.shared = shared
        blobs = [Blob(one, slot, use, depth) for depth, one in enumerate(names[:8])]
        sys.setprofile(profile)
        try:
            await (promise(store.storage, blobs) if shared else put(store.storage, blobs))
            await store.levels.flush(60)
            await get(store.storage, blobs)
            store.levels._touch_now()
        finally:
            sys.setprofile(None)
        calls.append(seen)
        store.reuse_memory()
    assert calls[1] < calls[0] + 200, calls


async def test_a_stack_whose_buffers_cannot_be_registered_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    each = [gated(MemoryStorage(memory_config(10 * NBYTES)), one) for one in ("first", "last")]

    def register(_: object) -> None:
        raise StorageError("no more memory can be registered")

    monkeypatch.setattr(each[0], "register", register)
    storage = stack(*each)
    with pytest.raises(StorageError, match="no more memory"):
        await storage.open()
    for one in each:
        with pytest.raises(Closed):
            await one.exists([name(0)])
