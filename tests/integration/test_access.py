"""Who may connect and who may only look: real sockets, real other users, what the kernel says of them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import zmq
import zmq.asyncio

from tests.daemon.test_engines import running, serving
from tests.integration.own_memory import read, write
from tests.support.bodies import BODIES, least
from tests.support.memory_core import MemoryCore, serve
from transferd.client.client import Client
from transferd.config import ServerSection
from transferd.errors import ConfigError, TransferError
from transferd.runtime.bucket import Bucket
from transferd.runtime.clock import SYSTEM_CLOCK, Clock
from transferd.runtime.compat import Self, wait_for
from transferd.tasks import (
    Status,
    SwapOutTask,
)
from transferd.wire import credentials
from transferd.wire import protocol as wire
from transferd.wire.transport import ZmqServerTransport

AS_USER = "tests.integration.as_user"
ENGINE, OTHER, WATCHER = 61001, 61002, 61003  # uids that nobody has; a uid needs no name to be one
GROUP = 62001
TASK = SwapOutTask(task_id="t", gpu_block_ids=[1], cpu_block_ids=[2])


def on_one_loop(test: Callable[[Path], Coroutine[Any, Any, None]]) -> Callable[[Path], None]:
    """Run an async test once rather than on each event loop: its subject is the kernel, and processes take time."""

    def run(directory: Path) -> None:
        asyncio.run(test(directory))

    run.__name__ = test.__name__
    return run


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users")


class Daemon:
    """A server with a core in memory, on real sockets."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK, **section: Any) -> None:
        config = ServerSection(**section)
        self.core = MemoryCore()
        self.transport = ZmqServerTransport(config)
        self.server = serve(self.transport, self.core, clock=clock, observer_rate=config.observer_rate)

    async def __aenter__(self) -> Self:
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.close()


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory that every user can enter, which pytest's own are not."""
    with tempfile.TemporaryDirectory(prefix="transferd-access-") as path:
        os.chmod(path, 0o755)
        yield Path(path)


async def as_user(
    uid: int, endpoint: str, *actions: str, groups: str = "-", timeout: float = 10.0, engine: str = ""
) -> dict[str, str]:
    """What another user is told. timeout: for a user who is let in; one who is not is waited for that long."""
    command = ["-m", AS_USER, uid, uid, groups, endpoint, timeout, engine, *actions]
    process = await asyncio.create_subprocess_exec(sys.executable, *map(str, command), stdout=asyncio.subprocess.PIPE)
    out, _ = await wait_for(process.communicate(), 60)
    assert process.returncode == 0
    told: dict[str, str] = json.loads(out)
    return told


NOT_LET_IN = {"connect": "connect_timeout"}
SHORT = 0.7  # seconds that somebody who must not get in is given to get in


@needs_root
@on_one_loop
async def test_socket_mode_and_group_decide_who_can_open_the_socket(directory: Path) -> None:
    endpoint = f"ipc://{directory}/s"
    async with Daemon(endpoint=endpoint, socket_mode="0660", socket_group=str(GROUP)):
        told = os.stat(directory / "s")
        assert (stat.S_IMODE(told.st_mode), told.st_gid) == (0o660, GROUP)
        assert await as_user(ENGINE, endpoint, "ping", groups=str(GROUP)) == {"ping": "ok"}
        assert await as_user(ENGINE, endpoint, "ping", timeout=SHORT) == NOT_LET_IN


@needs_root
@on_one_loop
async def test_allowed_uids_let_in_nobody_else_not_even_root(directory: Path) -> None:
    endpoint = f"ipc://{directory}/s"
    async with Daemon(endpoint=endpoint, socket_mode="0666", allowed_uids=[ENGINE]) as daemon:
        assert await as_user(ENGINE, endpoint, "ping", "write") == {"ping": "ok", "write": "ok"}
        with structlog.testing.capture_logs() as logs:
            while not logs:  # its time may be over before its connection has been made
                assert await as_user(OTHER, endpoint, "ping", timeout=SHORT) == NOT_LET_IN
        assert re.fullmatch(rf"uid {OTHER}, pid [1-9]\d*", logs[0]["peer"])
        assert {(line["event"], line["reason"]) for line in logs} == {("connection refused", "unknown_user")}
        assert daemon.transport.refused()["unknown_user"] == len(logs)
        assert await as_user(0, endpoint, "ping", timeout=SHORT) == NOT_LET_IN
        assert daemon.server.statistics().rejects == {}, "not a message of theirs was read"


@needs_root
@on_one_loop
async def test_observer_uids_may_look_and_nothing_else_and_others_on_the_same_socket_may_do_all(
    directory: Path,
) -> None:
    endpoint = f"ipc://{directory}/s"
    async with Daemon(endpoint=endpoint, socket_mode="0666", observer_uids=[WATCHER]) as daemon:
        everything = ("ping", "stats", "write", "resume")
        told = await as_user(WATCHER, endpoint, *everything)
        assert told == {"ping": "ok", "stats": "ok", "write": "forbidden", "resume": "forbidden"}
        assert not daemon.core.ran
        assert set((await as_user(ENGINE, endpoint, *everything)).values()) == {"ok"}
        assert daemon.core.ran == {"w": 1}


@needs_root
@on_one_loop
async def test_allowed_and_observer_uids_together_let_in_both_and_nobody_else(directory: Path) -> None:
    door, window = f"ipc://{directory}/door", f"ipc://{directory}/window"
    section: dict[str, Any] = {
        "endpoint": door,
        "observer_endpoint": window,
        "socket_mode": "0666",
        "observer_mode": "0666",
    }
    async with Daemon(**section, allowed_uids=[ENGINE], observer_uids=[WATCHER]):
        assert await as_user(ENGINE, door, "write") == {"write": "ok"}
        assert await as_user(WATCHER, door, "stats", "write") == {"stats": "ok", "write": "forbidden"}
        assert await as_user(OTHER, door, "ping", timeout=SHORT) == NOT_LET_IN
        assert await as_user(ENGINE, window, "stats", "write") == {"stats": "ok", "write": "forbidden"}
        assert await as_user(WATCHER, window, "stats") == {"stats": "ok"}
        assert await as_user(OTHER, window, "ping", timeout=SHORT) == NOT_LET_IN


@needs_root
@on_one_loop
async def test_the_observers_socket_has_a_mode_and_a_group_of_its_own(directory: Path) -> None:
    door, window = f"ipc://{directory}/door", f"ipc://{directory}/window"
    section: dict[str, Any] = {
        "endpoint": door,
        "observer_endpoint": window,
        "observer_mode": "0620",
        "observer_group": str(GROUP),
    }
    async with Daemon(**section):
        modes = {name: stat.S_IMODE(os.stat(directory / name).st_mode) for name in ("door", "window")}
        assert modes == {"door": 0o660, "window": 0o620}
        assert os.stat(directory / "window").st_gid == GROUP
        assert os.stat(directory / "door").st_gid == os.getegid()


@needs_root
@on_one_loop
async def test_another_user_cannot_use_change_or_end_an_engine_and_may_have_one_of_its_own(directory: Path) -> None:
    endpoint = f"ipc://{directory}/s"
    server = {"endpoint": endpoint, "socket_mode": "0666"}
    async with running(endpoint, server=server) as daemon, serving(endpoint, "mine") as (mine, memory):
        memory.paint(0, 0x11)
        assert (await mine.submit(write("w", ["k"], [0]))).status is Status.OK
        before, blocks = daemon.engines.get("mine"), [array.tobytes() for array in memory.arrays()]
        use = ("write", "read", "exists", "attach", "offer", "pause", "resume", "clear", "generation", "unregister")
        assert await as_user(OTHER, endpoint, *use, engine="mine") == dict.fromkeys(use, "not_yours")
        assert await as_user(OTHER, endpoint, "register", engine="mine") == {"register": "engine_exists"}
        assert [array.tobytes() for array in memory.arrays()] == blocks
        assert daemon.engines.get("mine") is before
        memory.paint(0, 0)
        assert (await mine.submit(read("r", ["k"], [0]))).block_ids == [0]
        assert memory.holds(0, 0x11)
        assert await as_user(OTHER, endpoint, "register", "unregister", engine="theirs") == {
            "register": "ok",
            "unregister": "ok",
        }


# --- observers ------------------------------------------------------------------------------------


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Daemon]:
    section: dict[str, Any] = {"endpoint": f"ipc://{tmp_path}/door", "observer_endpoint": f"ipc://{tmp_path}/window"}
    async with Daemon(**section) as running:
        yield running


def door(daemon: Daemon) -> str:
    return daemon.transport.endpoints[0]


def window(daemon: Daemon) -> str:
    return daemon.transport.observer_endpoint


REQUESTS: dict[type, wire.Body] = {kind: least(kind) for kind in BODIES}


class Peer:
    """A bare client: one DEALER, one answer at a time."""

    def __init__(self, endpoint: str, name: bytes = b"") -> None:
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if name:
            self.socket.setsockopt(zmq.ROUTING_ID, name)
        self.socket.connect(endpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self.context.term()

    async def ask(self, body: wire.Body, seq: int = 1) -> wire.ReplyBody:
        await self.socket.send(wire.encode_request(seq, body))
        reply = wire.decode_reply(await wait_for(self.socket.recv(), 60))
        assert reply.seq == seq
        return reply.body


async def test_an_observer_is_refused_everything_but_looking(daemon: Daemon) -> None:
    asked = 0
    with Peer(window(daemon)) as peer, structlog.testing.capture_logs() as logs:
        for seq, (kind, body) in enumerate(REQUESTS.items(), start=1):
            if issubclass(kind, wire.OfObserver):
                continue
            asked += 1
            answer = await peer.ask(body, seq)
            if isinstance(answer, wire.Result):
                assert answer.result.status is Status.REJECTED
                error = answer.result.error
            else:
                assert isinstance(answer, wire.Refused)
                error = answer.error
            assert error is not None
            assert error.code == "forbidden"
        assert isinstance(await peer.ask(wire.Hello()), wire.Welcome)
        assert isinstance(await peer.ask(wire.Stats()), wire.Value)
    who = f"uid {os.geteuid()}, pid {os.getpid()}"
    assert [(line["event"], line["reason"], line["peer"]) for line in logs] == [
        ("request refused", "forbidden", who)
    ] * asked
    assert daemon.server.statistics().rejects["forbidden"] == asked
    core = daemon.core
    assert (core.ran, core.cancelled, core.generation, core.cache.asked) == ({}, [], "", [])


async def test_an_observer_that_leaves_or_falls_silent_takes_nothing_back(daemon: Daemon) -> None:
    daemon.core.hold = True
    async with Client(door(daemon)) as engine:
        future = await engine.push(TASK)
        with Peer(window(daemon)) as peer:
            await peer.ask(wire.Hello())
            await peer.socket.send(wire.encode_request(2, wire.Bye()))
            await peer.ask(wire.Hello(), 3)
        daemon.core.finish("t")
        assert (await future).status is Status.OK


async def test_observers_together_are_bounded_in_what_they_ask_and_engines_are_not(tmp_path: Path) -> None:
    section: dict[str, Any] = {"endpoint": f"ipc://{tmp_path}/door", "observer_endpoint": f"ipc://{tmp_path}/window"}
    stopped = Clock(monotonic=lambda: 1000.0)  # however long the loop below takes, no second passes
    async with Daemon(stopped, **section, observer_rate=5) as daemon, Client(door(daemon)) as engine:
        with Peer(window(daemon)) as one, Peer(window(daemon)) as two:
            answers = [await peer.ask(wire.Stats()) for _ in range(20) for peer in (one, two)]
        refused = [a.error.code for a in answers if isinstance(a, wire.Refused)]
        assert set(refused) == {"too_often"}
        assert len(refused) == 40 - 2 * 5, "two seconds' worth may be saved up"
        assert daemon.server.statistics().rejects["too_often"] == len(refused)
        for _ in range(40):
            await engine.stats()


async def test_a_name_that_a_client_gives_itself_makes_it_nobody_else(daemon: Daemon) -> None:
    """Names that look like the transport's own, on either socket, and one that another client has given itself."""
    with (
        Peer(window(daemon)) as observer,
        Peer(door(daemon), b"1") as posing,
        Peer(window(daemon), b"c1") as self_named,
    ):
        await observer.ask(wire.Hello())
        assert isinstance(await posing.ask(wire.Resume()), wire.Value), "it came in by the door for all"
        answer = await self_named.ask(wire.Resume())
        assert isinstance(answer, wire.Refused)
        assert answer.error.code == "forbidden"
        with Peer(door(daemon), b"1") as taken:
            await taken.socket.send(wire.encode_request(9, wire.Hello()))
            assert isinstance(await posing.ask(wire.Hello(), 8), wire.Welcome)
            own = wire.decode_reply(await wait_for(taken.socket.recv(), 60))
            assert own.seq == 9, "each gets its own answer"


def test_a_bucket_gives_what_its_rate_and_burst_allow() -> None:
    bucket = Bucket(rate=8, burst=3)
    assert [bucket.take(100.0) for _ in range(5)] == [True] * 3 + [False] * 2
    assert [bucket.take(100.125) for _ in range(2)] == [True, False]
    assert [bucket.take(1000.0) for _ in range(4)] == [True] * 3 + [False]


# --- what cannot be kept is refused ---------------------------------------------------------------


async def test_a_user_or_group_that_does_not_exist_is_named(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/s"
    for section, problem in (
        ({"allowed_uids": ["no-such-user"]}, r"server\.allowed_uids: no such user \('no-such-user'\)"),
        ({"observer_uids": [-1]}, r"server\.observer_uids: a uid cannot be negative \(-1\)"),
        ({"socket_group": "no-such-group"}, r"server\.socket_group: no such group"),
        ({"allowed_uids": list(range(65))}, r"server\.allowed_uids: has 65 users, the limit is 64"),
    ):
        with pytest.raises(ConfigError, match=f"^{problem}"):
            await Daemon(endpoint=endpoint, **section).server.start()
    async with Daemon(endpoint=endpoint, allowed_uids=["root"]):
        pass


def test_a_uid_that_looks_like_nobody_in_this_namespace_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under systemd's PrivateUsers=: root and the unit's own user are known, and nobody else."""
    uid_map = tmp_path / "uid_map"
    uid_map.write_text("         0          0          1\n       998        998          1\n")
    monkeypatch.setattr(credentials, "UID_MAP", uid_map)
    assert credentials.resolve_uids("server.allowed_uids", [0, 998]) == {0, 998}
    with pytest.raises(
        ConfigError, match=r"^server\.allowed_uids: these uids are not mapped in this user namespace.* \(\[1000\]\)"
    ):
        credentials.resolve_uids("server.allowed_uids", [0, 1000])


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        (
            {"endpoint": "tcp://127.0.0.1:*", "allowed_uids": [0]},
            "server.endpoint: peer uids are not available on tcp://",
        ),
        (
            {"observer_endpoint": "tcp://127.0.0.1:*", "observer_uids": [0]},
            "server.observer_endpoint: peer uids are not available on tcp://",
        ),
        ({"observer_endpoint": "tcp://0.0.0.0:1"}, "server.observer_endpoint: tcp:// beyond loopback"),
        ({"observer_endpoint": "nowhere"}, "server.observer_endpoint: expected ipc://PATH"),
        ({"observer_mode": "rw"}, "server.observer_mode: expected octal permissions"),
        ({"endpoint": "tcp://127.example.org:1"}, "server.endpoint: tcp:// beyond loopback"),
        ({"endpoint": "tcp://*:1"}, "server.endpoint: tcp:// beyond loopback"),
        ({"endpoint": "tcp://[::]:1"}, "server.endpoint: tcp:// beyond loopback"),
        ({"endpoint": "tcp://eth0:1"}, "server.endpoint: tcp:// beyond loopback"),
    ],
)
def test_access_settings_that_cannot_be_enforced_are_refused(section: dict[str, Any], problem: str) -> None:
    from transferd.config import from_tree

    with pytest.raises(ConfigError) as refused:
        from_tree({"server": section})
    assert str(refused.value).startswith(problem)


async def test_a_group_that_the_daemon_may_not_give_is_refused_and_the_socket_stays_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_permitted(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chown", not_permitted)
    with pytest.raises(
        ConfigError, match=r"^server\.endpoint: cannot set group 62001 and mode 0660 on the socket: Operation not"
    ):
        await Daemon(endpoint=f"ipc://{tmp_path}/s", socket_group=str(GROUP)).server.start()
    assert not (tmp_path / "s").exists()


async def test_an_observer_gets_a_refusal_and_stays_connected(daemon: Daemon) -> None:
    async with Client(window(daemon)) as client:
        assert (await client.submit(TASK)).status is Status.REJECTED
        with pytest.raises(TransferError, match="observers may only use") as refused:
            await client.pause()
        assert refused.value.reason == "forbidden"
        assert (await client.stats())["boot_id"] == daemon.core.boot_id
