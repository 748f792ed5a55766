"""One engine offers memory in thousands of pieces: the daemon answers the others meanwhile."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from transferd import Client, Engine, Pages, shm_pages
from transferd.client.launch import running
from transferd.errors import RequestError

LAYERS = 1024
INTERLEAVED = [(layer * 16, LAYERS * 16) for layer in range(LAYERS)]
# Block 0 of all layers, and behind it block 1 of all layers, each at a distance of its own.
STRIDES = [(layer, 2 * LAYERS + 2 * layer) for layer in range(LAYERS)]
LONG = [(0, 32), (16, 64)]
CASES = {
    "different strides": (Pages(layers=LAYERS, page_bytes=1, blocks=2, identity="a"), STRIDES, 6 * LAYERS),
    "2^26 blocks": (Pages(layers=2, page_bytes=16, blocks=2**26, identity="b"), LONG, 2**32 + 64),
}


async def answered_until(other: Client, work: asyncio.Task[None]) -> int:
    """How many pings the daemon answers until it has answered `work`."""
    pings = 0
    while not work.done():
        await other.ping()
        pings += not work.done()
    return pings


@pytest.mark.parametrize("case", CASES)
async def test_others_are_answered_while_an_offer_is_checked(case: str, tmp_path: Path) -> None:
    pages, segments, nbytes = CASES[case]
    fd = os.memfd_create("engine", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    try:
        with running({"storage": {"backend": "memory"}}, tmp_path) as daemon:
            async with (
                Client(daemon.endpoint, engine="many", await_ready=False) as engine,
                Client(daemon.endpoint, await_ready=False) as other,
            ):
                await engine.register(Engine(ranks=1, model="m", layout=pages))
                handle = shm_pages(fd, segments, nbytes=nbytes)
                offer = asyncio.ensure_future(engine.offer(0, handle))
                pings = await answered_until(other, offer)
                await offer
                assert pings or case != "different strides"  # the other one is compared at once
                peak = next(
                    line for line in Path(f"/proc/{daemon.pid}/status").read_text().splitlines() if "VmHWM" in line
                )
                assert int(peak.split()[1]) < 512 * 1024  # KiB: nothing of the size of 2^26 blocks
    finally:
        os.close(fd)


async def test_one_page_in_another_is_found_among_thousands(tmp_path: Path) -> None:
    fd = os.memfd_create("engine", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, LAYERS * 16 * 8)
    pages = Pages(layers=LAYERS, page_bytes=16, blocks=8, identity="c")
    try:
        with running({"storage": {"backend": "memory"}}, tmp_path) as daemon:
            async with Client(daemon.endpoint, engine="many", await_ready=False) as engine:
                await engine.register(Engine(ranks=1, model="m", layout=pages))
                wrong = [*INTERLEAVED[:700], (INTERLEAVED[700][0] - 1, LAYERS * 16), *INTERLEAVED[701:]]
                with pytest.raises(RequestError, match="layer 699 and the pages of layer 700 overlap"):
                    await engine.offer(0, shm_pages(fd, wrong))
                await engine.offer(0, shm_pages(fd, INTERLEAVED))
    finally:
        os.close(fd)
