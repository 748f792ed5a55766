"""What a hostile user asks for because it costs the daemon much and him little: reports, look-ups, memories, places."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
from collections import Counter

from tests.machine.hostile.accounts import be_visible
from tests.machine.hostile.memory_actions import PAGE, engine
from tests.machine.hostile.place import Place, Report, fresh_name
from tests.machine.hostile.raw_peer import RawPeer
from transferd import Client, Engine, Pages, TransferError, shm_pages
from transferd.daemon.lookup import PIECE
from transferd.wire import protocol as wire

SCRAPES, VISITS, ATTACHES, ASKERS, RANKS = 300, 200, 60, 8, 16
MEMORIES = 16  # of each rank; the daemon's staging has room for a block of so many pages
KEYS = 2 * PIECE + 1  # so many that a look-up takes its turns, and few enough for a small message


async def scrape_without_end(place: Place, chance: random.Random, report: Report) -> None:
    """Hundreds of GETs at once, from a process that needs no right to the socket."""
    host, _, port = place.page.rpartition(":")
    path = chance.choice(["/metrics", "/status", "/live"])

    async def get() -> int:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            answer = await reader.read()
            writer.close()
            return len(answer)
        return 0

    sizes = await asyncio.gather(*(get() for _ in range(SCRAPES)))
    report.told.append(f"{path}: {sum(map(bool, sizes))} of {SCRAPES} answered")


async def ask_for_much(place: Place, chance: random.Random, report: Report) -> None:
    """Clients that pipeline reports, lists and long look-ups."""
    keys = [f"{chance.getrandbits(64):016x}{number:x}" for number in range(KEYS)]
    codes: dict[str, int] = {}

    async def ask(number: int) -> None:
        async with engine(place) as client:
            for _ in range(4):
                try:
                    if number % 2:
                        await asyncio.gather(*(client.tasks("recent", limit=1000) for _ in range(16)))
                    else:
                        await client.match(keys, timeout=20.0)
                except TransferError as error:
                    codes[error.reason] = codes.get(error.reason, 0) + 1

    await asyncio.gather(*(ask(number) for number in range(ASKERS)))
    report.told.append(f"refused {codes}")


async def come_and_go(place: Place, chance: random.Random, report: Report) -> None:
    """Connect, say hello, attach, and leave, again and again: none of them is a client afterwards."""
    del chance
    held = []
    for number in range(VISITS):
        with contextlib.suppress(OSError):
            peer = RawPeer(place.knock, place.keys_of(place.knock))
            peer.socket.settimeout(5.0)
            peer.greet()
            peer.ask(wire.Hello(), seq=1)
            if number < ATTACHES:  # one process, many connections: they take one place among the watched ones
                peer.ask(wire.Attach(0, 0), seq=2)
                held.append(peer)
            else:
                peer.socket.close()
    mine = os.getuid()
    async with Client(place.door, await_ready=False) as client:
        for peer in held:
            with contextlib.suppress(OSError):
                peer.socket.shutdown(socket.SHUT_RDWR)
                peer.socket.close()
        rows = await client.clients()
        left = sum(row["uid"] == mine for row in rows)
    report.told.append(f"{left} of {VISITS} are clients")


async def offer_many_memories(place: Place, chance: random.Random, report: Report) -> None:
    """Ranks of one engine whose blocks lie in many memories: a descriptor and maps for each."""
    del chance
    be_visible()
    layout = Pages(layers=MEMORIES, page_bytes=PAGE, blocks=1, identity="many")
    fds = [os.memfd_create("many", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING) for _ in range(MEMORIES)]
    told: Counter[str] = Counter()
    try:
        for fd in fds:
            os.posix_fallocate(fd, 0, RANKS * PAGE)
        async with Client(place.door, engine=fresh_name(), await_ready=False) as client:
            try:
                await client.register(Engine(ranks=RANKS, model="many", layout=layout))
                for rank in range(RANKS):
                    segments = [(rank * PAGE, PAGE, number) for number in range(MEMORIES)]
                    try:
                        await client.offer(rank, shm_pages(fds, segments))
                        told["ok"] += 1
                    except TransferError as error:
                        told[error.reason] += 1
                with RawPeer(place.knock, place.keys_of(place.knock)) as newcomer:
                    newcomer.greet()
                    if newcomer.ask(wire.Hello(), seq=1) is None:
                        report.wrong.append("nobody gets in beside an engine of many memories")
                await client.unregister()
            except TransferError as error:
                told[error.reason] += 1
    finally:
        for fd in fds:
            os.close(fd)
    report.told.append(f"{dict(told)}")
