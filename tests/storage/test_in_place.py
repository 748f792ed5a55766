"""Loads in place: the part of the storage contract that says `get_in_place`, over every backend that has it."""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.storage.harness import BACKENDS, Backend, Harness, Open, file_config
from tests.support.page_cache import pages_in_memory
from transferd.storage import file_io
from transferd.storage.base import COLD, FOUND, MISSING, STORED, Backing, Blob, Found, Outcome, Place, ReadNow
from transferd.storage.file import FileStorage
from transferd.storage.file_io import FETCHED_BYTES
from transferd.storage.lru import Use

FOOTER = 128


class Block:
    """An InPlace of scattered parts: it reads the last FOOTER bytes first, then the rest in pieces of a few parts."""

    def __init__(self, nbytes: int, part: int = 1000) -> None:
        self.nbytes = nbytes
        self.memory = bytearray(b"\xaa" * nbytes)
        self.wanted = True
        self._part = part
        self.threads: list[str] = []  # in which it loaded, and after which it was left

    def load_file(self, path: str, flags: int) -> None:
        """Nothing: it reads."""

    def leave(self) -> None:
        self.threads.append(f"left {threading.current_thread().name}")

    def load(self, read: ReadNow, _: Backing | None = None) -> bool:
        self.threads.append(threading.current_thread().name)
        end = max(0, self.nbytes - FOOTER)
        view = memoryview(self.memory)
        if read([view[end:]], end) < self.nbytes - end:
            return False
        step = 3 * self._part
        for start in range(0, end, step):
            stop = min(start + step, end)
            parts = [view[at : min(at + self._part, stop)] for at in range(start, stop, self._part)]
            if read(parts, start) < stop - start:
                return False
        return True


def name(text: str) -> str:
    return f"demo/0123456789abcdef/RL-1/{text}/0"


def content(seed: int, nbytes: int = 300_000) -> bytes:
    return random.Random(seed).randbytes(nbytes)


async def load(store: Harness, *wanted: tuple[str, int]) -> list[tuple[Outcome, bytes]]:
    """The answers, and what the blocks hold. Another try if the page cache has just lost something."""
    for _ in range(20):
        places = [Place(name(text), Block(nbytes), Use(), depth) for depth, (text, nbytes) in enumerate(wanted)]
        outcomes = await store.storage.get_in_place(places)
        if COLD not in outcomes:
            break
        await store.get(*((name(text), nbytes) for text, nbytes in wanted))
    return [(outcome, bytes(place.data.memory)) for outcome, place in zip(outcomes, places, strict=True)]  # type: ignore[attr-defined]


@pytest.fixture(params=[backend for backend in BACKENDS if backend.name in ("memory", "file")], ids=lambda b: b.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    """Those whose objects may be in the daemon's memory. (A simulated one comes short by chance: tests/workers.)"""
    made: Backend = request.param
    return made


@pytest.mark.parametrize("nbytes", [1, 4096, 300_000, 2 * 1024**2 + 128])
async def test_a_block_reads_the_object_to_the_last_byte(open_backend: Open, nbytes: int) -> None:
    store = await open_backend()
    assert store.storage.loads_in_place
    await store.put((name("aa"), content(1, nbytes)))
    assert await load(store, ("aa", nbytes)) == [(FOUND, content(1, nbytes))]


async def test_the_answers_have_the_order_of_the_places(open_backend: Open) -> None:
    store = await open_backend()
    await store.put(*((name(f"{i:02x}"), content(i)) for i in range(0, 20, 2)))
    answers = await load(store, *((f"{i:02x}", 300_000) for i in range(20)))
    assert [outcome for outcome, _ in answers] == [FOUND, MISSING] * 10
    assert [data for _, data in answers[::2]] == [content(i) for i in range(0, 20, 2)]
    assert all(data == b"\xaa" * 300_000 for _, data in answers[1::2])


async def test_an_object_of_another_length_is_missing_and_touches_no_block(open_backend: Open) -> None:
    store = await open_backend()
    await store.put((name("aa"), content(1)))
    assert await load(store, ("aa", 299_999)) == [(MISSING, b"\xaa" * 299_999)]
    assert await store.storage.exists([name("aa")]) == [False]


async def test_a_load_in_place_counts_as_a_use(open_backend: Open) -> None:
    store = await open_backend(capacity=3 * 300_000)
    await store.put((name("aa"), content(1)))
    await store.put((name("bb"), content(2)))
    await store.put((name("cc"), content(3)))
    await load(store, ("aa", 300_000))
    await store.put((name("dd"), content(4)))
    assert await store.storage.exists([name(text) for text in ("aa", "bb", "cc", "dd")]) == [True, False, True, True]
    assert store.storage.statistics()["hits"] == 1


async def test_a_thread_leaves_a_batch_after_its_last_load_and_before_the_answer(tmp_path: Path) -> None:
    storage, places = FileStorage(file_config(tmp_path, 64 * 1024**2)), []
    await storage.open()
    try:
        for depth in range(40):
            assert await storage.put([_blob(name(f"{depth:02x}"), content(depth))]) == [STORED]
            places.append(Place(name(f"{depth:02x}"), Block(300_000), Use(), depth))
            places[-1].data.threads = places[0].data.threads  # type: ignore[attr-defined]
        await storage.get_in_place(places)
        told: list[str] = list(places[0].data.threads)  # type: ignore[attr-defined]
    finally:
        await storage.close()
    loaders = {line for line in told if not line.startswith("left ")}
    assert loaders
    for thread in loaders:
        assert [line for line in told if line.endswith(thread)][-1] == f"left {thread}"


# --- files: what the page cache has ---------------------------------------------------------------


@pytest.fixture
async def store(tmp_path: Path) -> Any:
    storage = FileStorage(file_config(tmp_path, 64 * 1024**2))
    await storage.open()
    yield storage
    await storage.close()


async def stored(store: FileStorage, nbytes: int) -> Path:
    """One object on the disk, and its file."""
    [outcome] = await store.put([_blob(name("aa"), content(1, nbytes))])
    assert outcome.found is Found.STORED
    [file] = (path for path in Path(store._path).rglob("*") if path.is_file() and path.stat().st_size == nbytes)
    return file


def _blob(text: str, data: bytes) -> Any:
    return Blob(text, memoryview(bytearray(data)))


def forget(file: Path) -> None:
    """Have the page cache drop a file."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if pages_in_memory(file):
        pytest.skip("this file system keeps its files in memory")


@pytest.mark.parametrize("nbytes", [FETCHED_BYTES - 1, 4 * 1024**2])
async def test_what_is_not_loaded_from_memory_is_cold_and_a_get_loads_it(store: FileStorage, nbytes: int) -> None:
    """A small object that the page cache does not hold, or a large one of a task that has ended."""
    file = await stored(store, nbytes)
    block, found = Block(nbytes), 0
    block.wanted = nbytes < FETCHED_BYTES
    # A read that does not wait makes the kernel read ahead, on a busy machine perhaps before the read looks again.
    while True:
        forget(file)
        if await store.get_in_place([Place(name("aa"), block, Use(), 0)]) == [COLD]:
            break
        found += 1
        assert found < 20, "it is found whenever the page cache does not hold it"
    buffer, gets, outcomes = _blob(name("aa"), bytes(nbytes)), 0, [COLD]
    while outcomes == [COLD]:  # a kernel may take back pages that nobody uses, and some do so all the time
        gets += 1
        assert gets < 20, "a get brings it back"
        assert await store.get([buffer]) == [FOUND]
        assert bytes(buffer.data) == content(1, nbytes)
        outcomes = await store.get_in_place([Place(name("aa"), block, Use(), 0)])
    assert outcomes == [FOUND]
    assert bytes(block.memory) == content(1, nbytes)
    assert store.statistics()["hits"] == found + gets + 1


@pytest.mark.parametrize("nbytes", [FETCHED_BYTES + 8192, 1_000_000, 2 * 1024**2 + 128, 5 * 1024**2 + 4097])
@pytest.mark.parametrize("there", [0, 4096], ids=["nothing there", "its end there"])
async def test_a_large_file_that_the_page_cache_does_not_hold_is_fetched(
    store: FileStorage, nbytes: int, there: int
) -> None:
    file = await stored(store, nbytes)
    for _ in range(20):  # a kernel may take pages back at once, or still read the last ones
        forget(file)
        with file.open("rb") as opened:
            assert len(os.pread(opened.fileno(), there, nbytes - there)) == there
        block = Block(nbytes)
        outcomes = await store.get_in_place([Place(name("aa"), block, Use(), 0)])
        if outcomes == [FOUND]:
            break
    assert outcomes == [FOUND]
    assert bytes(block.memory) == content(1, nbytes)


async def test_a_file_is_fetched_once_and_one_that_is_there_is_not(
    store: FileStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbytes, fetches, fetch = 3 * 1024**2, [], file_io._fetch
    file = await stored(store, nbytes)
    monkeypatch.setattr(file_io, "_fetch", lambda *arguments: fetches.append(arguments[1]) or fetch(*arguments))
    buffer = _blob(name("aa"), bytes(nbytes))
    assert await store.get([buffer]) == [FOUND]
    assert fetches == []
    for get in (
        lambda: store.get([buffer]),
        lambda: store.get_in_place([Place(name("aa"), Block(nbytes), Use(), 0)]),
    ):
        fetches.clear()
        forget(file)
        await get()
        assert fetches == [nbytes]


@pytest.mark.parametrize("without", ["cachestat", "mmap", "large pages", "populating"])
async def test_what_the_kernel_cannot_do_costs_time_and_no_byte(
    store: FileStorage, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    nbytes, libc = 3 * 1024**2, file_io._libc
    file = await stored(store, nbytes)
    refused: list[str] = []

    def refuse(*_: Any) -> int:
        refused.append(without)
        return -1

    call = {"cachestat": "syscall", "mmap": "mmap", "large pages": "madvise", "populating": "madvise"}[without]

    def madvise(address: int, length: int, advice: int) -> int:
        hugepage = advice == mmap.MADV_HUGEPAGE
        return refuse() if hugepage == (without == "large pages") else libc.madvise(address, length, advice)

    calls = {made: getattr(libc, made) for made in ("syscall", "mmap", "madvise", "munmap")}
    monkeypatch.setattr(file_io, "_libc", SimpleNamespace(**calls | {call: madvise if call == "madvise" else refuse}))
    if without == "mmap":
        monkeypatch.setattr(file_io, "_FAILED", -1)
    forget(file)
    buffer = _blob(name("aa"), bytes(nbytes))
    assert await store.get([buffer]) == [FOUND]
    assert bytes(buffer.data) == content(1, nbytes)
    assert refused


async def test_a_file_that_was_cut_off_is_not_fetched_into_anything(store: FileStorage) -> None:
    nbytes = 3 * 1024**2
    file = await stored(store, nbytes)
    with file.open("r+b") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file_io._fetch(opened.fileno(), nbytes + 4 * 1024**2)  # as if it had been longer when somebody looked
        opened.truncate(5000)
    assert await store.get_in_place([Place(name("aa"), Block(nbytes), Use(), 0)]) == [MISSING]


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS])
async def test_a_file_system_that_cannot_say_what_is_in_memory_has_everything_cold(
    store: FileStorage, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    await stored(store, 5000)
    monkeypatch.setattr(os, "preadv", _refused(code))
    assert await store.get_in_place([Place(name("aa"), Block(5000), Use(), 0)]) == [COLD]


async def test_a_file_that_cannot_be_read_fails_and_is_set_aside(
    store: FileStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stored(store, 5000)
    monkeypatch.setattr(os, "preadv", _refused(errno.EIO))
    [outcome] = await store.get_in_place([Place(name("aa"), Block(5000), Use(), 0)])
    assert outcome.found is Found.FAILED
    assert await store.exists([name("aa")]) == [False]


def _refused(code: int) -> Any:
    def preadv(_fd: int, _buffers: Sequence[memoryview], _offset: int, flags: int = 0) -> int:
        assert flags == os.RWF_NOWAIT
        raise OSError(code, os.strerror(code))

    return preadv
