"""Shares are given out once; who may purge and pin what. With real users: tests/integration/test_purge.py."""

from __future__ import annotations

import os
import threading
from asyncio import get_running_loop, sleep
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.daemon.test_engines import running, serving
from tests.integration.own_memory import write
from tests.support.blobs import put
from transferd import Client, Status
from transferd.blocks.formats import ObjectNamer
from transferd.config import from_tree
from transferd.daemon import holdings as module
from transferd.daemon import lookup
from transferd.daemon.holdings import Holdings
from transferd.daemon.lookup import MAX_MATCH_KEYS, object_names
from transferd.errors import ConfigError, RequestError
from transferd.runtime.aio import answered
from transferd.runtime.clock import SYSTEM_CLOCK
from transferd.runtime.loop_turns import OneATurn
from transferd.storage.base import STORED, Blob, Found, Storage
from transferd.storage.levels.stack import LevelsStorage
from transferd.storage.lru import Use
from transferd.storage.memory import MemoryStorage
from transferd.storage.object_store import ObjectStorage
from transferd.storage.paths import path_of
from transferd.storage.queues import EngineOwner
from transferd.storage.registry import create_storages
from transferd.wire import protocol as wire


def holdings(share: float, backend: str = "memory") -> Holdings:
    config = from_tree({"engines": {"storage_share": share}, "storage": {"backend": backend}})
    return Holdings(config, MemoryStorage.from_config(config, clock=SYSTEM_CLOCK))


def engine(name: str, share: float) -> Any:
    objects = SimpleNamespace(space=f"{name}/f")
    return SimpleNamespace(owner=EngineOwner(name, 1), storage_share=share, objects=objects, cache=SimpleNamespace())


def test_shares_add_up_to_the_whole_store_and_no_more() -> None:
    held = holdings(0.4)
    for name, asked, given in (("a", None, 0.4), ("b", 0.3, 0.3), ("c", None, 0.3), ("d", None, 0.0), ("e", 0.0, 0.0)):
        share = held.share_of(asked)
        assert share == pytest.approx(given), name
        held.came(engine(name, share))
    with pytest.raises(RequestError, match="0 are left") as refused:
        held.share_of(0.1)
    assert refused.value.reason == "share_exceeded"
    with pytest.raises(RequestError, match=r"one engine may have 0\.4"):
        held.share_of(0.5)


def test_a_daemon_without_storage_gives_no_share() -> None:
    config = from_tree({"storage": {"backend": "none"}})
    held = Holdings(config, None)
    assert held.share_of(None) == 0.0
    assert held.report() == []
    held.came(engine("a", 0.0))
    held.left(engine("a", 0.0))


async def test_an_engine_that_leaves_late_takes_nothing_of_the_next_one_of_its_name() -> None:
    held = holdings(0.4)
    before, after = engine("a", 0.4), engine("a", 0.4)
    held.came(before)
    held.came(after)
    held.left(before)
    assert held.left_over == pytest.approx(0.6)
    held.left(after)
    assert held.left_over == 1.0


async def test_a_bucket_does_not_know_its_objects_so_it_keeps_none_for_anybody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "unused")
    bucket = {"url": "s3://blocks/x", "endpoint": "http://127.0.0.1:9", "region": "us-east-1"}
    tree = {"storage": {"backend": "object", "object": bucket}}
    with pytest.raises(ConfigError, match="object cannot keep shares"):
        create_storages(from_tree(tree | {"engines": {"storage_share": 0.4}}))
    config = from_tree(tree)
    held = Holdings(config, ObjectStorage.from_config(config, clock=SYSTEM_CLOCK))
    held.came(engine("a", held.share_of(None)))
    assert held.report() == []
    for refused in (
        lambda: held.purge(Mock(), wire.Purge()),
        lambda: held.pin(Mock(), wire.Pin(["k"], 1.0)),
        lambda: held.unpin(Mock(), wire.Unpin(None)),
    ):
        with pytest.raises(RequestError, match="the object backend") as error:
            await refused()
        assert error.value.reason == "backend_cannot"


@pytest.mark.parametrize(
    ("uid", "backend", "code"),
    [
        (None, "memory", "not_yours"),
        (os.geteuid() + 1, "memory", "not_yours"),
        (os.geteuid(), "memory", "unknown_level"),
        (0, "memory", "unknown_level"),
        (0, "none", "no_storage_tier"),
    ],
)
async def test_only_the_daemons_user_and_root_change_levels(uid: int | None, backend: str, code: str) -> None:
    client: Any = SimpleNamespace(uid=uid, pid=7)
    store = object.__new__(MemoryStorage) if backend == "memory" else None
    held = Holdings(from_tree({"storage": {"backend": backend}}), store)
    with pytest.raises(RequestError) as refused:
        await held.change_level(client, wire.ChangeLevel("memory", leaves=True))
    assert refused.value.reason == code


# --- who may purge what ---------------------------------------------------------------------------

WHOLE = [SimpleNamespace(suffix="")]  # the parts of a block that is one object
ME, ALICE, BOB = os.geteuid() or 1, 70_001, 70_002


def hosted(name: str, uid: int | None, generation: str = "g") -> Any:
    """An engine as Holdings sees it. uid: who registered it; None: that of [cache]."""
    space = f"m/{name}"

    def names(generation: str, keys: Sequence[str], rank: int) -> list[str]:
        return [f"{space}/{generation}/{key}/{rank}" for key in keys]

    return SimpleNamespace(
        owner=EngineOwner(name, uid),
        storage_share=0.0,
        objects=SimpleNamespace(space=space, ids=list, names=names, parts=WHOLE),
        registration=None if uid is None else object(),
        dispatcher=SimpleNamespace(generation=generation),
        cache=SimpleNamespace(),
        workers=[SimpleNamespace(context=SimpleNamespace(object_rank=rank)) for rank in (0, 1)],
        blocks=object(),
        tokens=None,
        shared=SimpleNamespace(pieces=OneATurn()),
    )


def client(uid: int | None, engine: Any = None, *, belongs: bool = False) -> Any:
    return SimpleNamespace(uid=uid, who=(uid, None if uid is None else 7), engine=engine, belongs=belongs)


OWN, ALICES, BOBS = hosted("own", None), hosted("alice", ALICE), hosted("bob", BOB)
EVERYTHING = {"own": 4, "alice": 4, "bob": 4}


@pytest.fixture
async def full() -> AsyncIterator[Holdings]:
    """Each of the three engines has the blocks k1 and k2 of two ranks, ten bytes each. Bob's engine has left."""
    config = from_tree({"storage": {"backend": "memory"}, "engines": {"pin_share": 0.5}})
    storage = MemoryStorage.from_config(config, clock=SYSTEM_CLOCK)
    await storage.open()
    held = Holdings(config, storage)
    for each in (OWN, ALICES, BOBS):
        held.came(each)
        names = [name for names in await object_names(each, ["k1", "k2"]) for name in names]
        use = Use(owner=each.owner)
        blobs = [Blob(name, memoryview(bytes(10)), use, depth) for depth, name in enumerate(names)]
        assert await put(storage, blobs) == [STORED] * 4
    held.left(BOBS)
    yield held
    await storage.close()


def left_in(held: Holdings) -> dict[str, int]:
    assert held._storage is not None
    names = [name for name, _ in held._storage.index.hottest_first()]
    return {engine: sum(name.startswith(f"m/{engine}/") for name in names) for engine in EVERYTHING}


@pytest.mark.parametrize(
    ("who", "named", "gone"),
    [
        (client(ME), "", ["own", "alice", "bob"]),
        (client(ME), "alice", ["alice"]),
        (client(0), "bob", ["bob"]),
        (client(ALICE), "alice", ["alice"]),
        (client(BOB), "bob", ["bob"]),  # also after it has left
        (client(ALICE, ALICES), "", ["alice"]),
        (client(BOB, ALICES, belongs=True), "", ["alice"]),  # it is a part of her engine
        (client(None, ALICES, belongs=True), "alice", ["alice"]),
        (client(ALICE), "bob", "not_yours"),
        (client(ALICE, ALICES, belongs=True), "bob", "not_yours"),
        (client(ALICE), "own", "not_yours"),
        (client(ALICE, OWN, belongs=True), "", "not_yours"),  # nobody registers that of [cache]
        (client(BOB, ALICES), "", "not_yours"),  # it may only control her engine
        (client(None, ALICES), "alice", "not_yours"),
        (client(ALICE), "", "not_yours"),
        (client(None), "", "not_yours"),
        (client(ME), "nobody", "unknown_engine"),
        (client(ALICE), "nobody", "unknown_engine"),
    ],
)
async def test_only_those_with_a_right_purge_and_only_what_it_is_for(
    full: Holdings, monkeypatch: pytest.MonkeyPatch, who: Any, named: str, gone: list[str] | str
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: ME)
    if isinstance(gone, str):
        with pytest.raises(RequestError) as refused:
            await full.purge(who, wire.Purge(engine=named))
        assert refused.value.reason == gone
        assert left_in(full) == EVERYTHING
        return
    answer = {"objects": 4 * len(gone), "bytes": 40 * len(gone)}
    assert await full.purge(who, wire.Purge(engine=named, dry_run=True)) == answer
    assert left_in(full) == EVERYTHING
    assert await full.purge(who, wire.Purge(engine=named)) == answer
    assert left_in(full) == {engine: 0 if engine in gone else 4 for engine in EVERYTHING}


@pytest.mark.parametrize(
    ("who", "why"), [(client(ALICE, ALICES), "not_yours"), (client(None), "not_yours"), (client(0), "backend_cannot")]
)
async def test_a_purge_for_all_nodes_that_cannot_be_removes_nothing_here(full: Holdings, who: Any, why: str) -> None:
    with pytest.raises(RequestError) as refused:
        await full.purge(who, wire.Purge(shared=True))
    assert refused.value.reason == why
    assert left_in(full) == EVERYTHING


async def test_keys_are_those_of_one_engine_in_its_generation_or_in_the_one_named(full: Holdings) -> None:
    alice = client(ALICE, ALICES)
    assert await full.purge(alice, wire.Purge(keys=["k1", "k9"], generation="other")) == {"objects": 0, "bytes": 0}
    assert await full.purge(alice, wire.Purge(keys=["k1", "k9"])) == {"objects": 2, "bytes": 20}
    assert left_in(full) == EVERYTHING | {"alice": 2}
    assert await full.purge(client(0), wire.Purge(keys=["k2"], engine="alice")) == {"objects": 2, "bytes": 20}
    for who, named in ((client(0), ""), (client(BOB), "bob")):  # of no engine, and of one that has left
        with pytest.raises(RequestError) as refused:
            await full.purge(who, wire.Purge(keys=["k1"], engine=named))
        assert refused.value.reason == "unknown_engine"
    with pytest.raises(RequestError) as refused:
        await full.purge(alice, wire.Purge(keys=["k"] * (MAX_MATCH_KEYS + 1)))
    assert refused.value.reason == "too_many_keys"


async def test_a_block_that_lacks_one_ranks_object_is_not_pinned(full: Holdings) -> None:
    alice = client(ALICE, ALICES)
    assert full._storage is not None
    await full._storage.quarantine("m/alice/g/k2/1")
    assert await full.pin(ALICES, wire.Pin(["k1", "k2", "k9"], 60.0)) == 1
    assert {row.engine: row.pinned for row in full.report()} == {"alice": 20, "own": 0, "bob": 0}
    assert {row.engine: row.there for row in full.report()} == {"alice": True, "own": True, "bob": False}
    await full.unpin(ALICES, wire.Unpin(["k1"]))
    assert all(row.pinned == 0 for row in full.report())
    assert await full.purge(alice, wire.Purge()) == {"objects": 3, "bytes": 30}


async def test_names_that_say_no_model_are_not_purged_by_model() -> None:
    config = from_tree({"storage": {"backend": "memory", "key_schema": "fastdeploy"}})
    held = Holdings(config, MemoryStorage.from_config(config, clock=SYSTEM_CLOCK))
    for asked in (wire.Purge(model="m"), wire.Purge(generation="g")):
        with pytest.raises(RequestError, match="say neither model nor generation") as refused:
            await held.purge(client(0), asked)
        assert refused.value.reason == "bad_value"


@pytest.mark.parametrize(
    ("uid", "backend", "code"),
    [
        (None, "memory", "not_yours"),
        (BOB, "memory", "not_yours"),
        (0, "memory", "backend_cannot"),
        (0, "none", "no_storage_tier"),
    ],
)
async def test_only_the_daemons_user_and_root_have_copies_made(uid: int | None, backend: str, code: str) -> None:
    config = from_tree({"storage": {"backend": backend}})
    held = Holdings(config, MemoryStorage.from_config(config, clock=SYSTEM_CLOCK) if backend == "memory" else None)
    with pytest.raises(RequestError) as refused:
        await held.make_copies(client(uid), wire.MakeCopies(leaves=False))
    assert refused.value.reason == code


@pytest.mark.parametrize("uid", [None, BOB])
async def test_only_the_daemons_user_and_root_ask_what_a_restart_loses(uid: int | None) -> None:
    held = Holdings(from_tree({"storage": {"backend": "none"}}), None)
    with pytest.raises(RequestError) as refused:
        await held.restart_check(client(uid), lambda: answered(""))
    assert refused.value.reason == "not_yours"
    assert await held.restart_check(client(0), lambda: answered("a wrong key")) == {
        "objects": 0, "bytes": 0, "unknown": "", "stop_copies_s": 0.0, "configuration": "a wrong key",
    }  # fmt: skip


async def test_disks_that_hang_in_a_restart_check_do_not_hold_up_the_daemon(tmp_path: Path) -> None:
    endpoint, go_on = f"ipc://{tmp_path}/t.sock", threading.Event()
    async with running(endpoint) as daemon, Client(endpoint, await_ready=False) as root:
        loop = get_running_loop()

        def look() -> str:
            loop.call_soon_threadsafe(go_on.set)
            return "" if go_on.wait(20) else "the loop stood still"

        daemon.engines.acts.would_not_start = look
        assert (await root.restart_check()).configuration == ""


def test_where_a_block_is_only_those_may_ask_who_may_purge_it() -> None:
    held = Holdings(from_tree({"storage": {"backend": "none"}}), None)
    for owner in (EngineOwner("a", ALICE), EngineOwner("b", BOB)):
        held._engines[owner] = SimpleNamespace()  # type: ignore[assignment]
    assert held.open_to(client(0)) == ["a", "b"]
    assert held.open_to(client(BOB)) == ["b"]
    assert held.open_to(client(0), "nobody") == []
    for uid, engine in ((BOB, "a"), (None, "")):
        with pytest.raises(RequestError) as refused:
            held.open_to(client(uid), engine)
        assert refused.value.reason == "not_yours"


# --- many keys ------------------------------------------------------------------------------------


async def test_names_of_many_keys_are_made_piece_by_piece_each_in_a_turn_of_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a look-up: all that one request may name at once would keep every engine waiting."""
    monkeypatch.setattr(lookup, "PIECE", 2)
    keys, pieces, turn, loop = [f"k{number}" for number in range(6)], list[tuple[int, int]](), [0], get_running_loop()

    def tick() -> None:
        turn[0] += 1
        loop.call_soon(tick)

    endpoint = f"ipc://{tmp_path}/s"
    async with running(endpoint, engines={"pin_share": 0.5}) as daemon, serving(endpoint, "e") as (one, _):
        assert (await one.submit(write("w", keys, list(range(6))))).status is Status.OK
        [engine] = daemon.engines.all
        held, prefetches, ids = daemon.engines.holdings, daemon.engines.prefetches, engine.objects.ids

        def counted(some: Sequence[str]) -> list[str]:
            pieces.append((turn[0], len(some)))
            return ids(some)

        monkeypatch.setattr(engine.objects, "ids", counted)
        tick()
        assert await held.pin(engine, wire.Pin(keys, 60.0)) == 6
        leased = await held.lease(os.geteuid(), engine, wire.Exists(keys, lease=60.0))
        assert (leased.there, leased.places and leased.places.where) == ([True] * 6, [None] * 6)
        await held.unpin(engine, wire.Unpin(keys))
        brought = await prefetches.run(b"1", engine, wire.Prefetch("p", keys, "memory", 60.0))
        assert brought.block_ids == list(range(6))
        prefetches.left(b"1")
        assert (await held.purge(client(0), wire.Purge(keys=keys, engine="e")))["objects"] == 6
    assert [size for _, size in pieces] == [2] * 3 * 6, "of the lease's look-up, too"
    assert len({turn for turn, _ in pieces}) == len(pieces), "never two in one turn"


# --- who is told where blocks lie -----------------------------------------------------------------


def of_ranks(count: int, storage: Storage) -> Any:
    """An engine. storage: what its look-ups ask."""
    namer, nothing = ObjectNamer("m", "f"), SimpleNamespace(looked_up=lambda *_: None)
    return SimpleNamespace(
        name="a",
        owner=EngineOwner("a", ME),
        dispatcher=SimpleNamespace(generation="g"),
        identity=SimpleNamespace(model="m", fingerprint="f"),
        workers=[SimpleNamespace(context=SimpleNamespace(object_rank=3))] * count,
        objects=SimpleNamespace(ids=namer.ids, names=namer.names, parts=WHOLE),
        blocks=storage,
        tokens=None,
        kv_events=SimpleNamespace(has_followers=False),
        coordinator=None,
        cache=SimpleNamespace(missing=[]),
        shared=SimpleNamespace(pieces=OneATurn(), tasks=nothing, traffic=nothing),
    )


@pytest.mark.parametrize("store", ["file", "two disks", "memory above file", "memory"])
async def test_only_a_process_of_the_daemons_user_is_told_where_the_blocks_of_its_one_rank_lie(
    store: str, tmp_path: Path
) -> None:
    several = store == "two disks"
    paths = [str(tmp_path / "one"), str(tmp_path / "two")]
    file = {"path": paths if several else paths[0], "capacity": ["8MiB"] * 2 if several else "8MiB"}
    above = {"levels": ["memory", "file"]} if store == "memory above file" else {}
    backend = {} if above else {"backend": "file" if several else store}
    tree = {"storage": {"file": file, "memory": {"capacity": "8MiB"}} | above | backend, "engines": {"pin_share": 0.5}}
    config = from_tree(tree)
    _, storage = create_storages(config)
    assert storage is not None
    await storage.open()
    [[name]] = await object_names(of_ranks(1, storage), ["k"])
    one = Blob(name, memoryview(bytearray(1000)), Use(), 0)
    assert [outcome.found for outcome in await put(storage, [one])] == [Found.STORED]
    if isinstance(storage, LevelsStorage):
        await storage.flush(30.0)
    held, ask, me = Holdings(config, storage), wire.Exists(["k", "absent"], lease=60.0), os.geteuid()
    told = await held.lease(me, of_ranks(1, storage), ask)
    assert (told.there, storage.statistics()["pinned"]) == ([True, False], 1)
    places = told.places
    assert places is not None
    assert (places.model, places.fingerprint, places.generation, places.rank) == ("m", "f", "g", 3)
    assert places.where == [None if store == "memory" else 0, None]
    for place in places.directories:
        found = os.stat(place.path)
        assert (place.device, place.inode) == (found.st_dev, found.st_ino)
        assert os.path.getsize(place.path + path_of(name)) == 1000
    for uid, ranks in (None, 1), (me + 1, 1), (me, 2):
        other = await held.lease(uid, of_ranks(ranks, storage), ask)
        assert (other.there, other.places) == ([True, False], None)
    await storage.close()


@pytest.mark.parametrize("after", ["the names", "the look-up"])
async def test_a_block_that_a_lease_finds_is_kept_also_if_others_are_stored_meanwhile(
    after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = from_tree({"storage": {"backend": "memory", "memory": {"capacity": "8MiB"}}})
    storage = MemoryStorage.from_config(config, clock=SYSTEM_CLOCK)
    await storage.open()
    engine, mib, named = of_ranks(1, storage), memoryview(bytearray(2**19)), []

    async def store(*names: str) -> None:
        for name in names:
            await put(storage, [Blob(name, mib, Use(), 0)])

    call = "object_names" if after == "the names" else "exists"
    ask = getattr(lookup, call)

    async def asked(*args: Any, **more: Any) -> Any:
        answer = await ask(*args, **more)
        await store(*(f"m/f/g/other{i}" for i in range(20)))
        return answer

    [named] = await object_names(engine, ["k"])
    await store(*named)
    monkeypatch.setattr(module, call, asked)
    leased = await Holdings(config, storage).lease(None, engine, wire.Exists(["k"], lease=60.0))
    assert leased.there == await storage.exists(named)
    assert leased.there == [after == "the look-up"]
    await storage.close()


@pytest.mark.parametrize("many", [False, True])
async def test_pins_and_leases_of_many_blocks_let_others_have_their_turns(
    many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE", 1 if many else 4)
    config = from_tree({"storage": {"backend": "memory"}})
    storage = MemoryStorage.from_config(config, clock=SYSTEM_CLOCK)
    await storage.open()
    engine, held, keys = of_ranks(1, storage), Holdings(config, storage), ["a", "b", "c", "d"]
    blocks = await object_names(engine, keys)
    await put(storage, [Blob(name, memoryview(bytearray(8)), Use(), depth) for depth, [name] in enumerate(blocks)])
    works: list[Coroutine[Any, Any, Any]] = [
        held.pin(engine, wire.Pin(keys, 60.0)),
        held.lease(None, engine, wire.Exists(keys, lease=60.0)),
        held.unpin(engine, wire.Unpin(keys)),
    ]
    for work in works:
        working, turns = get_running_loop().create_task(work), 0
        while not working.done():
            await sleep(0)
            turns += 1
        working.result()
        assert (turns >= len(keys)) is many
    assert storage.statistics()["pinned"] == 0
    await storage.close()


async def test_a_read_lease_keeps_an_object_like_a_pin_and_no_disk_is_told(tmp_path: Path) -> None:
    config = from_tree({"storage": {"backend": "file", "file": {"path": str(tmp_path), "capacity": "8MiB"}}})
    _, storage = create_storages(config)
    assert storage is not None
    await storage.open()
    engine = of_ranks(1, storage)
    [[name]] = await object_names(engine, ["k"])
    await put(storage, [Blob(name, memoryview(bytearray(1000)), Use(), 0)])
    held, listed = Holdings(config, storage), tmp_path / "orders"
    before = listed.exists() and listed.stat()
    leased = await held.lease(os.geteuid(), engine, wire.Exists(["k"], lease=60.0))
    assert leased.there == [True]
    assert storage.statistics()["pinned"] == 1
    await held.unpin(engine, wire.Unpin(["k"]))
    assert storage.statistics()["pinned"] == 0
    assert (listed.exists() and listed.stat()) == before, "each look-up of LMCache would wait for the disk"
    lasting = await held.pin(engine, wire.Pin(["k"], 60.0, detail=True))
    assert isinstance(lasting, dict)
    assert (lasting["pinned"], lasting["durable"], listed.exists()) == (1, 1, True)
    await storage.close()
