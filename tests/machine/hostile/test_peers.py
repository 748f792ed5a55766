"""Peers that lie about who they are, never stop, never end and never read: a real daemon, plain sockets."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.utils import z85

from tests.machine.hostile.raw_zmtp import COMMAND, GREETING, LONG, Raw, RawCurve, command, connect, frame, metadata
from transferd.cli.pool.master import free_port
from transferd.client.launch import DaemonProcess, running, start
from transferd.client.sync_client import SyncClient
from transferd.tasks import Status, WriteStorageTask
from transferd.wire import protocol as wire

NAMED = Path(__file__).with_name("named_peer.py")
OWNER, THIEF = 61011, 61012  # uids that nobody has
MIB = 1024**2
SUBSCRIPTIONS, LENGTH = 20_000, 2048
HELLO = wire.encode_request(1, wire.Hello())
# What rand() gives after srand(1), in the pairs of which libzmq makes the first name of each ROUTER of a process.
RANDOM = (1804289383, 846930886, 1681692777, 1714636915, 1957747793, 424238335, 719885386, 1649760492)
NEXT_NAMES = [
    ((low | high << 31) + number & 0xFFFFFFFF).to_bytes(4, "big")
    for low, high in zip(RANDOM[::2], RANDOM[1::2], strict=True)
    for number in range(16)
]


class Doors:
    """A daemon with every kind of endpoint."""

    def __init__(
        self, daemon: DaemonProcess, places: dict[str, str], server: bytes, client: tuple[bytes, bytes]
    ) -> None:
        self.daemon = daemon
        self.places = places
        self._keys = (server, *client)

    def peer(self, door: str, identity: bytes = b"") -> Raw:
        if door == "curve":
            server, public, secret = (z85.decode(key) for key in self._keys)
            return RawCurve(self.places[door], server, public, secret, identity)
        return Raw(self.places[door], b"SUB" if door == "events" else b"DEALER", identity)

    @property
    def resident(self) -> int:
        status = Path(f"/proc/{self.daemon.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) * 1024

    def serves(self) -> None:
        """An ordinary client is served, and the daemon is the one that it was."""
        with SyncClient(self.places["main"], connect_timeout=20) as client:
            client.attach(0)
            name = f"honest-{time.monotonic_ns()}"
            done = client.submit(WriteStorageTask(task_id=name, keys=[name], gpu_block_ids=[0]))
            assert done.status is Status.OK, done
        assert self.daemon.process.poll() is None, self.daemon.log[-2000:]


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    directory = tmp_path_factory.mktemp("peers")
    server, secret = zmq.curve_keypair()
    client = zmq.curve_keypair()
    (directory / "secret").write_bytes(secret)
    (directory / "secret").chmod(0o600)
    (directory / "clients").mkdir()
    (directory / "clients" / "engine").write_bytes(client[0])
    places = {
        "main": f"ipc://{directory}/main.sock",
        "observer": f"ipc://{directory}/observer.sock",
        "curve": f"tcp://127.0.0.1:{free_port()}",
        "events": f"tcp://127.0.0.1:{free_port()}",
        "replay": f"tcp://127.0.0.1:{free_port()}",
    }
    tree: dict[str, Any] = {
        "server": {
            "endpoint": [places["main"], places["curve"]],
            "observer_endpoint": places["observer"],
            "curve": {"secret_key_file": f"{directory}/secret", "client_keys_dir": f"{directory}/clients"},
        },
        "events": {"endpoint": places["events"], "replay_endpoint": places["replay"], "topic": "kv@node"},
        "cache": {"ranks": 1, "layers": 1, "kv_heads": 1, "head_dim": 16, "block_size": 4, "device_blocks": 8},
        "storage": {"backend": "memory", "memory": {"capacity": "8MiB"}},
        "log": {"level": "error"},
    }
    daemon = start(tree, directory, wait=False)  # it has several endpoints
    try:
        ready = Doors(daemon, places, server, client)
        ready.serves()
        yield ready
    finally:
        daemon.stop()


DOORS = ("main", "observer", "curve", "events", "replay")
EVERY_DOOR = pytest.mark.parametrize("door", DOORS)


# --- A1: names --------------------------------------------------------------------------------------


@EVERY_DOOR
def test_no_name_ends_the_daemon(doors: Doors, door: str) -> None:
    """Names that libzmq would give to the next peers; then those peers come."""
    with contextlib.ExitStack() as stack:
        for number, name in enumerate(NEXT_NAMES):
            liar = stack.enter_context(doors.peer(door, b"\0" + name))
            if door != "events":
                liar.send(HELLO)
            if number % 16 == 8:
                stack.enter_context(doors.peer(door)).send(HELLO)
        for _ in range(16):
            stack.enter_context(doors.peer(door)).send(HELLO)
        doors.serves()


@pytest.mark.parametrize("identity", [b"", b"\0", b"\0" * 5, b"1", b"x" * 255, b"\0" + b"x" * 300, b"y" * 4000])
def test_whatever_a_peer_calls_itself_it_gets_its_own_answers(doors: Doors, identity: bytes) -> None:
    with doors.peer("main", identity) as one, doors.peer("main", identity) as other:
        for seq, peer in ((11, one), (12, other), (13, one)):
            peer.send(wire.encode_request(seq, wire.Hello()))
            assert wire.decode_reply(peer.frame()[1]).seq == seq


# --- A2: users --------------------------------------------------------------------------------------


def as_named(uid: int, endpoint: str, name: str, engine: str, *actions: str, token: str = "") -> dict[str, str]:
    command_line = [sys.executable, str(NAMED), str(uid), endpoint, name, engine, token, *actions]
    done = subprocess.run(command_line, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    told: dict[str, str] = json.loads(done.stdout)
    return told


ENGINE = """
import asyncio, concurrent.futures.thread, os, sys
from transferd import Client, Engine, Pages
os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
async def main():
    async with Client(sys.argv[2], engine="mine", await_ready=False) as client:
        pages = Pages(layers=1, page_bytes=64, blocks=4, identity="m")
        print(await client.register(Engine(ranks=1, model="m", layout=pages)), flush=True)
        await asyncio.to_thread(sys.stdin.read)
asyncio.run(main())
"""


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that every user can enter, which pytest's own are not."""
    with tempfile.TemporaryDirectory(prefix="transferd-peers-") as path:
        os.chmod(path, 0o755)
        yield Path(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users")
def test_the_name_of_a_client_that_has_left_makes_nobody_its_user(open_directory: Path) -> None:
    directory = open_directory
    endpoint = f"ipc://{directory}/s"
    tree = {"server": {"endpoint": endpoint, "socket_mode": "0666"}, "storage": {"backend": "memory"}}
    with running(tree, directory):
        engine = subprocess.Popen(
            [sys.executable, "-c", ENGINE, str(OWNER), endpoint], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert engine.stdin is not None
        assert engine.stdout is not None
        try:
            token = engine.stdout.readline().decode().strip()
            assert token
            for name in ("engine-a", "1"):
                served = {"hello": "ok", "exists": "ok"}
                assert as_named(OWNER, endpoint, name, "mine", "exists", token=token) == served
                assert as_named(OWNER, endpoint, name, "mine", "exists") == served | {"exists": "not_this_engine"}
                use = ("exists", "write", "read", "pause", "generation", "unregister")
                refused = {"hello": "ok"} | dict.fromkeys(use, "not_yours")
                assert as_named(THIEF, endpoint, name, "mine", *use) == refused
                assert as_named(THIEF, endpoint, name, "mine", *use, token=token) == refused
            assert as_named(OWNER, endpoint, "engine-a", "mine", "exists", token=token) == served
        finally:
            engine.stdin.close()
            engine.wait(30)
            engine.stdout.close()


# --- A4: memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["3.0", "3.1", "libzmq"])
def test_subscriptions_take_no_memory_however_many_and_however_often(doors: Doors, version: str) -> None:
    before = doors.resident
    topics = [number.to_bytes(4, "big") + bytes(LENGTH - 4) for number in range(SUBSCRIPTIONS)]
    if version == "libzmq":
        with zmq.Context() as context, context.socket(zmq.SUB) as many:
            many.setsockopt(zmq.LINGER, 0)
            many.setsockopt(zmq.SNDHWM, 0)
            many.connect(doors.places["events"])
            for topic in topics:
                many.setsockopt(zmq.SUBSCRIBE, topic)
            subscribed(doors, b"kv@")
            assert doors.resident - before < 64 * MIB
        return
    with doors.peer("events") as many:
        for topic in topics:
            many.socket.sendall(command(b"SUBSCRIBE", topic) if version == "3.1" else frame(b"\1" + topic))
        for _ in range(SUBSCRIPTIONS):  # renewed for ever
            many.socket.sendall(command(b"SUBSCRIBE", b"kv@") + command(b"CANCEL", b"kv@"))
        subscribed(doors, b"kv@")
        assert doors.resident - before < 64 * MIB
    with doors.peer("events") as large:
        large.push(command(b"SUBSCRIBE", bytes(100_000)))
        assert large.ends()


def subscribed(doors: Doors, topic: bytes) -> None:
    """A good subscriber gets what an honest client causes."""
    with zmq.Context() as context, context.socket(zmq.SUB) as good:
        good.setsockopt(zmq.LINGER, 0)
        good.setsockopt(zmq.SUBSCRIBE, topic)
        good.connect(doors.places["events"])
        give_up = time.monotonic() + 60
        while not good.poll(100):
            assert time.monotonic() < give_up
            doors.serves()
        assert good.recv_multipart()[0] == b"kv@node"


@pytest.mark.parametrize("door", ["main", "observer", "events", "replay"])
def test_messages_that_never_arrive_in_full_take_bounded_memory(doors: Doors, door: str) -> None:
    before = doors.resident
    announced = bytes((LONG,)) + (60 * MIB).to_bytes(8, "big")
    part = announced + bytes(3 * MIB)
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(doors.peer(door)) for _ in range(200)]
        for peer in peers:
            peer.socket.setblocking(False)
        for peer in peers:
            sent = 0
            with contextlib.suppress(BlockingIOError, ConnectionError):
                for _ in range(100):
                    sent += peer.socket.send(part[sent:])
                    time.sleep(0)
        doors.serves()
        assert doors.resident - before < 320 * MIB
    doors.serves()


def test_peers_that_never_read_take_bounded_memory(doors: Doors) -> None:
    """Each asks for as much as the daemon answers; an answer is some 10 KiB."""
    before = doors.resident
    asked = frame(wire.encode_request(2, wire.ListClients(limit=100))) * 3000
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(doors.peer("main")).send(HELLO)
        for _ in range(5):
            stack.enter_context(doors.peer("main")).push(asked)
        doors.serves()
        assert doors.resident - before < 320 * MIB


# --- what never ends --------------------------------------------------------------------------------


FLOODS = {
    "parts": frame(b"", 1),
    "ping": command(b"PING", b"\0\0" + b"c" * 16),
    "short ping": command(b"PING", b"\0\0"),
    "unknown command": command(b"NOTHING", b"x" * 200),
    "empty": frame(b""),
    "cancel": command(b"CANCEL", b"never"),
}


# One acceptor reads the frames of all doors: each kind of frame at one door, and each door with two kinds.
@pytest.mark.parametrize(
    ("door", "kind"),
    [*(("main", kind) for kind in FLOODS), *itertools.product(DOORS[1:], ("parts", "ping")), ("events", "cancel")],
)
def test_a_flood_of_small_frames_starves_nobody(doors: Doors, door: str, kind: str) -> None:
    before, flood = doors.resident, FLOODS[kind]
    with doors.peer(door) as peer:
        peer.push(flood * (4 * MIB // len(flood)) if door != "curve" else b"".join(_curve_flood(peer, flood)))
        doors.serves()
    assert doors.resident - before < 64 * MIB


def _curve_flood(peer: Raw, flood: bytes) -> list[bytes]:
    assert isinstance(peer, RawCurve)
    return [peer.sealed(flood[2:], 2 if flood[0] & COMMAND else flood[0]) for _ in range(3000)]


def test_a_ping_is_answered_with_its_context(doors: Doors) -> None:
    with doors.peer("main") as peer:
        peer.socket.sendall(command(b"PING", b"\0\x0acontext"))
        assert peer.frame() == (COMMAND, b"\x04PONGcontext")


def test_a_handshake_byte_by_byte_is_a_handshake(doors: Doors) -> None:
    with connect(doors.places["main"]) as raw:
        for byte in GREETING + command(b"READY", metadata(b"DEALER", b"")) + frame(HELLO):
            raw.send(bytes((byte,)))
        peer = Raw.__new__(Raw)
        peer.socket = raw
        peer.read(64)
        assert peer.frame()[1].startswith(b"\x05READY")
        assert wire.decode_reply(peer.frame()[1]).seq == 1


@pytest.mark.parametrize("seed", range(6))
def test_a_handshake_with_wrong_bytes_harms_nobody(doors: Doors, seed: int) -> None:
    chance = random.Random(seed)
    print("seed", seed)
    good = GREETING + command(b"READY", metadata(b"DEALER", b"me")) + frame(HELLO)
    for _ in range(150):
        spoilt = bytearray(good)
        for _ in range(chance.choice((1, 1, 2, 8))):
            at = chance.randrange(len(spoilt))
            match chance.randrange(4):
                case 0:
                    spoilt[at] = chance.randrange(256)
                case 1:
                    del spoilt[at : at + chance.randrange(1, 20)]
                case 2:
                    spoilt[at:at] = chance.randbytes(chance.randrange(1, 20))
                case _:
                    spoilt[at] ^= 1 << chance.randrange(8)
            spoilt = spoilt or bytearray(b"x")
        with connect(doors.places[chance.choice(list(doors.places))]) as raw, contextlib.suppress(ConnectionError):
            raw.sendall(spoilt)
            if chance.random() < 0.5:
                raw.settimeout(0.01)
                with contextlib.suppress(TimeoutError):
                    raw.recv(100)
    doors.serves()


def test_a_recorded_initiate_is_of_no_use_on_another_connection(doors: Doors) -> None:
    with doors.peer("curve") as good, doors.peer("curve") as other:
        assert isinstance(good, RawCurve)
        assert isinstance(other, RawCurve)
        repeated = good.sealed(HELLO)
        good.socket.sendall(repeated)
        assert good.frame()[1].startswith(b"\x07MESSAGE")
        other.socket.sendall(repeated)
        assert other.ends(), "a message of another connection"
        good.socket.sendall(repeated)
        assert good.ends(), "a message that was sent before"
    doors.serves()


def test_an_observer_moves_no_counter_of_tasks(doors: Doors) -> None:
    """Clients say how many tasks they have refused themselves, and alerts follow that. An observer pushes none."""
    said = wire.encode_request(1, wire.Hello(turned_away={"not_attached": 1000}, not_stored={"failed": 7}))
    with doors.peer("observer") as watcher, SyncClient(doors.places["main"], connect_timeout=20) as client:
        watcher.send(said)
        watcher.frame()  # its Welcome
        assert client.stats()["server"]["turned_away"] == client.stats()["server"]["not_stored"] == {}
        with doors.peer("main") as engine:
            engine.send(said)
            engine.frame()
        assert client.stats()["server"]["turned_away"] == {"not_attached": 1000}
        assert client.stats()["server"]["not_stored"] == {"failed": 7}
