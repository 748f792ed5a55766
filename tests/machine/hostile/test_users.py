"""Who may do what: each cell of the table in docs/security.md, tried by a real user at a real daemon's socket.

TABLE is that table. The users are made with useradd, and a process becomes one before it connects (asker.py). Daemons
run as a user of their own, except the one that runs as root.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.machine.hostile.accounts import Account, accounts
from tests.machine.hostile.asker import PAGE
from tests.support.waits import wait_until
from transferd.cli.pool.master import free_port
from transferd.client import launch
from transferd.tiers.offered import DIRECTORY

ROOT = Path(__file__).parents[3]
COLUMNS = {  # heading in the document: what asker.py calls it
    "connect": "connect",
    "look": "look",
    "push": "push",
    "register": "register",
    "control another's engine": "control_others",
    "use another's engine": "use",
    "offer own memory": "offer_own",
    "offer another's": "offer_others",
    "offer root's": "offer_roots",
    "attach": "attach",
    "control": "control",
    "pages": "page",
}
_NO_ACCESS = ["no"] * 11 + ["yes"]
_OBSERVER = ["yes", "yes", *["forbidden"] * 9, "yes"]
_ENGINE = ["yes", "yes", "yes", "yes", "not_yours", "not_yours", "yes", "not_yours", "not_yours"]
_BY_TCP = ["yes", "yes", "yes", "yes", *["not_yours"] * 5, "yes", "yes", "yes"]
TABLE = {
    "the engine's user, without its token": [*_ENGINE[:4], "yes", "not_this_engine", *_ENGINE[6:], "yes", "yes", "yes"],
    "a user in the socket's group": [*_ENGINE, "yes", "yes", "yes"],
    "another user": _NO_ACCESS,
    "another user, mode 0666": [*_ENGINE, "tier_error", "yes", "yes"],
    "a user in `allowed_uids`": [*_ENGINE, "tier_error", "yes", "yes"],
    "another user beside `allowed_uids`": _NO_ACCESS,
    "root": [*_ENGINE[:4], "yes", "not_yours", "yes", "not_yours", "yes", "yes", "yes", "yes"],
    "an observer by uid": _OBSERVER,
    "an observer by endpoint": _OBSERVER,
    "`tcp://`, loopback": _BY_TCP,
    "`tcp://` with a known key": _BY_TCP,
    "`tcp://` with another key": _NO_ACCESS,
    "a user, at a daemon of root": [*_ENGINE, "tier_error", "yes", "yes"],
}
# What colleagues' changes make true. strict: whoever merges one removes its marks.
# Where each row asks: the daemon, which of its endpoints, the user, and the key.
WHO = {
    "the engine's user, without its token": ("group", "door", "engine"),
    "a user in the socket's group": ("group", "door", "member"),
    "another user": ("group", "door", "other"),
    "another user, mode 0666": ("open", "door", "other"),
    "a user in `allowed_uids`": ("listed", "door", "listed"),
    "another user beside `allowed_uids`": ("listed", "door", "other"),
    "root": ("group", "door", "root"),
    "an observer by uid": ("open", "door", "watcher"),
    "an observer by endpoint": ("tcp", "window", "other"),
    "`tcp://`, loopback": ("tcp", "tcp", "member"),
    "`tcp://` with a known key": ("keys", "tcp", "member", "known"),
    "`tcp://` with another key": ("keys", "tcp", "member", "stranger"),
    "a user, at a daemon of root": ("root's", "door", "other"),
}
CACHE = {"ranks": 1, "layers": 1, "kv_heads": 1, "head_dim": 8, "block_size": 4, "device_blocks": 4, "host_blocks": 2}

if os.geteuid() != 0:
    pytest.skip("only root can make users and become them", allow_module_level=True)


ROOTS = Account("root", 0, 0)


class World:
    """Users, daemons, and what each row was told; made once for this file."""

    def __init__(self, directory: Path, users: dict[str, Account], stack: contextlib.ExitStack) -> None:
        self._directory = directory
        self._users = users
        self._stack = stack
        self._daemons: dict[str, _Place] = {}
        self._told: dict[str, dict[str, str]] = {}
        self._keys = {name: zmq.curve_keypair() for name in ("server", "known", "stranger")}

    def told(self, row: str) -> dict[str, str]:
        """What came of every column; asked at the first call."""
        if row not in self._told:
            self._told[row] = self._ask(row)
        return self._told[row]

    def _ask(self, row: str) -> dict[str, str]:
        number = list(TABLE).index(row)
        where, kind, who, *key = WHO[row]
        place, user = self._place(where), self._user(who)
        spec: dict[str, Any] = {"row": str(number), "uid": user.uid, "gid": user.gid, "groups": [*user.groups]}
        spec |= {"endpoint": place.endpoints[kind], "page": place.page, "victim": f"victim-{number}"}
        if TABLE[row][0] == "no":
            spec["connects_within"] = 0.7
        if key:
            spec["curve"] = [one.decode() for one in (self._keys["server"][0], *self._keys[key[0]])]
        # A daemon that is not root could not open 0600: with 0666, only the owner can be why it is refused.
        mode = 0o600 if where == "root's" else 0o666
        held = self._held(place.endpoints["door"], spec["victim"])
        with held, memory_of(self._user("owner"), mode) as others, memory_of(ROOTS, mode) as roots:
            command = [
                sys.executable,
                "-m",
                "tests.machine.hostile.asker",
                json.dumps(spec | {"others": others, "roots": roots}),
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=ROOT)
        assert done.returncode == 0, done.stderr[-4000:]
        told: dict[str, str] = json.loads(done.stdout)
        return told

    def _user(self, who: str) -> Account:
        return ROOTS if who == "root" else self._users[who]

    @contextlib.contextmanager
    def _held(self, endpoint: str, engine: str) -> Iterator[None]:
        """An engine of the user `engine`, whose process lives meanwhile."""
        user = self._users["engine"]
        command = [
            sys.executable,
            "-m",
            "tests.machine.hostile.holder",
            str(user.uid),
            endpoint,
            engine,
            str(user.groups[0]),
        ]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"registered\n"
            try:
                yield
            finally:
                holder.communicate(b"")

    def _place(self, where: str) -> _Place:
        if where not in self._daemons:
            self._daemons[where] = self._started(where)
        return self._daemons[where]

    def _started(self, where: str) -> _Place:
        place = _Place(self._directory / where.strip("'s"), [free_port(), free_port()])
        place.directory.mkdir()
        server: dict[str, Any] = {"endpoint": list(place.endpoints.values())[:1], "socket_mode": "0666"}
        user, users = self._users["daemon"], self._users
        match where:
            case "group":
                server["socket_mode"] = "0660"
            case "tcp":
                server["endpoint"] += [place.endpoints["tcp"]]
                server |= {"observer_endpoint": place.endpoints["window"], "observer_mode": "0666"}
            case "open":
                server["observer_uids"] = [users["watcher"].uid]
            case "listed":
                server["allowed_uids"] = [users["engine"].uid, users["listed"].uid]
            case "keys":
                server["endpoint"] += [place.endpoints["tcp"]]
                server["curve"] = self._curve(place.directory)
            case "root's":
                user = ROOTS
        tree = {"server": server, "cache": CACHE, "host": {"staging": "64KiB"}, "storage": {"backend": "memory"}}
        tree["metrics"] = {"listen": place.page}
        for path in (place.directory, *place.directory.rglob("*")):
            os.chown(path, user.uid, user.gid)
        become = [sys.executable, "-m", "tests.machine.hostile.daemon_as", str(user.uid), str(user.gid)]
        prefix = ["env", f"PYTHONPATH={ROOT}", *become]
        daemon = launch.start(tree, place.directory, wait=False, prefix=prefix)
        self._stack.callback(daemon.stop)
        try:
            wait_until(Path(place.endpoints["door"].removeprefix("ipc://")).exists, within=60)
            wait_until(lambda: listens(place.page), within=60)
        except AssertionError:
            pytest.fail(daemon.log[-4000:])
        return place

    def _curve(self, directory: Path) -> dict[str, str]:
        (directory / "secret").write_bytes(self._keys["server"][1])
        (directory / "secret").chmod(0o600)
        (directory / "clients").mkdir(mode=0o755)
        (directory / "clients" / "known").write_bytes(self._keys["known"][0])
        return {"secret_key_file": str(directory / "secret"), "client_keys_dir": str(directory / "clients")}


class _Place:
    """Where a daemon is reached. directory: for its files."""

    def __init__(self, directory: Path, ports: list[int]) -> None:
        self.directory = directory
        self.endpoints = {
            "door": f"ipc://{directory}/door",
            "window": f"ipc://{directory}/window",
            "tcp": f"tcp://127.0.0.1:{ports[0]}",
        }
        self.page = f"127.0.0.1:{ports[1]}"


def listens(address: str) -> bool:
    host, _, port = address.partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


@contextlib.contextmanager
def memory_of(owner: Account, mode: int) -> Iterator[str]:
    """Shared memory of a user, who may be asleep at home: only its name is used."""
    path = DIRECTORY / f"td-{os.getpid()}-of-{owner.uid}"
    path.write_bytes(bytes(PAGE))
    path.chmod(mode)
    os.chown(path, owner.uid, owner.gid)
    try:
        yield path.name
    finally:
        path.unlink()


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    names = ("daemon", "engine", "member", "other", "listed", "watcher", "owner")
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="td-users-")))
        directory.chmod(0o755)
        users = stack.enter_context(accounts(*names, shared=("engine", "member")))
        yield World(directory, users, stack)


def cells() -> Iterator[Any]:
    for row, answers in TABLE.items():
        for column, answer in zip(COLUMNS.values(), answers, strict=True):
            yield pytest.param(row, column, answer, id=f"{row}-{column}")


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("row", "column", "answer"), list(cells()))
def test_a_user_may_do_what_the_table_says(world: World, row: str, column: str, answer: str) -> None:
    assert world.told(row)[column] == answer


def test_the_document_has_this_table() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    table = re.search(r"^\| who \\ what \|.*?\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert table is not None
    head, _, *rows = [[cell.strip() for cell in line.strip("| \n").split("|")] for line in table[0].splitlines()]
    assert head[1:] == list(COLUMNS)
    assert {name: cells for name, *cells in rows} == {
        row: [answer if answer in ("yes", "no") else f"`{answer}`" for answer in answers]
        for row, answers in TABLE.items()
    }
