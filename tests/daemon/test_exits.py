"""Ends of processes, as pidfds tell them (exits.py)."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from transferd.daemon import exits
from transferd.daemon.exits import Exits


async def process() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_each_client_of_a_process_that_ended_is_told_once() -> None:
    told: asyncio.Queue[bytes] = asyncio.Queue()
    watched = Exits(told.put_nowait)
    killed, lives = await process(), await process()
    before = descriptors()
    for client, pid in ((b"1", killed.pid), (b"2", lives.pid), (b"3", killed.pid), (b"1", killed.pid)):
        watched.watch(client, pid)
    assert descriptors() == before + 3
    killed.send_signal(signal.SIGKILL)
    async with asyncio.timeout(30):
        assert {await told.get(), await told.get()} == {b"1", b"3"}
    await killed.communicate()
    assert told.empty()
    watched.forget(b"2")
    lives.send_signal(signal.SIGKILL)
    await lives.communicate()
    watched.close()
    assert told.empty()
    assert descriptors() <= before


@pytest.mark.parametrize("pid", [None, 0, 2**22 + 1])
async def test_a_process_that_cannot_be_watched_is_left_to_its_silence(pid: int | None) -> None:
    watched = Exits(lambda _: pytest.fail("nobody is watched"))
    watched.watch(b"1", pid)
    assert not watched._watched
    watched.close()


async def test_descriptors_are_bounded_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exits, "MOST", 3)
    watched = Exits(lambda _: None)
    before = descriptors()
    for number in range(5):
        watched.watch(b"%d" % number, os.getpid())
    assert descriptors() == before + 3
    watched.close()
    assert descriptors() == before
