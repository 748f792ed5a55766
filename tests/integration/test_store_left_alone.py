"""A file store that nobody looks after: kills, full disks, and people who remove files, with a real daemon each time.

The file systems are small ones of the daemon's own (tmpfs in its own mount namespace).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.machine.faults.resources import in_own_mounts
from tests.support.looking import new_sync_stats
from tests.support.native.page import FaultPage
from tests.support.waits import wait_until
from transferd import ReadStorageTask, Status, SyncClient, TaskResult, TransferError, WriteStorageTask
from transferd.client import launch
from transferd.client.launch import DaemonProcess, running
from transferd.storage.journal import RECORD

MIB = 1024**2
BLOCK = 131072  # bytes of a block; an object has 128 more
OBJECT = BLOCK + 4096  # as the disk counts
CACHE = {
    "ranks": 1,
    "layers": 1,
    "kv_heads": 4,
    "head_dim": 128,
    "block_size": 64,
    "device_blocks": 64,
    "host_blocks": 0,
}
SMALL = CACHE | {"kv_heads": 1, "head_dim": 8, "block_size": 16, "device_blocks": 256}  # blocks of 512 bytes
root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts file systems")


def tree(blocks: Path, capacity: int | str, cache: dict[str, Any] = CACHE, **file: Any) -> dict[str, Any]:
    section = {"path": str(blocks), "capacity": capacity} | file
    return {"cache": cache, "storage": {"backend": "file", "file": section}, "log": {"level": "info"}}


@contextlib.contextmanager
def serving(
    directory: Path, config: dict[str, Any], prefix: Sequence[str] = ()
) -> Iterator[tuple[DaemonProcess, SyncClient]]:
    with running(config, directory, prefix=list(prefix)) as daemon, SyncClient(daemon.endpoint) as client:
        client.attach(0)
        yield daemon, client


def write(client: SyncClient, keys: Sequence[str], task_id: str | None = None, start: int = 0) -> TaskResult:
    name = task_id or f"write-{keys[0]}-{keys[-1]}-{time.monotonic_ns()}"
    ids = list(range(len(keys)))
    return client.submit(
        WriteStorageTask(task_id=name, keys=list(keys), gpu_block_ids=ids, start_write_block_idx=start)
    )


def storage(client: SyncClient) -> dict[str, Any]:
    found: dict[str, Any] = new_sync_stats(client)["storage"]
    return found


def concerns(client: SyncClient) -> set[str]:
    return {concern["name"] for concern in new_sync_stats(client)["concerns"]}


def small_disk(tmp_path: Path, options: str) -> tuple[Path, list[str]]:
    blocks = tmp_path / "blocks"
    blocks.mkdir()
    return blocks, in_own_mounts(f"mount -t tmpfs -o {options} tmpfs {blocks}")


def seen(daemon: DaemonProcess, path: Path) -> Path:
    """A path in the daemon's own mount namespace."""
    return Path(f"/proc/{daemon.pid}/root{path}")


def on_disk(directory: Path) -> int:
    """What the objects take on the disk, files and not directories."""
    return sum(path.lstat().st_blocks * 512 for path in directory.rglob("*") if not path.is_dir())


# --- the order of use -----------------------------------------------------------------------------

CONVERSATIONS, TURNS, GROWTH, ROOM = 8, 10, 5, 400


def talk(client: SyncClient) -> list[list[str]]:
    """Eight conversations that grow in turn, as an engine has them: it asks what is stored, and stores what is new."""
    chains = [[f"c{c}-{i}" for i in range(TURNS * GROWTH)] for c in range(CONVERSATIONS)]
    for turn in range(TURNS):
        for chain in chains:
            have = turn * GROWTH
            assert client.match(chain[: have + GROWTH]) == have
            assert write(client, chain[have : have + GROWTH], start=have).status is Status.OK
    return chains


def loads_after(directory: Path, *, killed: bool) -> int:
    """How many blocks of the conversations load after the daemon's end, a start, and 160 new blocks."""
    directory.mkdir()
    config = tree(directory / "blocks", ROOM * OBJECT)
    daemon = launch.start(config, directory)
    with SyncClient(daemon.endpoint) as client:
        client.attach(0)
        chains = talk(client)
        if killed:
            daemon.kill()
    if not killed:
        assert daemon.stop() == 0
    with serving(directory, config) as (_, client):
        for start in range(0, 160, 40):
            write(client, [f"new-{i}" for i in range(start, start + 40)])
        return sum(client.match(chain) for chain in chains)


def test_what_a_kill_leaves_is_as_useful_as_what_a_stop_leaves(tmp_path: Path) -> None:
    stopped, killed = loads_after(tmp_path / "stop", killed=False), loads_after(tmp_path / "kill", killed=True)
    print(f"blocks that load after a stop: {stopped}, after kill -9: {killed}")
    assert stopped >= 230
    assert killed >= 0.95 * stopped


@pytest.mark.parametrize("several", [False, True], ids=["one a task", "several a task"])
@pytest.mark.parametrize("shape", ["file", "two disks", "memory, file"])
def test_conversations_of_one_length_keep_their_roots(tmp_path: Path, shape: str, several: bool) -> None:
    """They grow in turn, as chunked prefill makes them. Guessed, of 132 blocks that were left none was usable."""
    count, length, room = 8, 24, 132 * 4096
    file: dict[str, Any] = {"path": str(tmp_path / "blocks"), "capacity": room}
    if shape == "two disks":
        file = {"path": [str(tmp_path / "a"), str(tmp_path / "b")], "capacity": [room // 2] * 2}
    section: dict[str, Any] = {"backend": "file", "file": file}
    if shape == "memory, file":
        section = {"levels": ["memory", "file"], "memory": {"capacity": 64 * 640}, "file": file}
    chains = [[f"c{number}-{i}" for i in range(length)] for number in range(count)]
    with serving(tmp_path, {"cache": SMALL, "storage": section}) as (_, client):
        for at in range(0, length, 2):
            for some in [chains] if several else [[chain] for chain in chains]:
                keys = [key for chain in some for key in chain[at : at + 2]]
                runs = [(2 * i, at, chain[at - 1] if at else "") for i, chain in enumerate(some)]
                client.submit(
                    WriteStorageTask(
                        task_id=f"w-{at}-{keys[0]}", keys=keys, gpu_block_ids=list(range(len(keys))), chains=runs
                    )
                )
        if shape == "memory, file":
            wait_until(lambda: not any(level["pending_bytes"] for level in storage_levels(client)), "all is copied")
        usable = sum(client.match(chain) for chain in chains)
    assert usable >= {"file": 132, "two disks": 100, "memory, file": 130}[shape], "each disk has half of the room"


def storage_levels(client: SyncClient) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = storage(client)["levels"]
    return found


def test_what_is_only_looked_up_outlives_what_is_not_also_after_a_kill(tmp_path: Path) -> None:
    config = tree(tmp_path / "blocks", 60 * OBJECT)
    daemon = launch.start(config, tmp_path)
    with SyncClient(daemon.endpoint) as client:
        client.attach(0)
        asked, touched, written, unused = ([f"{name}{i}" for i in range(10)] for name in "abcd")
        for keys in (asked, touched, written, unused):
            write(client, keys)
        assert client.match(asked) == 10
        assert all(client.exists(touched))
        write(client, written)
        order = tmp_path / "blocks" / "order"  # five times ten objects were written, and twice ten looked up
        wait_until(lambda: order.exists() and order.stat().st_size > 70 * RECORD.itemsize, "a kill leaves all uses")
        daemon.kill()
    with serving(tmp_path, config) as (_, client):
        write(client, [f"new-{i}" for i in range(30)])
        assert [client.match(keys) for keys in (asked, touched, written, unused)] == [10, 10, 10, 0]


@pytest.mark.parametrize("growth", [1, 5])
def test_a_chain_that_grows_over_tasks_keeps_its_root(tmp_path: Path, growth: int) -> None:
    chain = [f"k{i}" for i in range(65)]
    config = tree(tmp_path / "blocks", 24 * OBJECT)
    with serving(tmp_path, config) as (_, client):
        for i in range(0, len(chain), growth):
            write(client, chain[i : i + growth], start=i)
        assert client.match(chain) >= 20
    with serving(tmp_path, config) as (_, client):
        assert client.match(chain) >= 20, "after a restart, too"


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_pins_last_until_their_time_over_a_restart(tmp_path: Path, end: str) -> None:
    config = tree(tmp_path / "blocks", 24 * OBJECT) | {"engines": {"pin_share": 0.4}}
    pinned, unpinned = [f"p{i}" for i in range(2)], [f"u{i}" for i in range(2)]
    daemon = launch.start(config, tmp_path)
    with SyncClient(daemon.endpoint) as client:
        client.attach(0)
        write(client, [*pinned, *unpinned])
        assert client.pin([*pinned, *unpinned], 3600.0) == 4
        client.unpin(unpinned)
        if end == "kill":
            daemon.kill()
    if end == "stop":
        assert daemon.stop() == 0
    with serving(tmp_path, config) as (_, client):
        assert storage(client)["pinned"] == 2
        for start in range(0, 60, 20):
            write(client, [f"new-{i}" for i in range(start, start + 20)])
        assert client.exists([*pinned, *unpinned]) == [True, True, False, False]
        client.unpin(pinned)
    with serving(tmp_path, config) as (_, client):
        assert storage(client)["pinned"] == 0


# --- what is really there -------------------------------------------------------------------------


def test_no_write_is_answered_ok_without_its_bytes(tmp_path: Path) -> None:
    keys = [f"k{i}" for i in range(8)]
    blocks = tmp_path / "blocks"
    with serving(tmp_path, tree(blocks, "64MiB")) as (daemon, client):
        assert write(client, keys).status is Status.OK
        for path in (blocks / "objects").rglob("*@0"):
            path.unlink()
        again = write(client, keys)
        assert (again.status, again.bytes) == (Status.OK, 8 * BLOCK), "stored anew"
        assert len(list((blocks / "objects").rglob("*@0"))) == 8
        removed = min((blocks / "objects").rglob("*@0"))
        removed.unlink()
        assert write(client, keys).bytes == BLOCK, "what was gone, and only that"
        assert storage(client)["gone"] == 9
        assert "objects_gone" in concerns(client)
        wait_until(lambda: "objects were removed from outside" in daemon.log)


def test_a_folder_that_belongs_to_another_user_costs_its_own_objects_and_no_more(tmp_path: Path) -> None:
    """As after a restore as root: nothing in it can be removed, and other objects make room as ever."""
    page, blocks = FaultPage(tmp_path / "page"), tmp_path / "blocks"
    with serving(tmp_path, tree(blocks, 32 * OBJECT), page.prefix) as (daemon, client):
        assert write(client, ["first"]).status is Status.OK
        [path] = (blocks / "objects").rglob("*@0")
        for number in range(8):
            assert write(client, [f"old-{number}-{i}" for i in range(4)]).status is Status.OK
        assert not path.exists(), "the oldest went: the store is full"
        assert write(client, ["first"]).status is Status.OK
        for number in range(7):
            assert write(client, [f"newer-{number}-{i}" for i in range(4)]).status is Status.OK
        with page.armed("unlink,rename", errno.EPERM, path=f"{path.parent}/"):  # the next to go but three
            results = [write(client, [f"new-{number}-{i}" for i in range(4)]) for number in range(8)]
        assert {result.status for result in results} == {Status.OK}
        assert path.exists()
        [disk] = storage(client)["disks"]
        assert (disk["stuck"], disk["stuck_bytes"]) == (1, BLOCK + 128)
        assert str(path) in disk["stuck_why"]
        assert "files_stuck" in concerns(client)
        assert "storage_errors" not in concerns(client)
        wait_until(lambda: "an object cannot be removed and is set aside" in daemon.log)
        loaded = client.submit(ReadStorageTask(task_id="r", keys=["first"], gpu_block_ids=[0]))
        assert loaded.status is Status.OK, "it is served"


def test_files_that_a_cleaner_removes_are_noticed_without_a_task_for_them(tmp_path: Path) -> None:
    keys = [f"k{i}" for i in range(32)]
    blocks = tmp_path / "blocks"
    with serving(tmp_path, tree(blocks, "64MiB")) as (_, client):
        write(client, keys)
        for path in (blocks / "objects").rglob("*@0"):
            path.unlink()
        wait_until(lambda: storage(client)["objects"] == 0)  # reports look at the disk
        assert client.match(keys) == 0


@pytest.mark.parametrize("what", ["all of it", "the lock", "the objects"])
def test_a_directory_that_is_removed_is_said_and_made_anew(tmp_path: Path, what: str) -> None:
    keys = [f"k{i}" for i in range(8)]
    blocks = tmp_path / "blocks"
    with serving(tmp_path, tree(blocks, "64MiB")) as (daemon, client):
        write(client, ["before"])
        write(client, keys)
        if what == "all of it":
            shutil.rmtree(blocks)
        elif what == "the lock":
            (blocks / "lock").unlink()
        else:
            shutil.rmtree(blocks / "objects")
        wait_until(lambda: client.stats() and "the store is lost" in daemon.log)
        wait_until(lambda: not storage(client)["disks"][0]["problem"])
        assert write(client, keys).status is Status.OK
        assert client.match(["before"]) == (what == "the lock"), "what is there is found again"
        assert len(list((blocks / "objects").rglob("*@0"))) == 8 + (what == "the lock")
        assert (blocks / "lock").read_text().strip() == str(daemon.pid)
        with pytest.raises(TransferError, match="in use by another daemon"):
            second(tmp_path, blocks)


def second(tmp_path: Path, blocks: Path) -> DaemonProcess:
    (tmp_path / "second").mkdir(exist_ok=True)
    return launch.start(tree(blocks, "64MiB"), tmp_path / "second")


def test_a_store_that_another_daemon_has_taken_is_not_touched_until_it_is_free(tmp_path: Path) -> None:
    keys = [f"k{i}" for i in range(8)]
    blocks = tmp_path / "blocks"
    with serving(tmp_path, tree(blocks, 10 * OBJECT)) as (daemon, client):
        write(client, keys)
        daemon.signal(signal.SIGSTOP)  # else it is first, and makes the directory anew
        shutil.rmtree(blocks)
        other = second(tmp_path, blocks)
        daemon.signal(signal.SIGCONT)
        try:
            with SyncClient(other.endpoint) as theirs:
                theirs.attach(0)
                assert write(theirs, keys).status is Status.OK
                refused = write(client, [f"n{i}" for i in range(10)])
                assert refused.status is Status.FAILED
                assert refused.error is not None
                assert refused.error.code == "storage_unavailable"
                assert "another daemon" in refused.error.message or "lock was" in refused.error.message
                wait_until(lambda: not client.stats()["ready"])
                assert "store_lost" in concerns(client)
                assert theirs.match(keys) == 8
                assert len(list((blocks / "objects").rglob("*@0"))) == 8, "nobody else writes or removes here"
        finally:
            other.stop()
        wait_until(lambda: client.stats()["ready"])
        assert client.match(keys) == 8, "it takes over what the other one has left"


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize(
    "what", ["a directory", "a full directory", "a fifo", "a link", "a file on the way", "a dead link on the way"]
)
def test_a_key_can_be_stored_whatever_lies_in_its_place(tmp_path: Path, what: str, restart: bool) -> None:
    blocks = tmp_path / "blocks"
    config = tree(blocks, "64MiB")
    with serving(tmp_path, config) as (_, client):
        write(client, ["k"])
        [path] = (blocks / "objects").rglob("*@0")
        if not restart:
            put_in_place(what, path)
            assert write(client, ["k"]).bytes == BLOCK
            assert path.is_file()
            assert path.stat().st_size > BLOCK
            return
    put_in_place(what, path)
    with serving(tmp_path, config) as (_, client):
        stored = write(client, ["k"])
        assert (stored.status, stored.bytes) == (Status.OK, BLOCK), stored
        assert path.is_file()
        assert not path.is_symlink()


def put_in_place(what: str, path: Path) -> None:
    path.unlink()
    if what == "a fifo":
        os.mkfifo(path)
    elif what == "a link":
        path.symlink_to("/etc/hostname")
    elif what.endswith("directory"):
        path.mkdir()
        if "full" in what:
            (path / "mine").write_text("x")
    else:
        shutil.rmtree(path.parent)
        if "dead" in what:
            path.parent.symlink_to("/nowhere/at/all")
        else:
            path.parent.write_text("x")


# --- room -----------------------------------------------------------------------------------------


@root
def test_the_reserve_stays_free_when_others_fill_the_disk(tmp_path: Path) -> None:
    blocks, mounts = small_disk(tmp_path, f"size={64 * MIB}")
    config = tree(blocks, 1024 * MIB, reserve="8MiB")
    with serving(tmp_path, config, mounts) as (daemon, client):
        for i in range(0, 1024, 64):  # as much as the whole disk has
            assert write(client, [f"k{j}" for j in range(i, i + 64)]).status is Status.OK

        def free() -> int:
            return os.statvfs(seen(daemon, blocks)).f_bavail * 4096

        wait_until(lambda: free() >= 8 * MIB)
        assert storage(client)["evicted_for"]["medium_full"] == 0, "nothing has failed"
        with (seen(daemon, blocks) / "theirs").open("wb", buffering=0) as theirs:
            for _ in range(4):
                theirs.write(bytes(5 * MIB))
                wait_until(lambda: storage(client) and free() >= 8 * MIB)  # reports look at the disk
        found = storage(client)
        assert found["evicted_for"]["reserve"] > 0
        assert found["disks"][0]["room"] < 40 * MIB
        assert found["bytes"] > 20 * MIB, "no more than needed"
        wait_until(lambda: "disk_nearly_full" in concerns(client))
        assert "does not fit" in daemon.log
        assert write(client, ["one more"]).status is Status.OK
        (seen(daemon, blocks) / "theirs").unlink()
        wait_until(lambda: storage(client)["disks"][0]["room"] > 50 * MIB)


@root
def test_a_disk_without_room_for_the_reserve_says_whose_files_they_are(tmp_path: Path) -> None:
    blocks, mounts = small_disk(tmp_path, f"size={16 * MIB}")
    with serving(tmp_path, tree(blocks, 8 * MIB, reserve="4MiB"), mounts) as (daemon, client):
        (seen(daemon, blocks) / "theirs").write_bytes(bytes(13 * MIB))
        wait_until(lambda: storage(client)["disks"][0]["room"] == 0)
        refused = write(client, ["k"])
        assert refused.error is not None
        assert refused.error.code == "storage_full"
        assert "storage.file.reserve" in refused.error.message


def test_capacity_counts_what_the_disk_counts(tmp_path: Path) -> None:
    blocks = tmp_path / "blocks"
    with serving(tmp_path, tree(blocks, 1 * MIB, SMALL)) as (_, client):
        for i in range(0, 1024, 256):
            write(client, [f"k{j}" for j in range(i, i + 256)])
        found = storage(client)
        assert on_disk(blocks / "objects") <= 1 * MIB
        assert found["bytes"] == on_disk(blocks / "objects")
        assert found["objects"] == 256


@root
@pytest.mark.parametrize("inodes", [200, 700])
def test_a_disk_without_inodes_evicts_files(tmp_path: Path, inodes: int) -> None:
    blocks, mounts = small_disk(tmp_path, f"size={256 * MIB},nr_inodes={inodes}")
    with serving(tmp_path, tree(blocks, 200 * MIB, SMALL), mounts) as (daemon, client):
        results = [write(client, [f"k{j}" for j in range(i, i + 16)]) for i in range(0, 2048, 16)]
        failed = [i for i, result in enumerate(results) if result.status is not Status.OK]
        print(f"failed of {len(results)}: {failed}")
        assert len(failed) <= 1, "at most the first that found no inode"
        assert storage(client)["disks"][0]["files_free"] > 0

        def reserve_is_free() -> bool:
            storage(client)  # it looks at the disk once a second, while somebody asks
            return os.statvfs(seen(daemon, blocks)).f_favail >= inodes // 40

        wait_until(reserve_is_free, "it has evicted for the reserve")


def test_a_smaller_capacity_on_sighup_is_reached_while_tasks_go_on(tmp_path: Path) -> None:
    config = tree(tmp_path / "blocks", 1200 * 4096, SMALL)
    with serving(tmp_path, config) as (daemon, client):
        for start in range(0, 1200, 200):
            write(client, [f"k{i}" for i in range(start, start + 200)])
        assert storage(client)["objects"] == 1200
        text = daemon.config_file.read_text()
        daemon.config_file.write_text(text.replace(f"capacity = {1200 * 4096}", f"capacity = {100 * 4096}"))
        daemon.signal(signal.SIGHUP)
        assert write(client, ["beside"]).status is Status.OK
        wait_until(lambda: storage(client)["objects"] <= 100)
        there = storage(client)
        assert (there["capacity"], there["bytes"]) == (100 * 4096, there["objects"] * 4096)
        assert there["evicted_for"]["shrink"] >= 1100
        objects = tmp_path / "blocks" / "objects"
        wait_until(lambda: sum(len(files) for _, _, files in os.walk(objects)) == there["objects"])
        assert client.match([f"k{i}" for i in range(1000, 1090)]) == 90, "the root of the latest chain"
        assert "capacity" in daemon.log


@pytest.mark.parametrize("pinned", [4, 0])
def test_a_store_without_room_on_a_disk_that_has_some_says_what_fills_it(tmp_path: Path, pinned: int) -> None:
    config = tree(tmp_path / "blocks", 10 * OBJECT, reserve="0%") | {"engines": {"pin_share": 0.5}}
    with serving(tmp_path, config) as (_, client):
        write(client, [f"p{i}" for i in range(4)])
        client.pin([f"p{i}" for i in range(pinned)], 3600.0)
        long = write(client, [f"k{i}" for i in range(12)])
        assert (long.status, len(long.block_ids)) == (Status.PARTIAL, 10 - pinned)
        (found,) = [one for one in new_sync_stats(client)["concerns"] if "full" in one["name"]]
        assert found["name"] == "store_full"
        assert ("pinned" in found["text"]) == bool(pinned), found
        assert "share" not in found["text"]


@root
def test_a_disk_that_turns_read_only_is_said(tmp_path: Path) -> None:
    blocks, mounts = small_disk(tmp_path, f"size={64 * MIB}")
    with serving(tmp_path, tree(blocks, "32MiB"), mounts) as (daemon, client):
        write(client, ["k"])
        os.system(f"nsenter --target {daemon.pid} --mount mount -o remount,ro {blocks}")
        wait_until(lambda: "disk_read_only" in concerns(client))
        assert client.match(["k"]) == 1
        os.system(f"nsenter --target {daemon.pid} --mount mount -o remount,rw {blocks}")
        wait_until(lambda: "disk_read_only" not in concerns(client))
        assert write(client, ["l"]).status is Status.OK
