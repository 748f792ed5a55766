"""What hostile peers do on the network: what they do on the other sockets, and what only keys and tcp make possible."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import random
from collections.abc import Callable, Coroutine
from typing import Any

from nacl import bindings

from tests.machine.hostile.memory_actions import LAYOUT, handle, memory
from tests.machine.hostile.place import Place, Report, fresh_name
from tests.machine.hostile.raw_peer import COMMAND, Keys, RawPeer, frame
from tests.machine.hostile.raw_zmtp import GREETING, command, metadata
from transferd import Client, Engine, TransferError
from transferd.wire import protocol as wire
from transferd.wire.curve import ClientCurve
from transferd.wire.transport import ZmqClientTransport

Action = Callable[[Place, random.Random, Report], Coroutine[Any, Any, None]]
CURVE = GREETING.replace(b"NULL\0", b"CURVE")
STRANGERS = 40


def over_tcp(action: Action) -> Action:
    """The same, by raw peers on the network."""

    @functools.wraps(action)
    async def on_the_network(place: Place, chance: random.Random, report: Report) -> None:
        await action(dataclasses.replace(place, raw=place.tcp), chance, report)

    on_the_network.__name__ = f"{action.__name__}_over_tcp"
    return on_the_network


def _strangers_keys(place: Place) -> list[Keys | None]:
    """No keys, a pair that the daemon does not know, and the known one with another server's key."""
    known = place.keys_of(place.tcp)
    if known is None:
        return []
    server, public, secret = known
    return [None, (server, *bindings.crypto_box_keypair()), (os.urandom(32), public, secret)]


async def come_without_the_keys(place: Place, chance: random.Random, report: Report) -> None:
    """Whoever does not have the keys gets no answer to anything."""
    for keys in _strangers_keys(place):
        with contextlib.suppress(OSError), RawPeer(place.tcp, keys) as peer:
            peer.socket.settimeout(2.0)
            peer.greet(chance.randbytes(5))
            if (answer := peer.ask(wire.Hello())) is not None:
                report.wrong.append(f"a stranger was answered: {type(answer).__name__}")
        report.told.append("nothing")
    if not place.keys:
        report.told.append("nobody needs keys here")


async def break_off_the_handshake(place: Place, chance: random.Random, report: Report) -> None:
    """Handshakes of CURVE that are cut, spoilt, out of order, repeated, or never end."""
    good = CURVE + command(b"HELLO", b"\x01\x00" + bytes(72) + chance.randbytes(32 + 8 + 80))
    texts = [
        lambda: good[: chance.randrange(len(good))],
        lambda: good + command(b"INITIATE", chance.randbytes(chance.randrange(600))),
        lambda: CURVE + command(b"INITIATE", chance.randbytes(256)),
        lambda: CURVE + command(b"READY", metadata(b"DEALER", b"")),
        lambda: GREETING + command(b"HELLO", chance.randbytes(194)),
        lambda: CURVE + frame(b"\x07MESSAGE" + chance.randbytes(200)) * 50,
        lambda: CURVE + frame(chance.randbytes(8192), COMMAND) * 8,
        lambda: good * 20,
    ]
    with contextlib.ExitStack() as stack:
        for number in range(STRANGERS):
            with contextlib.suppress(OSError):
                peer = stack.enter_context(RawPeer(place.tcp))
                peer.socket.settimeout(0.05)
                peer.socket.sendall(texts[number % len(texts)]())
        if place.keys:  # a good connection, then boxes that are none
            with contextlib.suppress(OSError):
                peer = stack.enter_context(RawPeer(place.tcp, place.keys_of(place.tcp)))
                peer.greet()
                peer.socket.sendall(frame(b"\x07MESSAGE" + chance.randbytes(100)) * 20)
                peer.socket.sendall(frame(chance.randbytes(30)))
        await asyncio.sleep(0.3)
        report.told.append(f"{STRANGERS} handshakes")


async def offer_over_the_network(place: Place, chance: random.Random, report: Report) -> None:
    """Who comes by tcp has no user, so no memory of this machine is theirs: neither their own file, nor another's."""
    honest = [entry.name for entry in os.scandir("/dev/shm") if entry.name.startswith("kv-of-")]
    curve = ClientCurve(*(key.encode() for key in place.keys)) if place.keys else None
    with memory() as (own, _):
        for name in [own, *chance.sample(honest, min(2, len(honest)))]:
            transport = ZmqClientTransport(place.tcp, curve=curve)
            async with Client(place.tcp, engine=fresh_name(), await_ready=False, transport=transport) as client:
                await client.register(Engine(ranks=1, model="hostile", layout=LAYOUT))
                try:
                    await client.offer(0, handle(name))
                except TransferError as error:
                    report.told.append(error.reason)
                else:
                    report.wrong.append(f"{name} was accepted from a client of the network")
                with contextlib.suppress(TransferError):
                    await client.unregister()
