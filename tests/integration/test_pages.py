"""An engine's own pages behind a daemon: offered by name or descriptor, two ranks in one memory, all bytes compared."""

from __future__ import annotations

import mmap
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from transferd import Client, Pages, ReadStorageTask, Status, WriteStorageTask, shm_pages
from transferd.config import from_tree
from transferd.daemon.daemon import Daemon
from transferd.errors import RequestError, TransferError
from transferd.tiers.offered import DIRECTORY

RANKS, BLOCKS = 2, 8
SIZES = [48, 16, 33]
PAGES = Pages(layers=3, page_bytes=SIZES, blocks=BLOCKS, identity="test/pages")
ROW = 128  # bytes of one rank in a row; a row holds a block of every rank
SEGMENTS = [[(ROW * rank + start, ROW * RANKS) for start in (0, 48, 88)] for rank in range(RANKS)]
NBYTES = ROW * RANKS * BLOCKS


async def daemon_at(endpoint: str, pages: Pages = PAGES, **storage: Any) -> Daemon:
    tree = {
        "server": {"endpoint": endpoint},
        "cache": pages.as_cache() | {"ranks": RANKS, "ownership": "attach", "host_blocks": 0},
        "host": {"staging": "64KiB"},
        "storage": {"backend": "memory"} | storage,
        "metrics": {"listen": ""},
    }
    made = Daemon(from_tree(tree))
    await made.open()
    return made


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Daemon]:
    made = await daemon_at(f"ipc://{tmp_path}/t.sock")
    yield made
    await made.stop(lambda: 5.0)


@pytest.fixture
async def client(daemon: Daemon) -> AsyncIterator[Client]:
    async with Client(daemon.transport.endpoints[0], await_ready=False) as connected:
        yield connected


@pytest.fixture(params=["name", "descriptor"])
def memory(request: pytest.FixtureRequest) -> Iterator[tuple[str | int, npt.NDArray[np.uint8]]]:
    """The engine's memory, as shm_pages takes it, and its bytes."""
    name = f"test.{os.getpid()}.engine"
    if request.param == "name":
        fd = os.open(DIRECTORY / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    else:
        fd = os.memfd_create("engine", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, NBYTES)
    raw = np.frombuffer(mmap.mmap(fd, NBYTES), dtype=np.uint8)
    raw[:] = np.random.default_rng(3).integers(0, 256, NBYTES, dtype=np.uint8)
    yield (name if request.param == "name" else fd), raw
    os.close(fd)
    if request.param == "name":
        os.unlink(DIRECTORY / name)


def block(raw: npt.NDArray[np.uint8], rank: int, number: int) -> bytes:
    pages = zip(SEGMENTS[rank], SIZES, strict=True)
    return b"".join(raw[offset + number * stride :][:nbytes].tobytes() for (offset, stride), nbytes in pages)


async def offered(client: Client, memory: tuple[str | int, npt.NDArray[np.uint8]]) -> None:
    where, raw = memory
    for rank in range(RANKS):
        views = PAGES.views(raw, SEGMENTS[rank])
        await client.offer(rank, shm_pages(where, SEGMENTS[rank]), caches=views)
    await client.wait_ready(60)


async def test_pages_are_stored_and_loaded_byte_for_byte_and_nothing_else_is_touched(
    client: Client, memory: tuple[str | int, npt.NDArray[np.uint8]]
) -> None:
    raw = memory[1]
    before = raw.copy()
    early = await client.submit(WriteStorageTask(task_id="early", keys=["a"], gpu_block_ids=[0]))
    assert (early.status, early.error and early.error.code) == (Status.BUSY, "starting"), "no rank has memory yet"
    await offered(client, memory)
    assert np.array_equal(raw, before), "the canary has put every byte back"
    written = await client.submit(WriteStorageTask(task_id="w", keys=["a", "b", "c"], gpu_block_ids=[6, 1, 3]))
    assert (written.status, written.bytes) == (Status.OK, 3 * RANKS * sum(SIZES))
    assert await client.exists(["a", "x", "b", "c"]) == [True, False, True, True]
    task = ReadStorageTask(task_id="r", keys=["c", "x", "a"], gpu_block_ids=[0, 4, 7], prefix=False)
    result = await client.submit(task)
    assert (result.status, result.block_ids, result.error) == (Status.PARTIAL, [0, 7], None)
    expected = before.copy()
    for source, target in ((3, 0), (6, 7)):
        for segments in SEGMENTS:
            for (offset, stride), nbytes in zip(segments, SIZES, strict=True):
                page = before[offset + source * stride :][:nbytes]
                expected[offset + target * stride :][:nbytes] = page
    assert np.array_equal(raw, expected)


async def test_a_segment_that_is_a_byte_off_is_found_by_the_canary(
    client: Client, daemon: Daemon, memory: tuple[str | int, npt.NDArray[np.uint8]]
) -> None:
    where, raw = memory
    before = raw.copy()
    off = [(offset + (1 if layer == 2 else 0), stride) for layer, (offset, stride) in enumerate(SEGMENTS[0])]
    with pytest.raises(RequestError, match="block 1 of page of layer 2") as refusal:
        await client.offer(0, shm_pages(where, off), caches=PAGES.views(raw, SEGMENTS[0]))
    assert refusal.value.reason == "canary_mismatch"
    assert daemon.default.cache.missing == [0, 1]
    assert np.array_equal(raw, before)


async def test_two_ranks_that_share_a_byte_of_one_memory_are_refused(
    client: Client, daemon: Daemon, memory: tuple[str | int, npt.NDArray[np.uint8]]
) -> None:
    where, _ = memory
    await client.offer(0, shm_pages(where, SEGMENTS[0]))
    overlapping = [(offset - ROW + 32, stride) for offset, stride in SEGMENTS[1]]
    with pytest.raises(RequestError, match="overlaps that of rank 0") as refusal:
        await client.offer(1, shm_pages(where, overlapping))
    assert refusal.value.reason == "already_attached"
    assert daemon.default.cache.missing == [1]


async def test_the_offer_never_says_whose_descriptor_it_is(client: Client, daemon: Daemon) -> None:
    """Pretending to be another process of the same user changes nothing: the kernel's word is taken."""
    fd = os.memfd_create("mine", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, NBYTES)
    handle = shm_pages(fd, SEGMENTS[0])
    data = handle.data | {"peer": [os.getuid(), os.getppid()]}
    await client.offer(0, {"kind": handle.kind, "data": data})
    assert daemon.default.cache.missing == [1]
    os.close(fd)


async def test_over_tcp_a_descriptor_means_nothing() -> None:
    daemon = await daemon_at("tcp://127.0.0.1:*")
    fd = os.memfd_create("mine", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, NBYTES)
    try:
        async with Client(daemon.transport.endpoints[0], await_ready=False) as client:
            with pytest.raises(RequestError, match="offer it over a unix socket") as refusal:
                await client.offer(0, shm_pages(fd, SEGMENTS[0]))
            assert refusal.value.reason == "not_yours"
    finally:
        os.close(fd)
        await daemon.stop(lambda: 5.0)


@pytest.mark.parametrize(
    ("other", "shared"),
    [
        (Pages(layers=3, page_bytes=SIZES, blocks=BLOCKS - 1, identity="test/pages"), True),
        (Pages(layers=3, page_bytes=SIZES, blocks=BLOCKS, identity="test/pages/2"), False),
        (Pages(layers=3, page_bytes=[48, 33, 16], blocks=BLOCKS, identity="test/pages"), False),
    ],
    ids=["the same", "another identity", "other sizes"],
)
async def test_engines_that_say_the_same_share_objects_and_others_never(
    other: Pages, shared: bool, tmp_path: Path
) -> None:
    """One store after another: what the first engine stored, the second finds, if it says the same."""
    store = {"backend": "file", "file": {"path": str(tmp_path / "blocks")}}
    wanted: list[bytes] = []
    for turn, pages in enumerate((PAGES, other)):
        daemon = await daemon_at(f"ipc://{tmp_path}/{turn}.sock", pages, **store)
        fd = os.memfd_create("engine", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, NBYTES)
        raw = np.frombuffer(mmap.mmap(fd, NBYTES), dtype=np.uint8)
        try:
            async with Client(daemon.transport.endpoints[0], await_ready=False) as client:
                for rank in range(RANKS):
                    await client.offer(rank, shm_pages(fd, SEGMENTS[rank]))
                if turn == 0:
                    raw[:] = np.random.default_rng(4).integers(0, 256, NBYTES, dtype=np.uint8)
                    wanted = [block(raw, rank, 2) for rank in range(RANKS)]
                    written = await client.submit(WriteStorageTask(task_id="w", keys=["k"], gpu_block_ids=[2]))
                    assert written.status is Status.OK
                    continue
                assert await client.exists(["k"]) == [shared]
                result = await client.submit(ReadStorageTask(task_id="r", keys=["k"], gpu_block_ids=[5]))
                assert result.status is (Status.OK if shared else Status.MISS)
                assert [block(raw, rank, 5) for rank in range(RANKS)] == (wanted if shared else [bytes(97)] * RANKS)
        finally:
            os.close(fd)
            await daemon.stop(lambda: 5.0)


async def test_attaching_to_an_engines_pages_is_refused(
    client: Client, memory: tuple[str | int, npt.NDArray[np.uint8]]
) -> None:
    await offered(client, memory)
    with pytest.raises(TransferError, match="only it can map it"):
        await client.attach(0)
