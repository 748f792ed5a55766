"""Other layouts of a model in a pool: seen, told once, counted when they are why a look-up found nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from tests.storage.harness import Open
from tests.support.simulation.pool import SIM_MASTER, SimPool
from transferd.blocks.formats import ObjectNamer, key_digest
from transferd.blocks.layout import build_layout
from transferd.config import Config, from_tree
from transferd.runtime.clock import Clock
from transferd.storage.base import Storage
from transferd.storage.mooncake import MooncakeStorage, error_codes
from transferd.storage.mooncake.layout_records import LOOK_EVERY_S, RECORD_BYTES, SLOTS

WARNING = "another layout of this model is in the pool: its blocks are misses here"


def config(ranks: int = 2, model: str = "demo", **cache: object) -> Config:
    mooncake = {"master_server_addr": SIM_MASTER}
    return from_tree({"cache": {"ranks": ranks, **cache}, "storage": {"model": model, "mooncake": mooncake}})


class Hands:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.clock = replace(Clock(), monotonic=lambda: self.now)

    def later(self) -> None:
        self.now += LOOK_EVERY_S


def names(settings: Config, *keys: str, rank: int = 0) -> list[str]:
    namer = ObjectNamer(settings.storage.model, build_layout(settings.geometry).fingerprint)
    return namer.names("", [key_digest(key) for key in keys], rank)


async def settled(storage: Storage) -> MooncakeStorage:
    assert isinstance(storage, MooncakeStorage)
    assert storage._layouts is not None
    await storage._layouts.settled()
    return storage


async def test_a_miss_because_of_another_tensor_parallel_size_is_counted_and_logged_once(
    open_storage: Open,
) -> None:
    pool, p, d = SimPool(), config(ranks=2), config(ranks=4)
    prefill = await open_storage(MooncakeStorage.from_config(p, set_up=pool.set_up))
    with capture_logs() as logs:
        decode = await open_storage(MooncakeStorage.from_config(d, set_up=pool.set_up))
    fingerprints = {name: build_layout(settings.geometry) for name, settings in (("p", p), ("d", d))}
    (line,) = [line for line in logs if line["event"] == WARNING]
    assert line["ours"] == f"{fingerprints['d'].fingerprint} {fingerprints['d'].identity}"
    assert line["theirs"] == f"{fingerprints['p'].fingerprint} {fingerprints['p'].identity}"
    await prefill.put(*((name, b"kv") for name in names(p, "a", "b")))
    with capture_logs() as logs:
        for _ in range(3):
            assert await decode.storage.exists(names(d, "a", "b")) == [False, False]
    await settled(decode.storage)
    statistics = decode.storage.statistics()
    assert statistics["other_layout"] == 3
    assert statistics["other_layouts"] == {fingerprints["p"].fingerprint: fingerprints["p"].identity}
    assert not logs, "it was told at the start"


async def test_a_key_that_was_never_stored_does_not_count_as_another_layouts(open_storage: Open) -> None:
    pool = SimPool()
    await open_storage(MooncakeStorage.from_config(config(ranks=2), set_up=pool.set_up))
    decode = await open_storage(MooncakeStorage.from_config(config(ranks=4), set_up=pool.set_up))
    assert await decode.storage.exists(names(config(ranks=4), "a")) == [False]
    assert (await settled(decode.storage)).statistics()["other_layout"] == 0


async def test_a_daemon_that_was_there_first_learns_of_the_other_at_its_next_miss(open_storage: Open) -> None:
    pool, hands, p, d = SimPool(), Hands(), config(ranks=2), config(ranks=4)
    decode = await open_storage(MooncakeStorage.from_config(d, set_up=pool.set_up, clock=hands.clock))
    prefill = await open_storage(MooncakeStorage.from_config(p, set_up=pool.set_up))
    await prefill.put((names(p, "a")[0], b"kv"))
    assert await decode.storage.exists(names(d, "a")) == [False]
    assert (await settled(decode.storage)).statistics()["other_layout"] == 0, "it looked a moment ago"
    hands.later()
    with capture_logs() as logs:
        assert await decode.storage.exists(names(d, "a")) == [False]
        assert (await settled(decode.storage)).statistics()["other_layout"] == 1
        hands.later()
        assert await decode.storage.exists(names(d, "b")) == [False]
        await settled(decode.storage)
    assert [line["event"] for line in logs] == [WARNING], "told once, however often it looks"


async def test_of_two_layouts_that_want_one_slot_at_once_the_second_takes_the_next(open_storage: Open) -> None:
    pool, others = SimPool(), SimPool()
    await open_storage(MooncakeStorage.from_config(config(ranks=4), set_up=others.set_up))
    slot = "transferd/layouts/demo/0"

    def overtake(operation: str, keys: Sequence[str]) -> None:
        if operation == "put" and slot in keys:
            pool.objects[slot] = others.objects[slot]

    pool.before = overtake
    harness = await open_storage(MooncakeStorage.from_config(config(ranks=2), set_up=pool.set_up))
    assert sorted(pool.objects) == [slot, "transferd/layouts/demo/1"]
    assert list(harness.storage.statistics()["other_layouts"]) == [build_layout(config(ranks=4).geometry).fingerprint]


async def test_every_rank_looks_up_and_one_of_them_counts(open_storage: Open) -> None:
    pool, p, d = SimPool(), config(ranks=4), config(ranks=2)
    prefill = await open_storage(MooncakeStorage.from_config(p, set_up=pool.set_up))
    decode = await open_storage(MooncakeStorage.from_config(d, set_up=pool.set_up))
    await prefill.put(*((names(p, "a", rank=rank)[0], b"kv") for rank in range(4)))
    await asyncio.gather(*(decode.storage.exists(names(d, "a", rank=rank)) for rank in range(2)))
    assert (await settled(decode.storage)).statistics()["other_layout"] == 1


async def test_equal_layouts_share_one_record_and_other_models_do_not_matter(open_storage: Open) -> None:
    pool = SimPool()
    with capture_logs() as logs:
        for settings in (config(), config(), config(ranks=8, model="another")):
            await open_storage(MooncakeStorage.from_config(settings, set_up=pool.set_up))
    assert sorted(pool.objects) == ["transferd/layouts/another/0", "transferd/layouts/demo/0"]
    assert not logs


async def test_layouts_beyond_the_slots_are_not_recorded_and_harm_nothing(
    open_storage: Open,
) -> None:
    pool = SimPool()
    for ranks in range(1, SLOTS + 3):
        last = await open_storage(MooncakeStorage.from_config(config(ranks=ranks), set_up=pool.set_up))
    assert len(pool.objects) == SLOTS
    assert len(last.storage.statistics()["other_layouts"]) == SLOTS


async def test_a_record_that_is_lost_is_left_again(open_storage: Open) -> None:
    pool, hands = SimPool(), Hands()
    harness = await open_storage(MooncakeStorage.from_config(config(), set_up=pool.set_up, clock=hands.clock))
    pool.objects.clear()  # a restarted master
    hands.later()
    await harness.storage.exists(names(config(), "a"))
    await settled(harness.storage)
    assert list(pool.objects) == ["transferd/layouts/demo/0"]


@pytest.mark.parametrize("record", [b"\xff" * RECORD_BYTES, b"short", b"".ljust(RECORD_BYTES, b"\0")])
async def test_an_invalid_record_is_skipped(open_storage: Open, record: bytes) -> None:
    pool = SimPool()
    pool.objects["transferd/layouts/demo/0"] = record
    harness = await open_storage(MooncakeStorage.from_config(config(), set_up=pool.set_up))
    assert harness.storage.statistics()["other_layouts"] == {}
    assert pool.objects["transferd/layouts/demo/1"].startswith(build_layout(config().geometry).fingerprint.encode())


async def test_a_pool_that_is_shared_with_fastdeploy_gets_no_record(open_storage: Open) -> None:
    pool = SimPool()
    tree = {"storage": {"key_schema": "fastdeploy", "mooncake": {"master_server_addr": SIM_MASTER}}}
    harness = await open_storage(MooncakeStorage.from_config(from_tree(tree), set_up=pool.set_up))
    assert await harness.storage.exists(["prefix_hash_0_key", "prefix/0"]) == [False, False]
    assert not pool.objects
    assert harness.storage.statistics()["other_layout"] == 0


@pytest.mark.parametrize("operation", ["get", "put", "exists"])
async def test_a_pool_that_fails_to_answer_about_layouts_delays_no_answer(open_storage: Open, operation: str) -> None:
    pool, hands = SimPool(), Hands()
    for code in (error_codes.TRANSFER_FAIL, error_codes.NO_AVAILABLE_HANDLE):
        pool.answer(operation, code, times=SLOTS)
        harness = await open_storage(MooncakeStorage.from_config(config(), set_up=pool.set_up, clock=hands.clock))
        pool._scripted.clear()
        assert await harness.storage.exists(names(config(), "a")) == [False]
        await settled(harness.storage)
        assert harness.storage.statistics()["breaker"] == "closed"
