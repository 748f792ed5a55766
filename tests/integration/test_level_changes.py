"""`transferd level drain` and `use` at a daemon in a process of its own: nothing is lost, and only operators may."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.storing_engine import Refused, Storing
from tests.integration.test_levels import BLOCKS, KEYS, RANKS, copied, daemon_of, filled, read, rows, same, tree, write
from tests.integration.test_purge import daemon, place
from tests.machine.hostile.accounts import accounts
from tests.support.waits import wait_until
from transferd import Status, WriteStorageTask

__all__ = ["place"]
OBJECTS = RANKS * BLOCKS
OTHERS = [f"other{i}" for i in range(BLOCKS)]

pytestmark = pytest.mark.one_loop


def level(endpoint: str, action: str, name: str) -> Any:
    command = [sys.executable, "-m", "transferd", "level", action, name, "--endpoint", endpoint, "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else done.stderr


def store(client: Any, task_id: str, keys: list[str]) -> Status:
    task = WriteStorageTask(task_id=task_id, keys=keys, gpu_block_ids=list(range(BLOCKS)))
    status: Status = client.submit(task).status
    return status


def test_the_lower_level_leaves_and_comes_back(tmp_path: Path) -> None:
    with daemon_of(tree(tmp_path), tmp_path) as (process, client):
        kept = filled(client)
        assert write(client).status is Status.OK
        copied(client)
        assert level(process.endpoint, "drain", "file") == {
            "level": "file",
            "state": "drained",
            "objects": 0,
            "bytes": 0,
        }
        below = rows(client)[1]
        assert (below["state"], below["available"], below["objects"]) == ("drained", False, OBJECTS)
        assert all(one["name"] != "level_silent" for one in client.stats()["concerns"]), "it is no trouble"
        assert store(client, "o", OTHERS) is Status.OK
        assert read(client, "r", OTHERS).status is Status.OK
        assert same(kept, client)
        assert rows(client)[1]["objects"] == OBJECTS, "nothing goes there"
        assert client.locate(keys=KEYS).popitem()[1] == {"memory": BLOCKS, "any": BLOCKS}
        assert level(process.endpoint, "drain", "file")["state"] == "drained", "again"
        assert "the only level that is in use" in level(process.endpoint, "drain", "memory")
        assert level(process.endpoint, "use", "file")["state"] == "used"
        assert store(client, "o2", OTHERS) is Status.OK
        copied(client, objects=2 * OBJECTS)
        assert "it has memory, file" in level(process.endpoint, "drain", "attic")


def test_the_first_level_leaves_and_a_kill_loses_nothing(tmp_path: Path) -> None:
    with daemon_of(tree(tmp_path), tmp_path / "a") as (process, client):
        kept = filled(client)
        assert write(client).status is Status.OK
        assert level(process.endpoint, "drain", "memory") == {
            "level": "memory", "state": "drained", "objects": 0, "bytes": 0
        }  # fmt: skip
        assert rows(client)[1]["objects"] == OBJECTS, "what only the memory had is below"
        assert read(client, "r").status is Status.OK
        assert same(kept, client)
        assert rows(client)[1]["hits"] >= OBJECTS
        assert store(client, "o", OTHERS) is Status.OK
        assert rows(client)[0]["objects"] == OBJECTS, "it stores nothing more"
        process.kill()
    with daemon_of(tree(tmp_path), tmp_path / "b") as (_, client):
        assert rows(client)[0]["state"] == "used", "a restart puts it back"
        for number, keys in enumerate((KEYS, OTHERS)):
            assert read(client, f"r{number}", keys).status is Status.OK
            assert same(kept, client)


@pytest.mark.parametrize("room", ["16MiB", "768KiB"])
def test_blocks_of_the_lowest_level_come_up_as_far_as_there_is_room(tmp_path: Path, room: str) -> None:
    config = tree(tmp_path, memory={"capacity": room}, level={"file": {"promote": 0}})
    with daemon_of(config, tmp_path / "a") as (_, client):
        kept = filled(client)
        assert write(client).status is Status.OK
        wait_until(lambda: rows(client)[1]["objects"] == OBJECTS and not rows(client)[1]["pending_bytes"], "below")
    with daemon_of(config, tmp_path / "b") as (process, client):
        assert rows(client)[0]["objects"] == 0
        change = level(process.endpoint, "drain", "file")
        assert change["state"] == "drained"
        up = rows(client)[0]["objects"]
        assert up + change["objects"] == OBJECTS
        assert (change["objects"] == 0) == (room == "16MiB")
        there = client.exists(KEYS)
        result = read(client, "r", prefix=False)
        assert set(result.block_ids) == {BLOCKS + i for i, one in enumerate(there) if one}
        assert level(process.endpoint, "use", "file")["state"] == "used"
        assert read(client, "r2").status is Status.OK, "nothing was lost"
        assert same(kept, client)


def test_settings_of_a_level_change_on_sighup(tmp_path: Path) -> None:
    config = tree(tmp_path, level={"file": {"promote": 0}})
    with daemon_of(config, tmp_path / "a") as (_, client):
        filled(client)
        assert write(client).status is Status.OK
    with daemon_of(config, tmp_path / "b") as (process, client):
        for number in range(3):
            assert read(client, f"r{number}").status is Status.OK
        assert rows(client)[0]["objects"] == 0, "nothing is copied up"
        text = process.config_file.read_text()
        assert "promote = 0" in text
        process.config_file.write_text(text.replace("promote = 0", 'promote = 1\nwrite = "through"'))
        process.signal(signal.SIGHUP)
        wait_until(lambda: "storage.level.file.promote" in process.log, "it says what has changed")
        assert read(client, "r").status is Status.OK
        wait_until(lambda: rows(client)[0]["objects"] == OBJECTS, "all come up")
        before = rows(client)[1]["copied"]
        assert store(client, "o", OTHERS) is Status.OK
        assert rows(client)[1]["copied"] == before + OBJECTS, "the store has waited for the files"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users")
def test_only_operators_change_levels(place: Path) -> None:
    with accounts("bob") as users, daemon(place, "memory") as node:
        with Storing(node.endpoint, "bobs", uid=users["bob"].uid) as bob:
            for leaves in (True, False):
                with pytest.raises(Refused) as refused:
                    bob.change_level(leaves)
                assert refused.value.code == "not_yours"
        assert "the store is memory alone" in level(node.endpoint, "drain", "memory"), "root may, if there were levels"
