"""What an operator or another user sees of a store from outside: commands, metrics, the log, events and alerts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.storing_engine import RANKS, Storing
from tests.integration.subscriber import Subscriber
from tests.integration.test_purge import place, transferd  # noqa: F401
from tests.integration.test_store_left_alone import MIB, concerns, seen, serving, small_disk, tree, write
from tests.machine.hostile.accounts import accounts
from tests.support.waits import wait_until
from transferd.cli.pool.master import free_port
from transferd.client.launch import running
from transferd.config.toml import to_toml
from transferd.wire.kv_events import block_hash

pytestmark = [pytest.mark.one_loop, pytest.mark.skipif(os.geteuid() != 0, reason="other users and mounts need root")]
ALERTS = Path(__file__).parents[2] / "deploy" / "prometheus" / "alerts.yml"
# The command line as another user, who may not read this installation.
AS_USER = """
import sys, rich.console, rich.progress, transferd.cli.keeping, tests.integration.storing_engine
from tests.machine.hostile.accounts import become
from transferd.cli import main
become({0}, {0})
sys.argv = ["transferd", *{1!r}]
main.main()
"""


def by_command(uid: int, endpoint: str, *words: str) -> tuple[int, str, str]:
    code = AS_USER.format(uid, [*words, "--endpoint", endpoint, "--format", "json"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, " ".join(done.stderr.split())


def test_the_purge_command_of_another_user_is_refused_and_ones_own_goes(place: Path) -> None:  # noqa: F811
    config = {"server": {"socket_mode": "0666"}, "storage": {"backend": "file"}}
    keys = [f"k{i}" for i in range(4)]
    with accounts("alice", "bob") as users, running(config, place) as node:
        alice, bob = users["alice"].uid, users["bob"].uid
        with Storing(node.endpoint, "llama", uid=alice) as engine:
            engine.write(keys)
            for words in (["--all"], ["--engine", "llama"], [keys[0], "--engine", "llama", "--dry-run"]):
                code, out, said = by_command(bob, node.endpoint, "purge", *words)
                assert (code, out) == (1, ""), (words, said)
                assert f"you are user {bob}" in said, said
            assert engine.read(keys) == keys
            code, out, said = by_command(alice, node.endpoint, "purge", keys[0], "--engine", "llama")
            assert (code, json.loads(out)["objects"]) == (0, RANKS), said
            assert engine.read(keys) == keys[1:]


def test_a_purge_is_told_to_routers(place: Path) -> None:  # noqa: F811
    places = {"endpoint": f"ipc://{place}/pub", "replay_endpoint": f"ipc://{place}/replay"}
    keys = [f"k{i}" for i in range(4)]
    with running({"storage": {"backend": "file"}, "events": places}, place) as node:
        router = Subscriber(places["endpoint"], places["replay_endpoint"])
        try:
            with Storing(node.endpoint, "a") as engine:
                engine.write(keys)

                def knows(these: list[str]) -> bool:
                    engine.stats()  # a turn of the daemon's loop
                    router.catch_up()
                    return router.index.get("STORAGE", set()) == set(map(block_hash, these))

                wait_until(lambda: knows(keys))
                assert transferd(node.endpoint, "purge", "--all", "--dry-run")["objects"] == 4 * RANKS
                assert knows(keys)
                transferd(node.endpoint, "purge", *keys[:2], "--engine", "a")
                wait_until(lambda: knows(keys[2:]))
                transferd(node.endpoint, "purge", "--all")
                wait_until(lambda: knows([]))
        finally:
            router.close()


@pytest.mark.parametrize("command", ["check-config", "doctor"])
def test_a_capacity_that_does_not_fit_is_said_before_the_start(command: str, tmp_path: Path) -> None:
    blocks, mounts = small_disk(tmp_path, "size=4g")
    config = tmp_path / "transferd.toml"
    said = {}
    for capacity in ("8GiB", "1GiB"):
        given = tree(blocks, capacity) | {"server": {"endpoint": f"ipc://{tmp_path}/s"}}
        config.write_text(to_toml(given))
        words = [sys.executable, "-m", "transferd", command, "--config", str(config)]
        done = subprocess.run([*mounts, *words], capture_output=True, text=True, timeout=100, check=False)
        said[capacity] = " ".join((done.stdout + done.stderr).split())
    assert "8.0 GiB do not fit on its file system, which has 4.0 GiB" in said["8GiB"], said
    assert "do not fit" not in said["1GiB"], said


def trouble(client: Any, name: str) -> dict[str, Any]:
    """The concern of this name, once it is there."""
    wait_until(lambda: name in concerns(client))
    return next(one for one in client.stats()["concerns"] if one["name"] == name)


def alerts_on(name: str) -> list[str]:
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    return [rule["alert"] for rule in rules if "concern" in rule["expr"] and name in rule["expr"]]


@pytest.mark.parametrize("what", ["disk_read_only", "disk_nearly_full", "disk_full"])
def test_a_disk_that_fills_or_turns_read_only_is_said_everywhere(what: str, tmp_path: Path) -> None:
    blocks, mounts = small_disk(tmp_path, f"size={64 * MIB}")
    port = free_port()
    capacity, reserve = ("32MiB", "4MiB")
    config = tree(blocks, capacity, reserve=reserve) | {"metrics": {"listen": f"127.0.0.1:{port}"}}

    def metric() -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            return re.search(rf'transferd_concern\{{concern="{what}",[^}}]*\}} 1', answer.read().decode()) is not None

    with serving(tmp_path, config, mounts) as (daemon, client):
        write(client, ["k"])
        assert not metric()
        if what == "disk_read_only":
            os.system(f"nsenter --target {daemon.pid} --mount mount -o remount,ro {blocks}")
        else:
            full = 62 if what == "disk_full" else 50
            (seen(daemon, blocks) / "theirs").write_bytes(bytes(full * MIB))
        if what == "disk_full":
            wait_until(lambda: client.stats()["storage"]["disks"][0]["room"] == 0)
            write(client, ["l"])
        found = trouble(client, what)
        remedy = {"disk_read_only": "mount it for writing", "disk_nearly_full": "Free space", "disk_full": "Free space"}
        assert remedy[what] in found["action"], found
        wait_until(metric)
        wait_until(lambda: what in daemon.log)
        assert alerts_on(what)
