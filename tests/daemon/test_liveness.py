"""Ends of clients' processes, as pidfds tell them (liveness.py). Silence is in tests/integration/test_wire.py."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest

from tests.support.descriptors import open_memory_and_files
from tests.support.named_peers import NamedPeers
from transferd.daemon import liveness
from transferd.daemon.clients import Clients
from transferd.daemon.liveness import Liveness
from transferd.observability.recorder import Recorder
from transferd.runtime.compat import timeout
from transferd.wire.credentials import Credentials


class Processes(NamedPeers):
    """Whose processes clients are."""

    def __init__(self, pids: Mapping[bytes, int | None], users: Mapping[bytes, int]) -> None:
        self.pids, self.users = pids, users

    def start(self, *_: object) -> None: ...

    def send(self, _peer: bytes, _payload: bytes) -> bool:
        return True

    def credentials(self, peer: bytes) -> Credentials | None:
        pid = self.pids[peer]
        return None if pid is None else Credentials(pid, self.users.get(peer, 0), 0)


def watching(
    pids: Mapping[bytes, int | None], forget: Callable[[bytes], None], users: Mapping[bytes, int] | None = None
) -> Liveness:
    """users: by client, if not root's."""
    clients = Clients(Processes(pids, users or {}), "boot", Recorder(capacity=10))

    def left(peer: bytes, _how: str) -> None:
        made.left(peer)
        forget(peer)

    made = Liveness(clients, 1000.0, lambda: 0.0, left)
    for peer in pids:
        clients.meet(peer, 0.0)
        made.watch_process(peer)
    return made


async def process() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE)


def descriptors() -> int:
    gc.collect()  # what an earlier test has left would go at any moment
    return open_memory_and_files().total()


@contextlib.contextmanager
def ended(processes: Sequence[asyncio.subprocess.Process]) -> Iterator[None]:
    """Kill these at the end: uvloop waits for them in its close, for ever."""
    try:
        yield
    finally:
        for one in processes:
            with contextlib.suppress(ProcessLookupError):
                one.kill()


async def test_each_client_of_a_process_that_ended_is_lost_once() -> None:
    told: asyncio.Queue[bytes] = asyncio.Queue()
    killed, lives = await process(), await process()
    with ended([killed, lives]):
        before = descriptors()
        pids = {b"1": killed.pid, b"2": lives.pid, b"3": killed.pid}
        watched = watching(pids, told.put_nowait)
        watched.watch_process(b"1")  # again: it attaches a second rank
        assert descriptors() == before + 2, "one for each process"
        killed.send_signal(signal.SIGKILL)
        async with timeout(30):
            assert {await told.get(), await told.get()} == {b"1", b"3"}
        await killed.communicate()
        watched.left(b"2")  # it said Bye before it ended
        lives.send_signal(signal.SIGKILL)
        await lives.communicate()
        watched.close()
        assert told.empty()
        assert watched.lost == 2
        assert descriptors() <= before


async def test_a_silent_client_whose_loss_ends_another_one_too_does_not_end_the_looking() -> None:
    told: list[bytes] = []

    def lost(peer: bytes) -> None:
        told.append(peer)
        for gone in (peer, b"2"):  # nobody reads on its connection, which the loss of the first one shows
            watched.clients.leave(gone)

    watched = watching({b"1": None, b"2": None, b"3": None}, lost)
    watched.now = lambda: 2000.0
    watched._due = 2000.0
    watched._look()
    assert told == [b"1", b"3"]
    watched.clients.meet(b"4", 2000.0)
    watched._look()
    assert watched._timer, "it looks again"
    watched.close()


@pytest.mark.parametrize("pid", [None, 0, 2**22 + 1])  # on tcp; in another PID namespace; gone
async def test_a_process_that_cannot_be_watched_is_left_to_its_silence(pid: int | None) -> None:
    before = descriptors()
    watched = watching({b"1": pid}, lambda _: pytest.fail("nobody is watched"))
    assert descriptors() == before
    watched.close()


async def test_one_process_takes_one_place_however_many_connections_it_has() -> None:
    before = descriptors()
    watched = watching({b"%d" % number: os.getpid() for number in range(300)}, lambda _: None)
    assert descriptors() == before + 1
    watched.left(b"7")
    assert descriptors() == before + 1
    watched.close()
    assert descriptors() == before


async def test_descriptors_are_bounded_and_a_user_with_fewer_gets_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "MOST_PROCESSES", 3)
    told: asyncio.Queue[bytes] = asyncio.Queue()
    crowd, others = [await process() for _ in range(5)], [await process() for _ in range(2)]
    with ended([*crowd, *others]):
        before = descriptors()
        pids = {b"c%d" % number: one.pid for number, one in enumerate(crowd)}
        pids |= {b"o%d" % number: one.pid for number, one in enumerate(others)}
        watched = watching(pids, told.put_nowait, users={b"o0": 5001, b"o1": 5002})
        assert descriptors() == before + 3
        for one in others:
            one.send_signal(signal.SIGKILL)
        async with timeout(30):
            assert {await told.get(), await told.get()} == {b"o0", b"o1"}, "the crowd has kept no place from them"
        assert descriptors() == before + 1
        watched.close()
    for one in (*crowd, *others):
        await one.communicate()
    assert told.empty()
