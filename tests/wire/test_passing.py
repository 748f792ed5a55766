"""Descriptors passed to a real listening socket: taken by their user and token, bounded, and never left open."""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import struct
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.descriptors import open_memory_and_files
from tests.support.waits import until
from transferd.config import ServerSection
from transferd.errors import TierError
from transferd.wire import passing
from transferd.wire.passing import MARK, TOKEN_BYTES, pass_descriptors
from transferd.wire.transport import ZmqServerTransport


@pytest.fixture
async def transport(tmp_path: Path) -> AsyncIterator[ZmqServerTransport]:
    made = ZmqServerTransport(ServerSection(endpoint=f"ipc://{tmp_path}/s", observer_endpoint=f"ipc://{tmp_path}/o"))
    made.start(lambda *_: None)
    yield made
    made.close()


def copies(name: str) -> int:
    """How many descriptors of this process lead to the memfd of this name."""
    return sum(count for link, count in open_memory_and_files().items() if link.startswith(f"/memfd:{name} "))


def passed(transport: ZmqServerTransport) -> passing.Passed:
    assert transport._acceptor is not None
    return transport._acceptor.passed


def say(path: str, data: bytes, descriptors: list[int]) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX)
    peer.setblocking(False)
    peer.connect(path)
    socket.send_fds(peer, [data], descriptors)
    return peer


async def test_an_offer_gets_its_descriptors_whichever_comes_first(transport: ZmqServerTransport) -> None:
    (endpoint,) = transport.endpoints
    fds = [os.memfd_create(name) for name in ("a", "b")]
    try:
        here = {os.fstat(fd).st_ino for fd in fds}
        token = pass_descriptors(endpoint, fds)
        first = await passed(transport).take(os.getuid(), token)  # waits for them
        assert {os.fstat(fd).st_ino for fd in first.numbers} == here
        assert not any(os.get_inheritable(fd) for fd in first.numbers)
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(os, "urandom", lambda _: b"\7" * TOKEN_BYTES)
            pass_descriptors(endpoint, fds[:1])
        await until(lambda: passed(transport).held[os.getuid()] == 3)
        second = await passed(transport).take(os.getuid(), b"\7" * TOKEN_BYTES)
        del first, second
        assert not passed(transport).held.total()
    finally:
        for fd in fds:
            os.close(fd)
    assert copies("a") == copies("b") == 0, "nothing that was passed stays open"
    assert not any(transport.refused().values()), "to leave at once is what such a peer does"


async def test_what_is_no_memory_is_closed_where_it_may_hang(transport: ZmqServerTransport) -> None:
    """The last close of such a socket waits for its peer; that of a file may wait for a mount."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as lingers:
        peer, _ = server.accept()
        lingers.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                lingers.send(bytes(65536))
        lingers.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 5))
        memory = os.memfd_create("beside")
        token = pass_descriptors(transport.endpoints[0], [lingers.fileno(), memory])
        os.close(memory)
        held = await passed(transport).take(os.getuid(), token)
    del held
    await until(lambda: copies("beside") == 0)
    assert passed(transport).held[os.getuid()] == 1, "it counts until it is closed"
    peer.close()
    await until(lambda: not passed(transport).held.total())


async def test_much_memory_is_freed_in_a_thread(transport: ZmqServerTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever closes the last descriptor of memory frees it: half a second for each GiB."""
    monkeypatch.setattr(passing, "FREED_AT_ONCE", 4096)
    large, small = os.memfd_create("large"), os.memfd_create("small")
    os.posix_fallocate(large, 0, 8192)
    token, go = pass_descriptors(transport.endpoints[0], [large, small]), threading.Event()
    os.close(large)
    os.close(small)
    held = await passed(transport).take(os.getuid(), token)
    waiting = passed(transport)._closing.run(go.wait)
    del held
    await until(lambda: copies("small") == 0)
    assert (copies("large"), passed(transport).held[os.getuid()]) == (1, 1)
    go.set()
    await waiting
    await until(lambda: not passed(transport).held.total())
    assert copies("large") == 0


async def test_who_has_too_many_open_passes_no_more(
    transport: ZmqServerTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passing, "MOST_HELD", 4)
    fd = os.memfd_create("many")
    kept = await passed(transport).take(os.getuid(), pass_descriptors(transport.endpoints[0], [fd, fd]))
    pass_descriptors(transport.endpoints[0], [fd])
    await until(lambda: transport.refused()["protocol_error"] == 1)
    os.close(fd)
    assert copies("many") == 2
    del kept


async def test_another_user_or_token_gets_nothing_and_what_is_late_is_closed(
    transport: ZmqServerTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passing, "WAIT_S", 0.05)
    fd = os.memfd_create("late")
    token = pass_descriptors(transport.endpoints[0], [fd])
    with pytest.raises(TierError, match=r"have not arrived within 0\.05 s"):
        await passed(transport).take(os.getuid() + 1, token)
    with pytest.raises(TierError, match="offer it again"):
        await passed(transport).take(os.getuid(), token[::-1])
    await until(lambda: not passed(transport).held.total())
    os.close(fd)
    assert copies("late") == 0


async def test_one_user_takes_half_of_the_room_and_another_has_the_rest(
    transport: ZmqServerTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passing, "MOST_HELD", 4)
    monkeypatch.setattr(passing, "WAIT_S", 60.0)
    endpoint, user, fd = transport.endpoints[0], os.getuid(), os.memfd_create("mine")
    kept = await passed(transport).take(user, pass_descriptors(endpoint, [fd, fd]))
    with monkeypatch.context() as patch:
        patch.setattr(passing, "WAIT_S", 0.05)  # of what is refused alone: the others may take longer to arrive
        with pytest.raises(TierError, match="have not arrived"):
            await passed(transport).take(user, pass_descriptors(endpoint, [fd]))
    ours = array.array("i", [os.dup(fd)]).tobytes()
    others = passed(transport).received(user + 1, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, ours)])
    passed(transport).arrived(user + 1, b"t" * TOKEN_BYTES, others)
    assert passed(transport).held.total() == 3, "another user has room"
    del kept
    await passed(transport).take(user, pass_descriptors(endpoint, [fd]))
    os.close(fd)


@pytest.mark.parametrize(
    ("where", "data", "count"),
    [("s", MARK, 1), ("s", MARK + bytes(TOKEN_BYTES), 0), ("s", b"\xff", 1), ("o", MARK + bytes(TOKEN_BYTES), 1)],
    ids=["no token", "no descriptor", "a greeting with one", "an observer"],
)
async def test_what_is_no_passing_ends_the_connection_and_is_counted(
    transport: ZmqServerTransport, tmp_path: Path, where: str, data: bytes, count: int
) -> None:
    fd = os.memfd_create("refused")
    peer = say(f"{tmp_path}/{where}", data, [fd] * count)
    await until(lambda: transport.refused()["protocol_error"] == 1)
    peer.close()
    os.close(fd)
    assert copies("refused") == 0
    assert not passed(transport).held.total()


async def test_where_nobody_listens_the_offer_says_so(tmp_path: Path) -> None:
    with pytest.raises(TierError, match=f"cannot pass the memory's descriptors to ipc://{tmp_path}/none"):
        await asyncio.to_thread(pass_descriptors, f"ipc://{tmp_path}/none", [0])
