"""Purges of a running daemon: engines in processes and of users of their own, the command line, real files."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.storing_engine import RANKS, Refused, Storing
from tests.machine.faults.resources import in_own_mounts
from tests.machine.hostile.accounts import accounts
from tests.support.waits import wait_until
from transferd.client.launch import DaemonProcess, running

pytestmark = pytest.mark.one_loop

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users")
A, B = [f"a{i}" for i in range(8)], [f"b{i}" for i in range(8)]


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user can enter."""
    with tempfile.TemporaryDirectory(prefix="td-purge-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.fixture(params=["file", "memory"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextlib.contextmanager
def daemon(place: Path, backend: str, **more: Any) -> Iterator[DaemonProcess]:
    tree: dict[str, Any] = {"server": {"socket_mode": "0666"}, "storage": {"backend": backend}} | more
    with running(tree, place) as process:
        yield process


def transferd(endpoint: str, *words: str, expect: int = 0) -> Any:
    command = [sys.executable, "-m", "transferd", *words, "--endpoint", endpoint, "--format", "json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == expect, ended.stderr
    return json.loads(ended.stdout) if ended.stdout.strip() else ended.stderr.strip()


def files(place: Path) -> list[Path]:
    return [path for path in (place / "blocks" / "objects").rglob("*@*") if path.is_file()]


def test_by_engine_model_generation_keys_and_all_with_a_dry_run_before(place: Path, backend: str) -> None:
    with daemon(place, backend) as node, Storing(node.endpoint, "a") as a, Storing(node.endpoint, "b") as b:
        assert a.write(A)["status"] == b.write(B)["status"] == "ok"
        b.generation("next")
        assert b.write(B[:3])["status"] == "ok"
        each = node_bytes(a) // (19 * RANKS)
        assert transferd(node.endpoint, "purge", "--engine", "a", "--dry-run") == {
            "objects": 8 * RANKS, "bytes": 8 * RANKS * each, "dry_run": True,
        }  # fmt: skip
        assert a.read(A) == A, "a dry run removes nothing"
        assert transferd(node.endpoint, "purge", "--generation", "", "--model", "model of b")["objects"] == 8 * RANKS
        assert b.read(B) == B[:3]
        assert a.read(A) == A
        assert transferd(node.endpoint, "purge", *A[:2], "absent", "--engine", "a")["objects"] == 2 * RANKS
        assert a.read(A) == A[2:]
        assert a.write(A)["status"] == "ok", "what was purged can be stored again"
        assert a.read(A) == A
        if backend == "file":
            assert len(files(place)) == 11 * RANKS
        assert transferd(node.endpoint, "purge", "--all")["objects"] == 11 * RANKS
        assert (a.read(A), b.read(B)) == ([], [])
        assert not files(place)
        stats = a.stats()["storage"]
        assert (stats["objects"], stats["bytes"], stats["purged"], stats["purging"]) == (0, 0, 21 * RANKS, 0)


def node_bytes(engine: Storing) -> int:
    return int(engine.stats()["storage"]["bytes"])


def test_by_age_also_of_what_an_earlier_daemon_stored(place: Path) -> None:
    with daemon(place, "file") as node, Storing(node.endpoint, "a") as a:
        a.write(A)
        assert transferd(node.endpoint, "purge", "--older-than", "1h")["objects"] == 0
    for path in files(place)[: 3 * RANKS]:
        os.utime(path, (0, path.stat().st_mtime - 7200))
    with daemon(place, "file") as node, Storing(node.endpoint, "a") as a:
        assert transferd(node.endpoint, "purge", "--older-than", "1h", "--dry-run")["objects"] == 3 * RANKS
        assert transferd(node.endpoint, "purge", "--older-than", "1h")["objects"] == 3 * RANKS
        assert len(files(place)) == 5 * RANKS
        assert transferd(node.endpoint, "purge", "--older-than", "0s", "--engine", "a")["objects"] == 5 * RANKS


def test_an_engine_that_has_left_is_purged_by_name(place: Path, backend: str) -> None:
    with daemon(place, backend) as node:
        with Storing(node.endpoint, "a") as a:
            a.write(A)
        with Storing(node.endpoint, "b") as b:
            assert "unknown_engine" not in transferd(node.endpoint, "purge", "--engine", "a")
            assert node_bytes(b) == 0
            problem = transferd(node.endpoint, "purge", "--engine", "c", expect=1)
            assert "no engine 'c' is registered, or has anything stored" in problem


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "say what to remove, or --all"),
        (["--all", "--model", "m"], "--all removes everything"),
        (["--older-than", "soon"], "expected a duration such as 7d"),
        (["--keys-from", "/absent"], "cannot be read"),
    ],
)
def test_bad_arguments_are_usage_errors(words: list[str], problem: str, tmp_path: Path) -> None:
    assert problem in transferd(f"ipc://{tmp_path}/nobody", "purge", *words, expect=2)


def test_a_backend_that_does_not_know_its_objects_says_so(place: Path) -> None:
    with daemon(place, "none") as node:
        assert "no storage tier" in transferd(node.endpoint, "purge", "--all", expect=1)


@needs_root
def test_who_may_purge(place: Path, backend: str) -> None:
    with accounts("alice", "bob") as users, contextlib.ExitStack() as stack:
        who = [0, *(user.uid for user in users.values())]  # they share blocks, because they are named
        node = stack.enter_context(daemon(place, backend, server={"socket_mode": "0666", "allowed_uids": who}))
        alice = stack.enter_context(Storing(node.endpoint, "llama", uid=users["alice"].uid))
        alices_other = stack.enter_context(Storing(node.endpoint, "qwen", uid=users["alice"].uid))
        # The same model and layout: bob's engine reads alice's blocks, and may remove none of them.
        bob = stack.enter_context(Storing(node.endpoint, "bobs", uid=users["bob"].uid, model="model of llama"))
        alice.write(A)
        alices_other.write(B)
        assert bob.read(A) == A
        bob.write([*A, "own"])
        for which in ({"engine": "llama"}, {"engine": "qwen", "keys": B}):
            with pytest.raises(Refused) as refused:
                bob.purge(**which)
            assert refused.value.code == "not_yours"
            assert f"user {users['alice'].uid}" in str(refused.value)
            assert f"you are user {users['bob'].uid}" in str(refused.value)
        assert bob.purge(keys=A) == [0, 0], "by keys, too: they are alice's"
        assert bob.purge()[0] == RANKS, "without an engine: what bob's own engine has stored"
        assert alice.read(A) == A
        assert alice.purge(keys=A[:1])[0] == RANKS
        assert alice.purge(engine="qwen")[0] == len(B) * RANKS, "an engine of the same user"
        stranger = stack.enter_context(Storing(node.endpoint, uid=users["bob"].uid))  # belongs to no engine
        for which in ({}, {"model": "model of llama"}, {"engine": "llama"}):
            with pytest.raises(Refused) as refused:
                stranger.purge(**which)
            assert refused.value.code == "not_yours"
        assert alice.read(A) == A[1:]
        assert transferd(node.endpoint, "purge", "--all")["objects"] == 7 * RANKS, "root and the daemon's user may"


@needs_root
def test_the_engine_of_the_configuration_is_the_daemons_users(place: Path) -> None:
    cache = {"ranks": 1, "device_blocks": 4, "host_blocks": 0, "layers": 1}
    with accounts("bob") as users, daemon(place, "memory", cache=cache) as node:
        with Storing(node.endpoint, uid=users["bob"].uid) as bob:
            for which in ({}, {"engine": "default"}, {"keys": ["k"]}):
                with pytest.raises(Refused) as refused:
                    bob.purge(**which)
                assert refused.value.code == "not_yours"
        assert transferd(node.endpoint, "purge", "k")["objects"] == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_purge_says_that_the_disk_is_away_and_reaches_it_when_it_returns(tmp_path: Path) -> None:
    blocks, device = tmp_path / "blocks", tmp_path / "device"
    blocks.mkdir()
    device.mkdir()
    mounts = in_own_mounts(f"mount -t tmpfs tmpfs {device} && mount --bind {device} {blocks}")
    tree: dict[str, Any] = {"storage": {"backend": "file", "file": {"path": str(blocks)}}}
    with running(tree, tmp_path, prefix=mounts) as node, Storing(node.endpoint, "a") as a:

        def mounted(*words: str) -> None:
            subprocess.run(["nsenter", "--target", str(node.pid), "--mount", *words], check=True)

        assert a.write(A)["status"] == "ok"
        mounted("umount", "-l", str(blocks))
        purged = transferd(node.endpoint, "purge", "--all", expect=3)
        assert (purged["complete"], purged["not_reached"], purged["kept_by"]) == (False, [str(blocks)], [])
        beneath = Path(f"/proc/{node.pid}/root{blocks}")
        assert not list(beneath.iterdir()), "nothing is written beneath the mount point"
        assert list((Path(f"/proc/{node.pid}/root{device}") / "objects").rglob("*@*")), "they are still on the disk"
        mounted("mount", "--bind", str(device), str(blocks))
        wait_until(lambda: not a.stats()["storage"]["disks"][0]["problem"])
        wait_until(lambda: not [path for path in (beneath / "objects").rglob("*@*") if path.is_file()])
        assert a.write(A)["status"] == "ok"
        assert transferd(node.endpoint, "purge", "--all")["complete"]
        assert '"pid":' in node.log or "'pid':" in node.log, "who has purged"
