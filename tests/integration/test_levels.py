"""Daemons with levels of storage, in processes of their own: bytes, kills, damage, levels that die or fill up."""

from __future__ import annotations

import contextlib
import itertools
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import gethostname
from typing import Any

import numpy as np
import pytest

from tests.integration.subscriber import Subscriber
from tests.storage.harness import skip_without_direct_io
from tests.support.blobs import overwrite
from tests.support.s3_server import serving
from tests.support.waits import wait_until
from transferd import ReadStorageTask, Status, SyncClient, WriteStorageTask
from transferd.cli.pool.local import Master
from transferd.cli.pool.master import master_executable
from transferd.client.launch import DaemonProcess, running
from transferd.errors import RequestError
from transferd.runtime.compat import tomllib
from transferd.wire.answers import Purged
from transferd.wire.kv_events import block_hash

RANKS, BLOCKS = 2, 16
KEYS = [f"k{i}" for i in range(BLOCKS)]
CACHE = {"ranks": RANKS, "layers": 2, "kv_heads": 1, "head_dim": 64, "block_size": 64, "host_blocks": 0}

NUMBERS = itertools.count()

Caches = list[dict[str, list[Any]]]


def tree(path: Path, levels: tuple[str, ...] = ("memory", "file"), **storage: Any) -> dict[str, Any]:
    file = {"path": str(path / "blocks"), "capacity": "64MiB", "reserve": "0B"} | storage.pop("file", {})
    memory = {"capacity": "16MiB"} | storage.pop("memory", {})
    return {
        "cache": CACHE | {"device_blocks": 2 * BLOCKS},
        "storage": {"levels": list(levels), "model": "m", "file": file, "memory": memory} | storage,
    }


def filled(client: SyncClient) -> Caches:
    """The caches, each block with random bytes of its own; returns a copy."""
    caches = [client.attach(rank) for rank in range(RANKS)]
    chance = np.random.default_rng(7)
    for cache in caches:
        for layers in cache.values():
            for layer in layers:
                layer[:] = chance.integers(0, 2**15, layer.shape).astype(layer.dtype)
    return [{plane: [layer.copy() for layer in layers] for plane, layers in cache.items()} for cache in caches]


def same(kept: Caches, client: SyncClient, blocks: int = BLOCKS) -> bool:
    """Whether the second half of the caches holds the first half of `kept`."""
    return all(
        np.array_equal(mine[:blocks], theirs[BLOCKS : BLOCKS + blocks])
        for cache, copy in zip(kept, [client.attach(rank) for rank in range(RANKS)], strict=True)
        for plane in cache
        for mine, theirs in zip(cache[plane], copy[plane], strict=True)
    )


def write(client: SyncClient, task_id: str = "w") -> Any:
    return client.submit(WriteStorageTask(task_id=task_id, keys=KEYS, gpu_block_ids=list(range(BLOCKS))))


def read(client: SyncClient, task_id: str, keys: list[str] = KEYS, **more: Any) -> Any:
    for rank in range(RANKS):  # nothing of an earlier read may pass for this one
        for layers in client.attach(rank).values():
            for layer in layers:
                layer[BLOCKS:] = 0
    ids = list(range(BLOCKS, BLOCKS + len(keys)))
    return client.submit(ReadStorageTask(task_id=task_id, keys=keys, gpu_block_ids=ids, **more))


def rows(client: SyncClient) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.stats()["storage"]["levels"]
    return found


def reads_until(client: SyncClient, kept: Caches, true: Callable[[], object], what: str) -> None:
    """Read all, and compare the bytes each time, until something is so after a read.

    On a busy machine a file may be late, and then its block is read from the level below: one read proves nothing.
    """

    def once() -> object:
        result = read(client, f"until {next(NUMBERS)}")
        assert (result.status, len(result.block_ids)) == (Status.OK, BLOCKS), result
        assert same(kept, client)
        return true()

    wait_until(once, what, within=60)


def copied(client: SyncClient, level: int = 1, objects: int = RANKS * BLOCKS) -> None:
    """Wait until a level has as many objects."""
    wait_until(lambda: rows(client)[level]["copied"] >= objects, "the level has them", within=60)
    assert rows(client)[level]["pending_bytes"] == 0


@contextmanager
def daemon_of(config: dict[str, Any], path: Path) -> Iterator[tuple[DaemonProcess, SyncClient]]:
    with running(config, path) as daemon, SyncClient(daemon.endpoint) as client:
        yield daemon, client


def test_blocks_go_down_come_back_after_a_kill_and_come_up_again(tmp_path: Path) -> None:
    config = tree(tmp_path, level={"file": {"promote": 2}})
    with daemon_of(config, tmp_path / "a") as (daemon, client):
        kept = filled(client)
        assert write(client).status is Status.OK
        assert read(client, "r1").status is Status.OK
        assert same(kept, client)
        copied(client)
        above, below = rows(client)
        assert (above["name"], above["objects"], above["hits"]) == ("memory", RANKS * BLOCKS, RANKS * BLOCKS)
        assert (below["name"], below["objects"], below["hits"]) == ("file", RANKS * BLOCKS, 0)
        stats = client.stats()
        assert stats["storage"]["backend"] == "memory>file"
        assert stats["memory"]["stored_objects"] == above["bytes"]
        daemon.kill()
    with daemon_of(config, tmp_path / "b") as (_, client):
        assert client.match([*KEYS, "absent"]) == BLOCKS
        reads_until(client, kept, lambda: rows(client)[0]["promoted"] == RANKS * BLOCKS, "they have come up")
        before = rows(client)[1]["hits"]
        assert read(client, "r9").status is Status.OK
        assert same(kept, client)
        assert rows(client)[1]["hits"] == before, "all from memory"
        assert write(client, "again").status is Status.OK


@pytest.mark.parametrize("seed", range(3))
def test_a_kill_between_the_answer_and_the_copy_loses_no_byte_it_delivers(tmp_path: Path, seed: int) -> None:
    """What was copied is there after it, whole; what was not is a miss; nothing else."""
    config = tree(tmp_path)
    with daemon_of(config, tmp_path / "a") as (daemon, client):
        kept = filled(client)
        assert write(client).status is Status.OK
        if seed:
            wait_until(lambda: rows(client)[1]["copied"] >= 3 * seed, "some are copied")
        daemon.kill()
    with daemon_of(config, tmp_path / "b") as (_, client):
        there = client.exists(KEYS)
        result = read(client, "r", prefix=False)
        assert set(result.block_ids) == {BLOCKS + i for i, one in enumerate(there) if one}
        caches = [client.attach(rank) for rank in range(RANKS)]
        for cache, copy in zip(kept, caches, strict=True):
            for plane, layers in cache.items():
                for mine, theirs in zip(layers, copy[plane], strict=True):
                    for i, one in enumerate(there):
                        whole = np.array_equal(theirs[BLOCKS + i], mine[i])
                        # A block that another rank lacks is not answered, and this rank may have loaded its part.
                        assert whole or (not one and not theirs[BLOCKS + i].any())
        assert not list((tmp_path / "blocks").rglob("*.tmp*"))


def test_an_orderly_stop_copies_what_waits(tmp_path: Path) -> None:
    config = tree(tmp_path)
    with daemon_of(config, tmp_path / "a") as (_, client):
        kept = filled(client)
        assert write(client).status is Status.OK
    with daemon_of(config, tmp_path / "b") as (_, client):
        assert client.match(KEYS) == BLOCKS
        assert read(client, "r").status is Status.OK
        assert same(kept, client)


@pytest.mark.parametrize("part", ["payload", "footer"])
def test_a_damaged_copy_is_read_from_the_level_below_and_repaired(tmp_path: Path, part: str) -> None:
    """The first level is files here, which somebody damages; below is memory."""
    config = tree(tmp_path, ("file", "memory"), level={"memory": {"promote": 0}})
    with daemon_of(config, tmp_path / "a") as (_, client):
        kept = filled(client)
        assert write(client).status is Status.OK
        copied(client)
        files = sorted(path for path in (tmp_path / "blocks/objects").rglob("*") if path.is_file())
        assert len(files) == RANKS * BLOCKS
        chance = random.Random(11)
        for path in chance.sample(files, 9):
            data = bytearray(path.read_bytes())
            data[100 if part == "payload" else len(data) - 20] ^= 4
            overwrite(path, data)
        reads_until(client, kept, lambda: rows(client)[0]["corrupt"] == 9, "each damage is found")
        reads_until(client, kept, lambda: rows(client)[0]["objects"] == RANKS * BLOCKS, "repaired from below")
        assert (rows(client)[0]["corrupt"], rows(client)[1]["corrupt"]) == (9, 0), "quarantined in that level alone"
        below = [rows(client)[1]["hits"]]

        def all_from_above() -> bool:
            below.append(rows(client)[1]["hits"])
            return bool(below[-1] == below[-2])

        reads_until(client, kept, all_from_above, "the files are read, and nothing below")


def test_a_full_lower_level_keeps_its_newest_and_stores_go_on(tmp_path: Path) -> None:
    config = tree(tmp_path, file={"capacity": "512KiB"})
    with daemon_of(config, tmp_path / "a") as (_, client):
        kept = filled(client)
        assert write(client).status is Status.OK
        wait_until(lambda: rows(client)[1]["pending_bytes"] == 0 and rows(client)[1]["copied"], "the level is full")
        assert read(client, "r").status is Status.OK
        assert same(kept, client)
        assert rows(client)[1]["bytes"] <= 512 * 1024


def test_a_chain_larger_than_the_memory_level_is_whole_below(tmp_path: Path) -> None:
    config = tree(tmp_path, memory={"capacity": "256KiB"})
    with daemon_of(config, tmp_path / "a") as (_, client):
        kept = filled(client)
        assert write(client).status is Status.OK
        wait_until(lambda: rows(client)[1]["objects"] == RANKS * BLOCKS, "all are below")
        assert read(client, "r").status is Status.OK
        assert same(kept, client)
        assert rows(client)[0]["bytes"] <= 256 * 1024


def test_each_level_is_named_where_a_block_is_located_and_announced(tmp_path: Path) -> None:
    """A subscriber, in a process of its own kind, sees a block come to each level and leave it."""
    events = {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/replay", "levels": True}
    config = tree(tmp_path, memory={"capacity": "1200KiB"}) | {"events": events}
    hashes = {block_hash(key) for key in KEYS}
    with daemon_of(config, tmp_path) as (_, client):
        subscriber = Subscriber(events["endpoint"], events["replay_endpoint"])  # type: ignore[arg-type]

        def at(medium: str) -> set[Any]:
            subscriber.catch_up()
            return subscriber.index.get(medium, set())

        try:
            filled(client)
            assert write(client).status is Status.OK
            copied(client)
            assert client.locate(keys=KEYS) == {gethostname(): {"memory": BLOCKS, "file": BLOCKS, "any": BLOCKS}}
            for medium in ("STORAGE", "STORAGE/memory", "STORAGE/file"):
                wait_until(lambda medium=medium: at(medium) == hashes, f"they are announced for {medium}")  # type: ignore[misc]
            more = [f"more{i}" for i in range(BLOCKS)]
            assert client.submit(WriteStorageTask(task_id="m", keys=more, gpu_block_ids=list(range(BLOCKS)))).status
            copied(client, objects=2 * RANKS * BLOCKS)
            found = client.locate(keys=KEYS)[gethostname()]
            assert (found.get("memory", 0) < BLOCKS, found["file"], found["any"]) == (True, BLOCKS, BLOCKS)
            wait_until(lambda: not hashes <= at("STORAGE/memory"), "some have left the memory")
            assert hashes <= at("STORAGE"), "they are still stored"
            assert hashes <= at("STORAGE/file")
            assert client.purge(KEYS).objects
            for medium in ("STORAGE", "STORAGE/memory", "STORAGE/file"):
                wait_until(lambda medium=medium: not hashes & at(medium), f"they are gone from {medium}")  # type: ignore[misc]
            assert client.locate(keys=KEYS) == {}
            with pytest.raises(RequestError, match="give one of them"):
                client.locate()
        finally:
            subscriber.close()


def test_purge_and_pin_reach_both_levels(tmp_path: Path) -> None:
    with daemon_of(tree(tmp_path), tmp_path / "a") as (_, client):
        filled(client)
        assert write(client).status is Status.OK
        copied(client)
        assert client.pin(KEYS[:2], ttl=60.0) == 2
        assert client.purge(keys=KEYS)["objects"] == 2 * RANKS * BLOCKS
        assert client.match(KEYS) == 0
        assert [row["objects"] for row in rows(client)] == [0, 0]


@pytest.mark.parametrize("levels", [("memory", "object"), ("object",)])
def test_a_bucket_keeps_what_is_purged_for_others_unless_it_is_purged_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, levels: tuple[str, ...]
) -> None:
    def node(name: str) -> Any:
        return daemon_of(tree(tmp_path / name, levels, object=bucket), tmp_path / name)

    with serving(tmp_path / "s3", monkeypatch) as server:
        bucket = {"url": "s3://blocks/kv", "endpoint": server.endpoint, "region": "us-east-1", "timeout": 10.0}
        with node("a") as (_, one), node("b") as (_, other):
            kept = filled(one)
            assert write(one).status is Status.OK
            wait_until(lambda: other.match(KEYS) == BLOCKS, "the bucket has all")
            if len(levels) > 1:
                assert one.purge(KEYS[:4]).shared == ["object"], "of this node alone"
                assert one.match(KEYS) == 0
                wait_until(lambda: other.match(KEYS) == BLOCKS, "the bucket has them still")
            else:
                with pytest.raises(RequestError, match="does not know its own objects"):
                    one.purge(KEYS[:4])
            with pytest.raises(RequestError, match="does not know how long"):
                one.purge(older_than=1.0, shared=True)
            objects = RANKS * BLOCKS
            here = objects if len(levels) > 1 else 0
            assert one.purge(model="n", shared=True) == Purged(), "another model's"
            would = one.purge(KEYS[-2:], shared=True, dry_run=True)
            assert would.objects == 2 * RANKS * (1 + bool(here))
            gone = one.purge(KEYS[-2:], shared=True)
            assert (gone.objects, gone.complete) == (would.objects, True)
            wait_until(lambda: other.exists(KEYS[-3:]) == [True, False, False], "two of them are gone")
            gone = one.purge(model="m", shared=True)
            assert gone.complete, gone
            assert gone.objects >= objects - 2 * RANKS
            assert other.exists(KEYS) == [False] * BLOCKS
            for rank in range(RANKS):
                for layers in other.attach(rank).values():
                    for layer, mine in zip(layers, kept[rank][next(iter(kept[rank]))], strict=True):
                        layer[:] = mine
            assert write(other, "again").status is Status.OK
            wait_until(lambda: one.match(KEYS) == BLOCKS, "what is stored there after it is seen")


def test_files_above_a_bucket_go_on_while_it_is_dead_and_a_new_node_reads_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path / "s3", monkeypatch) as server:
        bucket = {"url": "s3://blocks/kv", "endpoint": server.endpoint, "region": "us-east-1", "timeout": 10.0}
        with daemon_of(tree(tmp_path / "a", ("file", "object"), object=bucket), tmp_path / "a") as (_, client):
            kept = filled(client)
            server.kill()
            assert write(client).status is Status.OK
            assert read(client, "r").status is Status.OK
            assert same(kept, client)
            assert client.match([*KEYS, "absent"]) == BLOCKS
            wait_until(lambda: not rows(client)[1]["available"], "the bucket is known to be dead", within=60)
            assert rows(client)[1]["pending_bytes"] > 0
            server.start()
            copied(client)
        with daemon_of(tree(tmp_path / "b", ("file", "object"), object=bucket), tmp_path / "b") as (_, client):
            wait_until(lambda: client.match(KEYS) == BLOCKS, "a look-up may be too late for a busy server")
            wait_until(lambda: read(client, f"r{next(NUMBERS)}").status is Status.OK, "and so may a load")
            assert same(kept, client)
            wait_until(lambda: rows(client)[0]["objects"] == RANKS * BLOCKS, "they have come up")
            server.kill()  # with it, the second chance of a file that is late
            wait_until(lambda: read(client, f"after {next(NUMBERS)}").status is Status.OK, "they are read from files")
            assert same(kept, client)


@pytest.mark.parametrize("some", [False, True], ids=["none is below", "some are below"])
def test_blocks_left_above_the_bucket_by_a_kill_are_copied_after_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, some: bool
) -> None:
    """The daemon is killed when the files have the blocks and the bucket does not. Another node reads them later."""
    with serving(tmp_path / "s3", monkeypatch) as server:
        bucket = {"url": "s3://blocks/kv", "endpoint": server.endpoint, "region": "us-east-1", "timeout": 10.0}
        config = tree(tmp_path / "a", ("file", "object"), object=bucket)
        with daemon_of(config, tmp_path / "a") as (daemon, client):
            kept = filled(client)
            below = KEYS[: BLOCKS // 2] if some else []
            if below:
                ids = list(range(len(below)))
                assert (
                    client.submit(WriteStorageTask(task_id="some", keys=below, gpu_block_ids=ids)).status is Status.OK
                )
                copied(client, objects=RANKS * len(below))
            server.kill()
            assert write(client).status is Status.OK
            assert rows(client)[1]["pending_bytes"] > 0
            daemon.kill()
        server.start()
        with daemon_of(config, tmp_path / "a2") as (_, client):  # no task is run: it comes back by itself
            wait_until(lambda: rows(client)[1]["copied"] == RANKS * BLOCKS, "all have been looked after", within=60)
            wait_until(lambda: rows(client)[1]["pending_bytes"] == 0, "nothing waits")
        with daemon_of(tree(tmp_path / "b", ("memory", "object"), object=bucket), tmp_path / "b") as (_, client):
            wait_until(lambda: read(client, f"r{next(NUMBERS)}").status is Status.OK, "the bucket has all")
            assert same(kept, client)


def test_a_first_level_that_hangs_costs_no_store_and_no_load(tmp_path: Path) -> None:
    """Its threads do not return, in a daemon of its own. What is below is stored and loaded within each task's time."""
    hung = "tests.support.hung_files:HungFiles"
    hangs = tmp_path / "blocks.hangs"
    config = tree(tmp_path, levels=(hung, "memory")) | {"metrics": {"listen": "127.0.0.1:0"}}
    with daemon_of(config, tmp_path) as (_, client):
        kept = filled(client)
        assert write(client).status is Status.OK
        copied(client)
        hangs.touch()
        result = read(client, "r", timeout=8.0)
        assert result.status is Status.OK, "each block is in the level below, too"
        assert same(kept, client)
        more = [f"more{i}" for i in range(BLOCKS)]
        for number in range(4):
            keys = [f"{key}-{number}" for key in more]
            task = WriteStorageTask(task_id=f"m{number}", keys=keys, gpu_block_ids=list(range(BLOCKS)), timeout=8.0)
            assert client.submit(task).status is Status.OK
            assert read(client, f"r{number}", keys, timeout=8.0).status is Status.OK
            assert same(kept, client)
        top = rows(client)[0]
        assert top["hanging"] >= 2, "a store and a load at least"
        assert not top["available"]
        concerns = {one["name"]: one["text"] for one in client.stats()["concerns"]}
        assert "calls to it have not ended" in concerns["level_silent"]
        assert client.stats()["ready"]
        hangs.unlink()
        wait_until(lambda: rows(client)[0]["hanging"] == 0 and rows(client)[0]["available"], "it answers", within=60)
        wait_until(lambda: all(one["name"] != "level_silent" for one in client.stats()["concerns"]), "the concern ends")

        def stores_again() -> bool:
            """Unless a file is late, on a busy machine: then the level below has them, and this one is left out."""
            keys[:] = [f"{key}-after-{next(NUMBERS)}" for key in more]
            before = rows(client)[0]["objects"]
            task = WriteStorageTask(task_id=f"after {keys[0]}", keys=keys, gpu_block_ids=list(range(BLOCKS)))
            assert client.submit(task).status is Status.OK
            return bool(rows(client)[0]["objects"] >= before + RANKS * BLOCKS)

        wait_until(stores_again, "the files take blocks again", within=60)
        assert read(client, "r-after", keys).status is Status.OK
        assert same(kept, client)
        assert client.stats()["staging"]["used"] == 0


def documented() -> list[dict[str, Any]]:
    text = (Path(__file__).parents[2] / "docs/levels.md").read_text(encoding="utf-8")
    return [tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", text, re.DOTALL)]


@pytest.mark.parametrize("which", range(3), ids=["nvme", "memory and S3", "mooncake"])
def test_a_documented_configuration_starts_stores_and_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    """As it is written, but for addresses and paths of this test's own."""
    config = documented()[which]
    config["cache"] = CACHE | {"device_blocks": 2 * BLOCKS}
    storage = config["storage"]
    with contextlib.ExitStack() as stack:
        if which == 0:
            skip_without_direct_io(tmp_path)
            storage["file"]["path"] = str(tmp_path / "blocks")
        elif which == 1:
            server = stack.enter_context(serving(tmp_path / "s3", monkeypatch))
            storage["object"] |= {"endpoint": server.endpoint, "region": "us-east-1"}
        else:
            if master_executable() is None:
                pytest.skip("Mooncake is not installed")
            master = Master(tmp_path / "master.log")
            master.start()
            stack.callback(master.stop)
            storage["mooncake"]["master_server_addr"] = master.address
        _, client = stack.enter_context(daemon_of(config, tmp_path / "a"))
        kept = filled(client)
        assert write(client).status is Status.OK
        copied(client)
        assert read(client, "r1").status is Status.OK
        assert same(kept, client)
        assert [row["name"] for row in rows(client)] == storage["levels"]
        wait_until(lambda: all(row["available"] for row in rows(client)), "none is late")
        assert not any(row["lost"] for row in rows(client))
