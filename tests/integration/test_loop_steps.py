"""No step of the event loop takes 50 ms of CPU, whatever is asked for. The daemon's own figure says how long it was."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tests.integration.test_looking_costs import page
from tests.wire.test_acceptor import Peer
from transferd import Client, Engine, Pages, Status, WriteStorageTask, shm_pages
from transferd.cli.pool.master import free_port
from transferd.client.launch import running
from transferd.wire import protocol as wire

LONGEST_S = 0.05
OBJECTS, AT_ONCE = 4096, 1024
OBJECT_BYTES = 384  # a block of TINY, with its footer
PAGE = 2**20
BLOCKS = 256  # of two layers: the daemon allocates what it maps, in threads
TINY = {"layers": 1, "kv_heads": 1, "head_dim": 16, "block_size": 4}  # blocks of 256 bytes
KEYS = [f"{number:064x}" for number in range(65536)]


async def write(client: Client, keys: list[str]) -> None:
    for start in range(0, len(keys), AT_ONCE):
        some = keys[start : start + AT_ONCE]
        task = WriteStorageTask(task_id=f"{keys[0]} {start}", keys=some, gpu_block_ids=list(range(len(some))))
        assert (await client.submit(task)).status is Status.OK


async def step_of(client: Client, doing: str, before: float) -> float:
    """The longest step so far. Whatever was done last took none of LONGEST_S."""
    longest = float((await client.stats())["loop_longest_s"])
    assert longest < max(LONGEST_S, before + 1e-9), f"{doing}: a step of {longest * 1e3:.0f} ms"
    return longest


async def test_whatever_is_asked_for_the_loop_goes_on(tmp_path: Path) -> None:
    port = free_port()
    tree = {
        "cache": TINY | {"ranks": 1, "device_blocks": AT_ONCE, "host_blocks": 0},
        "storage": {"backend": "memory", "memory": {"capacity": OBJECTS * OBJECT_BYTES}},
        "metrics": {"listen": f"127.0.0.1:{port}"},
    }
    with running(tree, tmp_path) as daemon:
        async with Client(daemon.endpoint) as client, Client(daemon.endpoint, engine="b", await_ready=False) as engine:
            await client.attach(0)
            longest = await step_of(client, "the start", 60.0)  # modules are loaded with the first client
            await write(client, KEYS[:OBJECTS])
            longest = await step_of(client, "writes", longest)
            await write(client, KEYS[OBJECTS : 2 * OBJECTS])
            report = await client.stats()
            assert report["storage"]["evictions"] == OBJECTS, report["storage"]
            longest = await step_of(client, "evictions", longest)
            assert sum(await client.exists(KEYS)) == report["storage"]["objects"]
            longest = await step_of(client, "a look-up of 65,536 keys", longest)
            await page(port, "/metrics")
            longest = await step_of(client, "a scrape", longest)
            fd = os.memfd_create("engine", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, 2 * BLOCKS * PAGE)
            try:
                pages = Pages(layers=2, page_bytes=PAGE, blocks=BLOCKS, identity="sparse")
                await engine.register(Engine(ranks=1, model="m", layout=pages))
                await engine.offer(0, shm_pages(fd, [(0, PAGE), (BLOCKS * PAGE, PAGE)], nbytes=2 * BLOCKS * PAGE))
            finally:
                os.close(fd)
            longest = await step_of(client, "an offer", longest)
            await client.purge(model="default")
            await step_of(client, "a purge", longest)


@pytest.mark.parametrize("levels", [["memory"], ["file"], ["memory", "file"]])
async def test_pins_of_many_blocks_let_the_loop_go_on(tmp_path: Path, levels: list[str]) -> None:
    """What no level below had yet was looked for in a list, for each block: nobody was answered for minutes."""
    keys = KEYS[:16384]
    tree = {
        "cache": TINY | {"ranks": 1, "device_blocks": AT_ONCE, "host_blocks": 0},
        "storage": {"levels": levels, "memory": {"capacity": 4 * len(keys) * OBJECT_BYTES}},
        "engines": {"pin_share": 0.5},
    }
    with running(tree, tmp_path) as daemon:
        async with Client(daemon.endpoint) as client:
            await client.attach(0)
            await write(client, keys)
            longest = await step_of(client, "writes", 60.0)
            for _ in range(2):
                assert (await client.pin(keys, 600.0)).reachable == len(keys)
                longest = await step_of(client, "pins", longest)
            await client.unpin(keys[: len(keys) // 2])
            longest = await step_of(client, "the ends of pins", longest)
            await client.unpin()
            longest = await step_of(client, "the ends of all pins", longest)
            assert (await client.pin(keys, 0.5)).pinned == len(keys)
            while (await client.stats())["storage"]["pinned"]:  # noqa: ASYNC110 - the daemon is another process
                await asyncio.sleep(0.1)
            longest = await step_of(client, "pins that are over", longest)
            assert next(iter((await client.locate(keys=keys)).values()))["any"] == len(keys)
            longest = await step_of(client, "a search", longest)
            if levels[1:]:
                assert (await client.prefetch(keys)).block_ids == list(range(len(keys)))
                longest = await step_of(client, "a prefetch", longest)
            await client.pin(keys, 600.0)
            assert (await client.purge(keys)).objects >= len(keys)
            assert (await client.stats())["storage"]["pinned"] == 0
            await step_of(client, "a purge of what is pinned", longest)


async def test_a_client_that_is_gone_ends_its_tasks_in_turns(tmp_path: Path) -> None:
    queued = 4096
    tree = {
        "cache": TINY | {"ranks": 1, "device_blocks": 64, "host_blocks": 64},
        "storage": {"backend": "memory"},
        "metrics": {"listen": ""},
    }
    with running(tree, tmp_path) as daemon:
        async with Client(daemon.endpoint) as client:
            await client.attach(0)
            await client.pause()
            leaving = Peer(daemon.endpoint)
            leaving.socket.setblocking(True)
            leaving.send(wire.encode_request(0, wire.Hello()))
            for number in range(queued):
                task = WriteStorageTask(task_id=f"t{number}", keys=[f"k{number}"], gpu_block_ids=[number % 64])
                leaving.send(wire.encode_request(number + 1, task))
            while (await client.stats())["queued"] < queued:  # noqa: ASYNC110 - the daemon is another process
                await asyncio.sleep(0.02)
            before = float((await client.stats())["loop_longest_s"])
            leaving.socket.close()  # as the kernel does when a process is killed
            while (await client.stats())["queued"]:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            await step_of(client, "a client gone", before)
