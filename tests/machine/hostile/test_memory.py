"""Engines that lend memory which is not theirs, which others have, or which they take away again.

The daemon and every engine are processes of their own; engines run as users of their own. Only root can make those.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.machine.hostile.oracle import descriptors
from tests.support.memory_group import memory_group
from tests.support.waits import until, wait_until
from transferd import Client, Pages, TransferError
from transferd import Engine as Registered
from transferd.client.launch import running, start
from transferd.tiers.base import DeviceHandle
from transferd.tiers.owner import as_data, this_process

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users")

LENDER = "tests.machine.hostile.lender"
ALICE, BOB = 61021, 61022  # uids that nobody has; a uid needs no name to be one
BLOCKS, PAGE = 8, 512 * 1024  # a block is larger than what is copied on the loop
SHM = Path("/dev/shm")


class Engine:
    """A lender.py. Its methods are commands."""

    def __init__(
        self,
        endpoint: str,
        uid: int,
        name: str,
        *,
        blocks: int = BLOCKS,
        page: int = PAGE,
        before: tuple[str, ...] = (),
    ) -> None:
        words = [sys.executable, "-m", LENDER, uid, endpoint, name, blocks, page]
        self.process = subprocess.Popen(list(map(str, words)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == '"here"\n'

    def __getattr__(self, command: str) -> Any:
        def asked(*arguments: Any) -> Any:
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            self.process.stdin.write(json.dumps([command, *arguments]) + "\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline())

        return asked

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class World:
    """A daemon, and the engines and files that a test makes."""

    def __init__(self, directory: Path, storage: dict[str, Any], **sections: Any) -> None:
        self.directory = directory
        self.endpoint = f"ipc://{directory}/s"
        tree = {
            "server": {"endpoint": self.endpoint, "socket_mode": "0666"},
            "host": {"staging": "8MiB"},
            "storage": {"model": "m"} | storage,
            "metrics": {"listen": ""},
        } | sections
        self.daemon = start(tree, directory)
        self.engines: list[Engine] = []
        self.names: list[str] = []

    def engine(self, uid: int, name: str, windows: tuple[int, int] | None = None, **more: Any) -> Engine:
        """windows: their size and stride."""
        made = Engine(self.endpoint, uid, name, **more)
        self.engines.append(made)
        assert windows is None or made.windows(*windows) == "ok"
        assert made.register() == "ok"
        return made

    def name(self) -> str:
        self.names.append(f"hostile.{secrets.token_hex(8)}")
        return self.names[-1]

    def file(self, uid: int, mode: int = 0o600, nbytes: int = BLOCKS * PAGE) -> str:
        name = self.name()
        fd = os.open(SHM / name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        os.posix_fallocate(fd, 0, nbytes)
        os.fchown(fd, uid, uid)
        os.fchmod(fd, mode)
        os.close(fd)
        return name

    @property
    def alive(self) -> bool:
        return self.daemon.process.poll() is None


@contextlib.contextmanager
def made_world(storage: dict[str, Any], **sections: Any) -> Iterator[World]:
    with tempfile.TemporaryDirectory(prefix="transferd-hostile-") as path:
        os.chmod(path, 0o755)
        world = World(Path(path), storage, **sections)
        try:
            yield world
        finally:
            for engine in world.engines:
                engine.end()
            world.daemon.stop()
            for name in world.names:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(SHM / name)


MEMORY = {"backend": "memory", "memory": {"capacity": "256MiB"}}


@pytest.fixture
def world() -> Iterator[World]:
    with made_world(MEMORY) as made:
        yield made


@pytest.fixture(params=["memory", "file", "file, direct"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """A world for each of the ways in which blocks go to storage and come back."""
    direct = request.param == "file, direct"
    file = {"backend": "file", "file": {"path": str(tmp_path / "store"), "capacity": "1GiB", "direct_io": direct}}
    with made_world(MEMORY if request.param == "memory" else file) as made:
        yield made


# --- one owner ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["theirs", "root's", "group's", "hard link", "symbolic link", "bind mount"])
def test_nobody_can_offer_memory_of_another_user_by_its_name(world: World, how: str) -> None:
    name = world.file(0 if how == "root's" else ALICE, 0o666 if how == "group's" else 0o600)
    offered, mounted = name, False
    if how in ("hard link", "symbolic link", "bind mount"):
        offered = world.name()
        if how == "bind mount":
            (SHM / offered).touch()
            mounted = subprocess.run(["mount", "--bind", SHM / name, SHM / offered], check=False).returncode == 0
        else:
            (os.link if how == "hard link" else os.symlink)(SHM / name, SHM / offered)
    try:
        answer = world.engine(BOB, "b").offer(offered, False, 0, True)
    finally:
        if mounted:
            subprocess.run(["umount", SHM / offered], check=True)
    assert answer.partition(":")[0] == ("not_attachable" if how == "symbolic link" else "not_yours"), answer


def test_memory_of_ones_own_is_taken_from_every_user_and_from_root(world: World) -> None:
    for number, uid in enumerate((ALICE, BOB, 0)):
        engine = world.engine(uid, f"e{number}")
        assert engine.offer(world.file(uid)) == "ok"
        assert engine.write(f"{number}-", [0, 1])[:2] == ["ok", 2]


# --- one identity ---------------------------------------------------------------------------------


@pytest.mark.parametrize("second", ["same name", "hard link", "descriptor", "overlapping part"])
def test_memory_of_one_engine_is_no_other_engines(world: World, second: str) -> None:
    one, two = world.engine(ALICE, "one"), world.engine(ALICE, "two")
    name = world.file(ALICE, nbytes=2 * BLOCKS * PAGE)
    assert one.offer(name, False, 0, True) == "ok"
    assert one.write("k", [0, 1, 2])[:2] == ["ok", 3]
    if second == "hard link":
        other = world.name()
        os.link(SHM / name, SHM / other)
        answer = two.offer(other, False, 0, True)
    elif second == "descriptor":
        answer = two.offer(two.open_name(name), False, 0, True)
    else:
        answer = two.offer(name, False, PAGE // 2 if second == "overlapping part" else 0, True)
    assert answer.startswith("already_attached"), answer
    assert "'one'" in answer, "it says whose memory it is"
    assert two.offer(name, False, BLOCKS * PAGE, True) == "ok", "the other half is free"
    assert one.read("k", [3, 4, 5])[:2] == ["ok", 3]


@pytest.mark.parametrize("kind", ["name", "descriptor"])
def test_new_memory_under_an_old_name_or_number_is_new_memory(world: World, kind: str) -> None:
    engine = world.engine(ALICE, "e")
    name = world.name() if kind == "name" else ""
    fd = engine.make(name)
    what = name or fd
    engine.paint(name, 1)
    assert engine.offer(what, True) == "ok"
    assert engine.write("old", [0, 1])[:2] == ["ok", 2]
    assert engine.renew(name) in (fd, fd + 1, fd + 2)
    engine.paint(name, 2)
    assert engine.offer(what, True) == "ok"
    assert engine.write("new", [0, 1])[:2] == ["ok", 2]
    engine.paint(name, 3)
    assert engine.read("new", [4, 5])[:2] == ["ok", 2]
    assert [engine.colours(name, block) for block in (4, 5, 6)] == [[2], [2], [3]], "the engine sees what was loaded"
    assert engine.read("old", [6])[:2] == ["ok", 1]
    assert engine.colours(name, 6) == [1]


# --- memory that vanishes -------------------------------------------------------------------------


@pytest.mark.parametrize("left", [0, 2 * PAGE + 4096])
def test_memory_that_is_truncated_costs_its_engine_its_tasks_and_nobody_else(stored: World, left: int) -> None:
    bad, good = stored.engine(ALICE, "bad"), stored.engine(BOB, "good")
    name = stored.name()
    bad.make(name)
    mine = good.make("")
    good.paint("", 7)
    assert (bad.offer(name), good.offer(mine)) == ("ok", "ok")
    everything = list(range(BLOCKS))
    assert bad.write("k", everything)[:2] == ["ok", BLOCKS]
    assert good.write("g", everything[:4])[:2] == ["ok", 4]
    bad.truncate(name, left)
    for task in (bad.read("k", everything), bad.write("x", everything)):
        assert task[2] == "device_lost", task
        assert "'bad'" in task[3]
        assert "rank 0" in task[3]
        assert stored.alive
    assert bad.offer(name, False, 0, True).startswith("memory_unusable"), "it is shorter now"
    assert good.read("g", everything[4:])[:2] == ["ok", 4]
    assert good.colours("", 5) == [7]
    bad.truncate(name, BLOCKS * PAGE)
    assert bad.offer(name) == "ok"
    assert bad.read("k", everything)[:2] == ["ok", BLOCKS], "what it stored before is whole"
    assert stored.alive


def test_memory_that_vanishes_while_copies_run_never_ends_the_daemon(stored: World) -> None:
    good = stored.engine(BOB, "good")
    mine = good.make("")
    good.paint("", 9)
    assert good.offer(mine) == "ok"
    bad = stored.engine(ALICE, "bad")
    name = stored.name()
    bad.make(name)
    everything = list(range(BLOCKS))
    assert bad.offer(name) == "ok"
    assert bad.write("k", everything)[:2] == ["ok", BLOCKS]
    fd = os.open(SHM / name, os.O_RDWR)
    for round_ in range(6):
        for kind, keys in (("read", "k"), ("write", f"w{round_}")):
            if bad.offer(name) != "ok":
                bad.truncate(name, BLOCKS * PAGE)
                assert bad.offer(name) == "ok"
            assert bad.process.stdin is not None
            assert bad.process.stdout is not None
            bad.process.stdin.write(json.dumps([kind, keys, everything]) + "\n")
            bad.process.stdin.flush()
            os.ftruncate(fd, round_ * PAGE + 4096)
            task = json.loads(bad.process.stdout.readline())
            assert task[0] == "ok" or task[2] == "device_lost", task
            os.ftruncate(fd, BLOCKS * PAGE)
            assert good.write(f"{kind}{round_}", everything[:2])[:2] == ["ok", 2]
    os.close(fd)
    assert good.read("read0", [3, 4])[:2] == ["ok", 2]
    assert good.colours("", 3) == [9]
    assert stored.alive


async def test_what_is_passed_for_an_offer_that_is_refused_is_closed_at_once(tmp_path: Path) -> None:
    """Each user may have passed so many that are not closed yet: refusals must not take its places."""
    with running({"storage": {"backend": "none"}}, tmp_path) as daemon:
        before = descriptors(daemon.pid)
        async with Client(daemon.endpoint, engine="e", await_ready=False) as client:
            await client.register(
                Registered(ranks=1, model="m", layout=Pages(layers=1, page_bytes=4096, blocks=8, identity="x"))
            )
            data = {"fd": os.open("/dev/zero", os.O_RDWR), "nbytes": 8 * 4096, "segments": [[0, 4096]]}
            for _ in range(4):
                with pytest.raises(TransferError, match="not shared memory"):
                    await client.offer(0, DeviceHandle("shm", data | {"owner": as_data(this_process())}))
            os.close(data["fd"])  # type: ignore[arg-type]
            # A thread closes what is no memory.
            await until(lambda: "/dev/zero" not in descriptors(daemon.pid) - before, within=60)


def test_sparse_memory_on_a_full_file_system_is_refused() -> None:
    """The daemon and the engine see a small /dev/shm, in a mount namespace of this test."""
    command = f"mount -t tmpfs -o size=6m none /dev/shm && exec {sys.executable} -m tests.machine.hostile.test_memory"
    root = Path(__file__).parents[3]
    done = subprocess.run(["unshare", "-m", "sh", "-c", command], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def sparse() -> None:
    with made_world(MEMORY) as world:
        good, bad = world.engine(ALICE, "good"), world.engine(ALICE, "bad")
        name, other = world.name(), world.name()
        good.make(name)
        assert good.offer(name) == "ok"
        bad.make(other, True)
        for raw in (False, True):
            answer = bad.offer(other, False, 0, raw)
            assert answer.startswith("memory_unusable"), answer
        assert good.write("k", [0, 1])[:2] == ["ok", 2]
        assert world.alive


# --- names ----------------------------------------------------------------------------------------

CACHES = """
import os, sys
from transferd.adapters.shared_caches import SharedCaches
made = SharedCaches({"layers": 1, "kv_heads": 1, "head_dim": 64, "block_size": 64, "device_blocks": 4})
print(os.getpid(), flush=True)
sys.stdin.read()
"""


def test_engines_that_are_process_1_of_their_containers_share_a_dev_shm() -> None:
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", CACHES]
    engines = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        assert [engine.stdout.readline() for engine in engines if engine.stdout] == ["1\n", "1\n"]
    finally:
        for engine in engines:
            engine.communicate("")


def test_what_a_killed_engine_leaves_is_removed_while_the_daemon_lives_and_nothing_else(world: World) -> None:
    name, living, foreign = (f"transferd.{kind}.{secrets.token_hex(16)}" for kind in ("engine", "living", "foreign"))
    world.names += [name, living, foreign]
    with open(SHM / living, "xb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        os.fchown(held.fileno(), ALICE, ALICE)
        engine = world.engine(ALICE, "e")
        engine.make(name)
        assert engine.offer(name) == "ok"
        os.rename(SHM / world.file(BOB), SHM / foreign)
        engine.end()
        wait_until(lambda: not (SHM / name).exists(), "the daemon removes what its engine left")
        assert (SHM / foreign).exists(), "another user's"
        assert (SHM / living).exists(), "somebody has it locked"
    assert world.alive


if __name__ == "__main__":
    sparse()


def test_memory_that_does_not_fit_into_the_daemons_control_group_is_refused_and_nobody_dies() -> None:
    """As under a unit with MemoryMax=: the pages that the daemon makes of a sparse offer count as the daemon's."""
    with memory_group(400 * 1024**2) as group, made_world(MEMORY | {"memory": {"capacity": "16MiB"}}) as world:
        group.take(world.daemon.process.pid)
        bob = world.engine(BOB, "bob")
        assert bob.offer(bob.make(""), False) == "ok"
        told = []
        for number in range(2):
            engine, name = world.engine(ALICE, f"large-{number}", blocks=640), world.name()
            engine.make(name, True)
            told.append(engine.offer(name, False, 0, True))  # raw: the library would fill the holes itself
        assert told[0] == "ok"
        assert told[1].startswith("memory_unusable"), told
        assert bob.write("bob", [0, 1])[0] == "ok", "and the neighbour goes on"
        assert world.alive
