"""Prefetches have ids, deadlines and one result; they end with their clients. Real daemons: tests/integration."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.storage.conftest import open_storage  # noqa: F401 - a fixture
from tests.storage.harness import Harness, Open, memory_config
from tests.support.gated_storage import GatedStorage, gated, stack
from tests.support.waits import until
from transferd.blocks.formats import ObjectPart
from transferd.config import LevelSection, from_tree
from transferd.daemon import prefetches as module
from transferd.daemon.prefetches import EnginePrefetches
from transferd.errors import RequestError, TransferError
from transferd.runtime.clock import SYSTEM_CLOCK
from transferd.runtime.loop_turns import OneATurn
from transferd.storage.base import Storage
from transferd.storage.memory import MemoryStorage
from transferd.tasks import Status
from transferd.wire import protocol as wire

RANKS, NBYTES = 2, 100
PARTS = [ObjectPart("_key", 0, 60), ObjectPart("_value", 60, NBYTES)]  # a block is two objects, as FastDeploy has it
KEYS = ["a", "b", "c"]


def names(keys: list[str]) -> list[list[str]]:
    return [[f"{key}_{rank}{part.suffix}" for rank in range(RANKS) for part in PARTS] for key in keys]


def of_rank(generation: str, keys: Sequence[str], rank: int) -> list[str]:
    assert generation == "g"
    return [f"{key}_{rank}" for key in keys]


class FakeEngine(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


def engine(name: str = "e") -> Any:
    return FakeEngine(
        owner=name,
        dispatcher=SimpleNamespace(generation="g"),
        objects=SimpleNamespace(parts=PARTS, ids=list, names=of_rank),
        workers=[SimpleNamespace(rank=rank, context=SimpleNamespace(object_rank=rank)) for rank in range(RANKS)],
        blocks=object(),
        tokens=None,
        shared=SimpleNamespace(pieces=OneATurn()),
    )


def lent(storage: Storage | None) -> Any:
    return SimpleNamespace(storage=storage, clock=SYSTEM_CLOCK, boot_id="boot")


async def below(open_: Open) -> tuple[EnginePrefetches, Harness, GatedStorage]:
    """All objects of KEYS lie in the lower of two levels, except a part of "c" on one rank."""
    lower = gated(MemoryStorage(memory_config(10**6)), "lower")
    store = await open_(stack(MemoryStorage(memory_config(10**5)), lower, lower=LevelSection(promote=0)))
    for of_block in names(KEYS):
        for name, part in zip(of_block, PARTS * RANKS, strict=True):
            if name != "c_1_value":
                await store.put((name, bytes(part.stop - part.start)))
    await store.levels.flush(10)
    for of_block in names(KEYS):
        for name in of_block:
            await store.levels.quarantine_at(name, 0)
    config = from_tree({"storage": {"levels": ["memory", "file"], "file": {"path": "/nowhere"}}})
    return EnginePrefetches(config, lent(store.storage)), store, lower


def asked(task_id: str = "p", keys: list[str] = KEYS, level: str = "memory", timeout: float = 60.0) -> wire.Prefetch:
    return wire.Prefetch(task_id, keys, level, timeout)


def kept(store: Harness) -> int:
    nbytes: int = store.storage.statistics()["levels"][0]["kept_bytes"]
    return nbytes


async def waits(storage: GatedStorage) -> None:
    await until(lambda: storage.waiting, "the call comes", look=0)


async def test_a_block_counts_if_every_rank_has_every_part_of_it(open_storage: Open) -> None:  # noqa: F811
    each, _, _ = await below(open_storage)
    result = await each.run(b"1", engine(), asked())
    assert (result.status, result.block_ids, result.boot_id, result.generation) == (Status.PARTIAL, [0, 1], "boot", "g")
    assert [(rank.rank, rank.blocks, rank.bytes) for rank in result.ranks] == [
        (0, 3, 3 * NBYTES),
        (1, 2, 2 * NBYTES + 60),
    ]
    assert result.bytes == 5 * NBYTES + 60


async def test_a_repeated_request_joins_and_lives_as_long_as_one_of_its_clients(open_storage: Open) -> None:  # noqa: F811
    each, store, lower = await below(open_storage)
    one = engine()
    lower.gate.clear()
    first = asyncio.ensure_future(each.run(b"1", one, asked()))
    second = asyncio.ensure_future(each.run(b"2", one, asked()))
    await waits(lower)
    assert lower.waiting == 1
    with pytest.raises(RequestError) as refused:
        await each.run(b"2", one, asked(keys=["a"]))
    assert refused.value.reason == "task_id_conflict"
    lower.gate.set()
    assert await first == await second == await each.run(b"1", one, asked())
    assert kept(store) > 0
    each.left(b"1")
    assert kept(store) > 0
    each.left(b"2")
    assert kept(store) == 0
    assert not each.cancel(one, "p")


async def test_a_cancel_answers_while_a_level_does_not(open_storage: Open) -> None:  # noqa: F811
    each, store, lower = await below(open_storage)
    one = engine()
    lower.gate.clear()
    running = asyncio.ensure_future(each.run(b"1", one, asked()))
    await waits(lower)
    assert not each.cancel(engine("other"), "p"), "ids are those of one engine"
    assert each.cancel(one, "p")
    result = await running
    assert (result.status, result.block_ids) == (Status.CANCELLED, [])
    lower.gate.set()
    await store.storage.close()


async def test_a_cancel_that_comes_at_once_finds_it(open_storage: Open) -> None:  # noqa: F811
    each, store, _ = await below(open_storage)
    one = engine()
    work = each.run(b"1", one, asked())
    assert each.cancel(one, "p")
    assert (await work).status is Status.CANCELLED
    assert kept(store) == 0


async def test_the_deadline_ends_a_prefetch_and_releases_its_objects(open_storage: Open) -> None:  # noqa: F811
    each, store, lower = await below(open_storage)
    lower.gate.clear()
    late = await each.run(b"1", engine(), asked(timeout=0.01))
    assert (late.status, late.error and late.error.code) == (Status.EXPIRED, "expired")
    lower.gate.set()
    await store.storage.close()


async def test_the_number_of_prefetches_of_an_engine_is_bounded(
    open_storage: Open,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST", 2)
    each, _, _ = await below(open_storage)
    one = engine()
    for i in range(2):
        await each.run(b"1", one, asked(f"p{i}"))
    with pytest.raises(TransferError) as refused:
        await each.run(b"1", one, asked("p2"))
    assert refused.value.reason == "too_many_requests"
    await each.run(b"1", engine("other"), asked("p2"))
    each.left(b"1")
    await each.run(b"1", one, asked("p2"))
    with pytest.raises(RequestError) as many:
        await each.run(b"1", one, asked("p3", ["k"] * 70_000))
    assert many.value.reason == "too_many_keys"
    each.left(b"1")


async def test_the_keys_of_the_prefetches_of_an_engine_are_bounded_and_one_alone_never_is(
    open_storage: Open,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 1000)
    each, _, _ = await below(open_storage)
    one = engine()
    await each.run(b"1", one, asked("p0", [f"{i:0200}" for i in range(10)]))
    with pytest.raises(TransferError) as refused:
        await each.run(b"1", one, asked("p1"))
    assert refused.value.reason == "too_many_requests"
    each.left(b"1")
    await each.run(b"1", one, asked("p1"))
    each.left(b"1")


async def test_a_store_of_one_level_and_none() -> None:
    config = from_tree({"storage": {"backend": "memory"}})
    storage = MemoryStorage(memory_config(10**5))
    await storage.open()
    each = EnginePrefetches(config, lent(storage))
    assert (await each.run(b"1", engine(), asked())).status is Status.MISS
    with pytest.raises(RequestError) as refused:
        await each.run(b"1", engine(), asked("q", level="file"))
    assert refused.value.reason == "unknown_level"
    client: Any = SimpleNamespace(belongs=True, engine=None, uid=None)
    with pytest.raises(RequestError) as refused:
        await each.warm(client, wire.Warm(10**9))
    assert refused.value.reason == "unknown_level"
    client.belongs = False
    with pytest.raises(RequestError) as refused:
        await each.warm(client, wire.Warm(10**9))
    assert refused.value.reason == "not_yours"
    with pytest.raises(RequestError) as refused:
        await EnginePrefetches(config, lent(None)).run(b"1", engine(), asked())
    assert refused.value.reason == "no_storage_tier"
    each.left(b"1")
    await storage.close()
