"""What hostile peers do on the daemon's sockets: forge names, flood, say half of something, never read."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import struct
from collections.abc import Callable, Iterator

import zmq

from tests.machine.fuzz.frames import Frames
from tests.machine.hostile.place import Place, Report
from tests.machine.hostile.raw_peer import COMMAND, GREETING, LONG, MORE, RawPeer, frame
from transferd import Client, TransferError
from transferd.daemon.server import MAX_WAITING_PER_CLIENT, MAX_WAITING_REQUESTS
from transferd.observability.report_memory import EVERY_S
from transferd.tasks import WriteStorageTask
from transferd.wire import protocol as wire

FIRST_NAME = 0x6B8B4567  # libzmq's first name for a nameless peer, where nobody seeds rand()
NAMES = 12
SUBSCRIPTIONS, TOPIC_BYTES = 6000, 2048
CROWD = 200
PATIENCE_S = 3.0
WAITS_S = 1.5  # long enough for each honest engine to ask something
LOOKS = 3  # at reports, EVERY_S apart


@contextlib.contextmanager
def crowd(place: Place) -> Iterator[Callable[[str], RawPeer | None]]:
    """Opens raw connections, and closes all of them at the end. None: the daemon does not take it."""
    with contextlib.ExitStack() as stack:

        def peer(endpoint: str) -> RawPeer | None:
            with contextlib.suppress(OSError):
                return stack.enter_context(RawPeer(endpoint, place.keys_of(endpoint)))
            return None

        yield peer


def _name(number: int) -> bytes:
    return b"\0" + struct.pack(">I", number % 2**32)


async def _names(place: Place, uids: list[int]) -> set[bytes]:
    """The names of connected peers of these users, as far as the daemon shows them; of anybody for []."""
    async with Client(place.door, await_ready=False) as client:
        rows = await client.clients()
    found = set()
    for row in rows:
        if not uids or row["uid"] in uids:
            with contextlib.suppress(ValueError, TypeError):
                found.add(bytes.fromhex(row["client"]))
    return found


async def take_names_that_will_be_given(place: Place, chance: random.Random, report: Report) -> None:
    """Take the names that libzmq would give to the next nameless peers; then ordinary clients come."""
    known = [int.from_bytes(name[1:]) for name in await _names(place, []) if len(name) == 5 and name[:1] == b"\0"]
    bases = [FIRST_NAME, *(known and [max(known) + 1])]
    with crowd(place) as peer:
        for endpoint in chance.sample([place.knock, place.window, place.replay], 3):
            said = bytes(8) if endpoint == place.replay else wire.encode_request(1, wire.Hello())
            names = [_name(base + step) for base in bases for step in range(NAMES)]
            taken = sum(_greets(peer(endpoint), name, said) for name in names)
            report.told.append(f"{taken} names on {endpoint.rpartition('/')[2]}")
            await asyncio.sleep(0.2)
            for _ in names:  # those who would be given these names
                _greets(peer(endpoint), b"", said)
    async with Client(place.door, await_ready=False) as client:
        await client.ping()


def _greets(peer: RawPeer | None, name: bytes, said: bytes) -> bool:
    """Whether the daemon takes a peer of this name, which then says something."""
    if peer is None:
        return False
    peer.socket.settimeout(1.0)
    try:
        peer.greet(name)
        peer.send(said)
    except OSError:
        return False
    return True


async def take_the_name_of_one_who_left(place: Place, chance: random.Random, report: Report) -> None:
    """Wait until a peer of an honest user has gone, connect under its name, and speak for that user's engine."""
    seen: set[bytes] = set()
    end = asyncio.get_running_loop().time() + PATIENCE_S
    while asyncio.get_running_loop().time() < end:
        now = await _names(place, place.honest_uids)
        gone = seen - now
        seen |= now
        if gone:
            break
        await asyncio.sleep(0.02)
    else:
        report.told.append(f"nobody left, {len(seen)} names seen")
        return
    for name in gone:
        with RawPeer(place.knock, place.keys_of(place.knock)) as peer:
            peer.greet(name)
            for engine in place.honest:
                peer.ask(wire.Hello(engine=engine), seq=1)
                spoke = peer.ask(wire.Exists(["k"]), seq=2)
                report.told.append(f"{engine}: {type(spoke).__name__}")
                if isinstance(spoke, wire.Value):
                    report.wrong.append(f"a peer named {name.hex()} spoke for {engine}, an engine of another user")
                    peer.ask(wire.Unregister(), seq=3)


async def speak_for_others(place: Place, chance: random.Random, report: Report) -> None:
    """Say to be an honest engine, by its name alone, and ask everything that an engine may ask."""
    async with Client(place.door, await_ready=False) as client:  # one may just have been killed
        there = [name for name in place.honest if name in (await client.stats())["engines"]]
    if not there:
        report.told.append("no honest engine is there")
        return
    engine = chance.choice(there)
    task = WriteStorageTask(task_id="t", keys=["k"], gpu_block_ids=[0])
    bodies: list[wire.Body] = [
        *(wire.Exists(["k"]), wire.Match(["k"]), wire.Cancel("w1"), wire.Pause(), wire.Drain(), wire.Unregister()),
        *(wire.SetGeneration("stolen"), wire.Attach(0), wire.ClearCache(), wire.Register("a token", 1, "m", {}), task),
    ]
    chance.shuffle(bodies)
    with RawPeer(place.knock, place.keys_of(place.knock)) as peer:
        peer.greet(chance.choice([b"", b"c", os.urandom(5), engine.encode()]))
        peer.ask(wire.Hello(engine=engine))
        for seq, body in enumerate(bodies, start=2):
            answer = peer.ask(body, seq)
            told = answer.result.error if isinstance(answer, wire.Result) else getattr(answer, "error", None)
            report.told.append(f"{type(body).__name__}: {told.code if told else type(answer).__name__}")
            if isinstance(answer, wire.Value) or (isinstance(answer, wire.Result) and told is None):
                report.wrong.append(f"{type(body).__name__} was done for {engine}, an engine of another user")


async def flood_with_subscriptions(place: Place, chance: random.Random, report: Report) -> None:
    """One subscriber, thousands of long topics; the other socket gets requests that nobody reads the answers of."""
    with crowd(place) as peer:
        subscriber = peer(place.pub)
        if subscriber is not None:
            with contextlib.suppress(OSError):
                subscriber.greet(kind=b"SUB")
                for number in range(SUBSCRIPTIONS):
                    subscriber.send(b"\x01" + number.to_bytes(8) + chance.randbytes(16) * (TOPIC_BYTES // 16))
                report.told.append("all subscriptions were taken")
        for _ in range(8):
            reader = peer(place.replay)
            with contextlib.suppress(OSError):
                if reader is not None:
                    reader.greet()
                    for _ in range(200):
                        reader.send(b"", MORE)
                        reader.send(bytes(8))
        await asyncio.sleep(0.5)


async def never_read(place: Place, chance: random.Random, report: Report) -> None:
    """Ask for the longest answers, and read none."""
    with crowd(place) as peer:
        for endpoint in (place.knock, place.window):
            one = peer(endpoint)
            asked = 0
            with contextlib.suppress(OSError):
                if one is not None:
                    one.greet()
                    one.socket.settimeout(0.5)
                    for seq in range(3000):
                        one.send(wire.encode_request(seq, wire.Stats()))
                        asked += 1
            report.told.append(f"{asked} questions")


async def say_half(place: Place, chance: random.Random, report: Report) -> None:
    """Many connections that stop in the middle: of the greeting, of READY, of a frame that promises 2^40 bytes."""
    good = GREETING + frame(b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER", COMMAND)
    lies = [
        good + bytes([LONG]) + struct.pack(">Q", 2 ** chance.randrange(20, 63)) + bytes(1000),
        GREETING + bytes([COMMAND | LONG]) + struct.pack(">Q", 2**40) + bytes(100),
        good + frame(b"\x04PING" + bytes(chance.randrange(70)), COMMAND) * 500,
        good + frame(b"\x05ERROR\xff" + bytes(10), COMMAND),
        good + frame(chance.randbytes(200), COMMAND) * 20,
        good + frame(b"", MORE) * 2000,
        good + frame(bytes(60_000), MORE) * 50,
    ]
    with crowd(place) as peer:
        for number in range(CROWD):
            text = chance.choice(lies) if number % 2 else good[: chance.randrange(len(good))]
            if (one := peer(chance.choice([place.knock, place.window, place.pub, place.replay]))) is not None:
                one.socket.settimeout(0.05)
                with contextlib.suppress(OSError):
                    one.socket.sendall(text)
        await asyncio.sleep(0.3)


async def send_garbage(place: Place, chance: random.Random, report: Report) -> None:
    """Messages as tests/machine/fuzz makes them, through every socket that takes any."""
    frames = Frames(chance.getrandbits(32))
    with crowd(place) as peer:
        for endpoint in (place.knock, place.window, place.replay, place.pub):
            one = peer(endpoint)
            with contextlib.suppress(OSError):
                if one is not None:
                    one.greet(kind=b"SUB" if endpoint == place.pub else b"DEALER")
                    one.socket.settimeout(0.5)
                    for _ in range(300):
                        one.send(frames.draw(), chance.choice([0, 0, 0, MORE]))
                    one.socket.sendall(chance.randbytes(100))


async def wait_for_ever(place: Place, chance: random.Random, report: Report) -> None:
    """Take every place for requests that wait: ask for the end of a session that does not end (waiter.py)."""
    with contextlib.ExitStack() as stack:

        def joined() -> tuple[RawPeer, int]:
            peer = stack.enter_context(RawPeer(place.knock, place.keys_of(place.knock)))
            peer.greet()
            welcome = peer.ask(wire.Hello())
            assert isinstance(welcome, wire.Welcome), welcome
            return peer, welcome.session

        _, session = joined()
        for _ in range(MAX_WAITING_REQUESTS // MAX_WAITING_PER_CLIENT + 2):
            peer, _ = joined()
            for number in range(MAX_WAITING_PER_CLIENT):
                peer.send(wire.encode_request(number + 2, wire.Settled("t", session)))
            peer.ask(wire.Hello(), 1000)  # it has read them all
        for number in range(1001, 1001 + LOOKS):  # a report is up to a second old
            looked = peer.ask(wire.Stats(), number)
            if isinstance(looked, wire.Refused) and looked.error.code == "too_many_requests":
                waiting = MAX_WAITING_REQUESTS  # the report had to be made anew, and there was no place to wait for it
                break
            assert isinstance(looked, wire.Value), looked
            waiting = looked.value["server"]["waiting"]
            if waiting >= MAX_WAITING_REQUESTS - MAX_WAITING_PER_CLIENT:  # others come and go
                break
            await asyncio.sleep(EVERY_S)
        else:
            report.wrong.append(f"the action waits with {waiting} requests only")
        report.told.append(f"{waiting} requests wait")
        await asyncio.sleep(WAITS_S)


async def forge_hosts(place: Place, chance: random.Random, report: Report) -> None:
    """Ask the pages under a name that is not theirs, as a browser does after DNS rebinding."""
    host, _, port = place.page.partition(":")
    for name in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "[::1].evil"):
        for path in ("/", "/status", "/metrics"):
            with socket.create_connection((host, int(port)), timeout=5) as page, contextlib.suppress(OSError):
                page.sendall(f"GET {path} HTTP/1.1\r\nHost: {name}\r\n\r\n".encode())
                answer = page.recv(64)
                if answer.split(b" ")[1:2] == [b"200"]:
                    report.wrong.append(f"{path} was shown to a browser that asked {name}")


async def come_in_crowds(place: Place, chance: random.Random, report: Report) -> None:
    """Connections that come and go, with libzmq and without; some of them under one name."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 1023)
    for _ in range(3):
        sockets = []
        for number in range(60):
            one = context.socket(zmq.DEALER)
            one.setsockopt(zmq.LINGER, 0)
            if number % 3 == 0:
                one.setsockopt(zmq.ROUTING_ID, b"one name")
            one.connect(chance.choice([place.knock, place.window]))
            one.send(wire.encode_request(1, wire.Hello(engine=chance.choice([*place.honest, ""]))))
            sockets.append(one)
        await asyncio.sleep(0.1)
        for one in sockets:
            one.close(0)
    context.term()
    with contextlib.suppress(TransferError):
        async with Client(place.door, await_ready=False) as client:
            await client.ping()
