"""What a daemon with levels promises, after its media changed behind its back: each `ok` is asked of the medium itself.

Daemons in processes of their own, a real bucket, real files.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import obstore
import pytest

from tests.integration.test_level_changes import level
from tests.integration.test_levels import BLOCKS, KEYS, RANKS, copied, daemon_of, filled, read, rows, same, tree, write
from tests.support.s3_server import S3Server, serving
from tests.support.waits import wait_until
from transferd import Status, SyncClient, WriteStorageTask
from transferd.cli.pool.local import Master
from transferd.cli.pool.master import master_executable

OBJECTS = RANKS * BLOCKS
PREFIX = "prod"


def hand_over(client: SyncClient, task_id: str, **more: Any) -> Any:
    task = WriteStorageTask(
        task_id=task_id, keys=KEYS, gpu_block_ids=list(range(BLOCKS)), shared=True, timeout=30.0, **more
    )
    return client.submit(task)


def held(server: S3Server) -> list[str]:
    """The objects in the bucket, as the server itself lists them."""
    found = obstore.list(server.client(), PREFIX).collect()
    return [str(one["path"]) for one in found]


def emptied(server: S3Server) -> None:
    for path in held(server):
        obstore.delete(server.client(), path)
    assert not held(server)


def bucket(server: S3Server) -> dict[str, Any]:
    return {"url": f"s3://blocks/{PREFIX}", "endpoint": server.endpoint, "region": "us-east-1"}


def files(path: Path) -> list[Path]:
    return [one for one in (path / "blocks/objects").rglob("*") if one.is_file()]


@pytest.mark.parametrize("above", ["memory", "file"])
def test_a_hand_over_is_ok_only_if_the_bucket_has_it_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, above: str
) -> None:
    """A rule of the bucket removes what the daemon has copied there, as docs/object_store.md advises."""
    with serving(tmp_path / "s3", monkeypatch) as server:
        config = tree(tmp_path / "a", (above, "object"), object=bucket(server))
        with daemon_of(config, tmp_path / "a") as (_, client):
            kept = filled(client)
            assert hand_over(client, "h1").status is Status.OK
            assert len(held(server)) == OBJECTS
            emptied(server)
            assert hand_over(client, "h2").status is Status.OK
            assert len(held(server)) == OBJECTS, "the level above has put them back"
            emptied(server)
            read(client, "r")
            assert same(kept, client)
            assert hand_over(client, "h3").status is Status.OK
        with daemon_of(tree(tmp_path / "b", ("memory", "object"), object=bucket(server)), tmp_path / "b") as (_, other):
            other.attach(0)
            assert read(other, "r").status is Status.OK
            assert same(kept, other), "another node reads what was handed over"


def test_a_bucket_that_was_replaced_while_it_was_out_gets_what_is_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a drain of the level above believe what the old bucket had."""
    with serving(tmp_path / "s3", monkeypatch) as server:
        config = tree(tmp_path / "a", ("memory", "object"), object=bucket(server))
        with daemon_of(config, tmp_path / "a") as (process, client):
            filled(client)
            assert hand_over(client, "h1").status is Status.OK
            assert level(process.endpoint, "drain", "object")["state"] == "drained"
            emptied(server)
            assert level(process.endpoint, "use", "object")["state"] == "used"
            answer = level(process.endpoint, "drain", "memory")
            assert (answer["state"], answer["objects"]) == ("drained", 0)
            assert len(held(server)) == OBJECTS, "what it had alone is below"
            assert level(process.endpoint, "use", "memory")["state"] == "used"
            server.kill()
            answer = level(process.endpoint, "drain", "memory")
            assert answer["objects"] == OBJECTS, "a bucket that does not answer has nothing"


def test_files_that_were_replaced_while_they_were_out_are_looked_at_anew(tmp_path: Path) -> None:
    with daemon_of(tree(tmp_path), tmp_path / "a") as (process, client):
        kept = filled(client)
        assert write(client).status is Status.OK
        copied(client)
        assert level(process.endpoint, "drain", "file")["objects"] == 0
        shutil.rmtree(tmp_path / "blocks/objects")
        (tmp_path / "blocks/objects").mkdir()
        assert level(process.endpoint, "use", "file")["state"] == "used"
        answer = level(process.endpoint, "drain", "memory")
        assert answer["objects"] == 0
        assert len(files(tmp_path)) == OBJECTS, "what it had alone is below"
        process.kill()
    with daemon_of(tree(tmp_path), tmp_path / "b") as (_, client):
        client.attach(0)
        assert read(client, "r").status is Status.OK
        assert same(kept, client)


@pytest.mark.parametrize("again", ["w", "w2"])
def test_a_level_that_is_written_through_has_the_file_when_it_is_ok(tmp_path: Path, again: str) -> None:
    """Somebody removes the files; the same blocks are written again, and the daemon is killed at once."""
    config = tree(tmp_path, level={"file": {"write": "through"}})
    with daemon_of(config, tmp_path / "a") as (process, client):
        kept = filled(client)
        assert write(client).status is Status.OK
        assert len(files(tmp_path)) == OBJECTS
        for one in files(tmp_path):
            one.unlink()
        assert write(client, again + "again").status is Status.OK
        assert len(files(tmp_path)) == OBJECTS
        process.kill()
    with daemon_of(config, tmp_path / "b") as (_, client):
        client.attach(0)
        assert read(client, "r").status is Status.OK
        assert same(kept, client)


@pytest.mark.parametrize("noticed", [lambda client: client.stats(), lambda client: read(client, "r")])
def test_files_that_somebody_removes_are_copied_down_again(
    tmp_path: Path, noticed: Callable[[SyncClient], Any]
) -> None:
    """Without a write: what leaves below while it is above is unsaved again."""
    with daemon_of(tree(tmp_path), tmp_path / "a") as (process, client):
        kept = filled(client)
        assert write(client).status is Status.OK
        copied(client)
        for one in files(tmp_path):
            one.unlink()

        def again() -> bool:
            noticed(client)
            client.stats()
            return len(files(tmp_path)) == OBJECTS

        wait_until(again, "they are below again", within=60)
        wait_until(lambda: rows(client)[1]["pending_bytes"] == 0, "and nothing waits")
        process.kill()
    with daemon_of(tree(tmp_path), tmp_path / "b") as (_, client):
        client.attach(0)
        assert read(client, "r").status is Status.OK
        assert same(kept, client)


def test_hand_overs_to_a_dead_bucket_fail_at_once_and_hold_no_staging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Staging for two chunks; many hand-overs at a time; meanwhile and afterwards, ordinary stores go on."""
    with serving(tmp_path / "s3", monkeypatch) as server:
        config = tree(tmp_path / "a", ("memory", "object"), memory={"capacity": "160MiB"}, object=bucket(server))
        config["host"] = {"staging": "4MiB"}
        with daemon_of(config, tmp_path / "a") as (_, client):
            filled(client)
            assert hand_over(client, "h0").status is Status.OK
            server.kill()

            numbers = itertools.count()

            def submit(name: str, **more: Any) -> Any:
                keys = [f"{name}-{i}" for i in range(BLOCKS)]
                task_id = f"t{next(numbers)}"
                task = WriteStorageTask(task_id=task_id, keys=keys, gpu_block_ids=list(range(BLOCKS)), **more)
                return client.submit(task)

            for number in range(24):
                result = submit(f"dead{number}", shared=True, timeout=3600.0)  # the deadline would end the test, too
                assert result.error is not None
                assert (result.status, result.error.code) == (Status.FAILED, "storage_unavailable")
                assert submit(f"own{number}").status is Status.OK
            assert client.stats()["staging"]["used"] == 0
            server.start()
            wait_until(lambda: submit("dead1", shared=True).status is Status.OK, "it is well again", within=60)
            wait_until(lambda: not rows(client)[1]["pending_bytes"], "and gets all that waited", within=60)
            assert rows(client)[1]["lost"] == 0
            assert len(held(server)) == (1 + 24 + 24) * OBJECTS


def test_a_hand_over_is_ok_only_if_the_pool_has_it_now(tmp_path: Path) -> None:
    """A real pool evicts what was handed over; memory has it still, and decode reads it after the next hand-over."""
    if master_executable() is None:
        pytest.skip("Mooncake is not installed")
    master = Master(tmp_path / "master.log")
    master.start()
    pool = {"master_server_addr": master.address, "global_segment_size": "16MiB", "local_buffer_size": "0B"}
    try:
        config = tree(tmp_path / "a", ("memory", "mooncake"), memory={"capacity": "256MiB"}, mooncake=pool)
        decode = tree(tmp_path / "b", ("memory", "mooncake"), mooncake=pool)
        with daemon_of(config, tmp_path / "a") as (_, client), daemon_of(decode, tmp_path / "b") as (_, other):
            kept = filled(client)
            assert hand_over(client, "h0").status is Status.OK
            for number in range(80):
                keys = [f"other{number}-{i}" for i in range(BLOCKS)]
                task = WriteStorageTask(task_id=f"o{number}", keys=keys, gpu_block_ids=list(range(BLOCKS)))
                assert client.submit(task).status is Status.OK
                wait_until(lambda: not rows(client)[1]["pending_bytes"], "it is in the pool", within=60)
            assert other.match(KEYS) < BLOCKS, "the pool has evicted some (a look would have kept them)"
            assert hand_over(client, "h1").status is Status.OK
            other.attach(0)
            assert read(other, "r").status is Status.OK
            assert same(kept, other)
    finally:
        master.stop()
