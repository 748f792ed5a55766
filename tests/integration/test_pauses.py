"""A pause belongs to the client that asked for it, and ends with it: kill -9, restarts, and several at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.caches import attached
from tests.support.waits import stats_until
from transferd import Client, Status, SwapOutTask
from transferd.client.launch import DaemonProcess, running, start
from transferd.runtime.compat import wait_for

pytestmark = pytest.mark.one_loop  # the daemon is in a process of its own

TREE: dict[str, dict[str, Any]] = {
    "server": {"client_timeout": 3.0},
    "cache": {"ranks": 1, "layers": 1, "kv_heads": 1, "head_dim": 8, "block_size": 4, "device_blocks": 8,
              "host_blocks": 8},
    "host": {"staging": "64KiB"},
    "storage": {"backend": "none"},
}  # fmt: skip

HOLDER = """
import asyncio, sys
from transferd import Client

async def main(endpoint, what):
    async with Client(endpoint, name="pauser") as client:
        await getattr(client, what)()
        print("held", flush=True)
        await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with running(TREE, tmp_path) as process:
        yield process


def holder(endpoint: str, what: str) -> subprocess.Popen[bytes]:
    """A process that pauses or drains, and then waits to be killed."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, endpoint, what], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    return process


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def swap(number: int) -> SwapOutTask:
    return SwapOutTask(task_id=f"t{number}", gpu_block_ids=[number], cpu_block_ids=[number], timeout=60.0)


@pytest.mark.parametrize("what", ["pause", "drain"])
async def test_a_killed_clients_holds_end(daemon: DaemonProcess, what: str) -> None:
    async with attached(daemon.endpoint) as client:
        dead = holder(daemon.endpoint, what)
        [held] = (await client.stats())["held"]
        assert held["what"] == what
        assert held["holder"].startswith("pauser (")
        assert held["for_s"] >= 0
        if what == "pause":
            future = await client.push(swap(1))
            assert not future.done()
            kill(dead)
            result = await wait_for(future, 60)
        else:
            assert (await client.submit(swap(1))).status is Status.REJECTED
            kill(dead)
            await stats_until(client, lambda stats: not stats["draining"], within=60)
            result = await client.submit(swap(2))
        assert result.status is Status.OK
        assert (await client.stats())["held"] == []


async def test_a_pause_ends_with_a_client_that_closes_and_says_nothing_else(daemon: DaemonProcess) -> None:
    async with attached(daemon.endpoint) as client:
        async with Client(daemon.endpoint) as other:
            await other.pause()
            future = await client.push(swap(1))
        assert (await wait_for(future, 60)).status is Status.OK


async def test_of_several_pauses_the_living_ones_stay(daemon: DaemonProcess) -> None:
    async with attached(daemon.endpoint) as client, Client(daemon.endpoint, name="living") as living:
        dead = holder(daemon.endpoint, "pause")
        await living.pause()
        future = await client.push(swap(1))
        kill(dead)
        await stats_until(client, lambda stats: len(stats["held"]) == 1, within=60)
        report = await client.stats()
        assert report["held"][0]["holder"].startswith("living (")
        assert (report["paused"], report["queued"], future.done()) == (True, 1, False)
        await living.resume()
        assert (await wait_for(future, 60)).status is Status.OK


async def test_another_client_can_overrule_a_pause(daemon: DaemonProcess) -> None:
    async with (
        Client(daemon.endpoint) as hangs,
        attached(daemon.endpoint) as client,
        Client(daemon.endpoint) as operator,
    ):
        await hangs.pause()
        await hangs.drain()
        await operator.resume()
        assert (await client.submit(swap(1))).status is Status.OK


async def test_a_pause_is_asked_for_again_after_a_restart_and_a_resumed_one_is_not(tmp_path: Path) -> None:
    first = start(TREE, tmp_path)
    try:
        async with Client(first.endpoint, connect_timeout=60) as paused, Client(first.endpoint) as resumed:
            await paused.pause()
            await resumed.pause()
            await resumed.resume()
            boot = resumed.boot_id
            first.kill()
            first = start(TREE, tmp_path)
            async with attached(first.endpoint) as client:
                await stats_until(client, lambda stats: bool(stats["held"]), within=60)
                # What it says to a new session it says when it hears of it: an answer after that comes after that.
                await stats_until(client, lambda _: resumed.connected and resumed.boot_id != boot, within=60)
                await resumed.ping()
                assert len((await client.stats())["held"]) == 1
                future = await client.push(swap(1))
                assert not future.done()
                await paused.resume()
                assert (await wait_for(future, 60)).status is Status.OK
    finally:
        assert first.stop() == 0
