"""Objects made and taken in storage's own threads: the part of the contract that says `fill` and `drain`."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.storage.harness import BACKENDS, Backend, Harness, Open, file_config
from tests.support.blobs import put
from tests.support.page_cache import pages_in_memory
from tests.support.waits import until
from transferd.storage import file_io
from transferd.storage.base import FOUND, LEFT, MISSING, STORED, Blob, Found, Item, Outcome
from transferd.storage.file import FileStorage
from transferd.storage.lru import Use

LARGE = 2 * 1024**2 + 128


class Taken:
    """A drain that keeps what it takes, by item. refuses: items that it does not take."""

    def __init__(self, *refuses: int) -> None:
        self.wanted = True
        self.objects: dict[int, bytes] = {}
        self.threads: list[str] = []
        self._refuses = refuses

    def __call__(self, i: int, data: memoryview, /) -> bool:
        self.threads.append(threading.current_thread().name)
        self.objects[i] = bytes(data)
        return i not in self._refuses


def name(text: str) -> str:
    return f"demo/0123456789abcdef/RL-1/{text}/0"


def content(seed: int, nbytes: int = 300_000) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def items(*wanted: tuple[str, int]) -> list[Item]:
    use = Use()
    return [Item(name(text), nbytes, use, depth) for depth, (text, nbytes) in enumerate(wanted)]


def slots(store: Harness, nbytes: int, objects: int) -> list[memoryview]:
    """As many as the backend uses at a time, and fewer than it has objects where it can."""
    at_once = store.storage.slots_at_once
    assert at_once is not None
    return [store.buffer(nbytes) for _ in range(min(at_once, objects, 3))]


async def load(store: Harness, drain: Taken, *wanted: tuple[str, int]) -> list[Outcome]:
    return await store.storage.load(items(*wanted), drain, slots(store, max(n for _, n in wanted), len(wanted)))


@pytest.fixture(
    params=[backend for backend in BACKENDS if backend.name.startswith(("memory", "file", "simulated"))],
    ids=lambda backend: backend.name,
)
def backend(request: pytest.FixtureRequest) -> Backend:
    """Those with threads of their own."""
    made: Backend = request.param
    return made


@pytest.mark.parametrize("nbytes", [1, 4096, 300_000, LARGE])
async def test_an_object_that_was_filled_is_drained_to_the_last_byte(open_backend: Open, nbytes: int) -> None:
    store = await open_backend()
    if store.storage.backend == "simulated" and nbytes < 200:
        pytest.skip("a simulated object has a footer")
    wanted = [(f"{i:02x}", nbytes) for i in range(6)]

    def fill(i: int, data: memoryview, near: bool) -> bool:
        assert data.nbytes == nbytes
        data[:] = content(i, nbytes)
        return True

    stored = await store.storage.store(items(*wanted), fill, slots(store, nbytes, 6))
    assert stored == [STORED] * 6
    drain = Taken()
    assert await load(store, drain, *wanted) == [FOUND] * 6
    assert drain.objects == {i: content(i, nbytes) for i in range(6)}
    assert await store.get((wanted[3][0] and name(wanted[3][0]), nbytes)) == [(FOUND, content(3, nbytes))]


async def test_an_object_that_was_not_made_is_not_stored_and_the_others_are(open_backend: Open) -> None:
    store = await open_backend()
    wanted = [(f"{i:02x}", 300_000) for i in range(6)]

    def fill(i: int, data: memoryview, near: bool) -> bool:
        data[:] = content(i)
        return i % 2 == 0

    stored = await store.storage.store(items(*wanted), fill, slots(store, 300_000, 6))
    assert stored == [STORED, LEFT] * 3
    assert await store.storage.exists([name(text) for text, _ in wanted]) == [True, False] * 3
    if store.storage.levels is not None:
        await store.storage.levels.flush(30)
    assert not store.storage.statistics().get("in_flight_bytes")


async def test_the_answers_have_the_order_of_the_items(open_backend: Open) -> None:
    store = await open_backend()
    await store.put(*((name(f"{i:02x}"), content(i)) for i in range(0, 20, 2)))
    drain = Taken(4, 8)
    answers = await load(store, drain, *((f"{i:02x}", 300_000) for i in range(20)))
    assert answers == [LEFT if i in (4, 8) else (MISSING if i % 2 else FOUND) for i in range(20)]
    assert drain.objects == {i: content(i) for i in range(0, 20, 2)}


async def test_an_object_of_another_length_is_missing_and_nobody_gets_it(open_backend: Open) -> None:
    store = await open_backend()
    await store.put((name("aa"), content(1)))
    copying: dict[str, object] = getattr(store.storage, "unsaved", {})  # several levels: each has it before it goes
    await until(lambda: not copying)
    drain = Taken()
    assert await load(store, drain, ("aa", 299_999)) == [MISSING]
    assert drain.objects == {}
    assert await store.storage.exists([name("aa")]) == [False]


async def test_a_drain_that_is_not_wanted_any_more_gets_nothing(open_backend: Open) -> None:
    store = await open_backend()
    await store.put((name("aa"), content(1)))
    drain = Taken()
    drain.wanted = False
    assert await load(store, drain, ("aa", 300_000)) == [LEFT]
    assert drain.objects == {}


async def test_a_load_counts_as_a_use(open_backend: Open, backend: Backend) -> None:
    if not backend.keeps_lru:
        pytest.skip("its order is its own business")
    store = await open_backend(capacity=3 * 300_000)
    for i, text in enumerate(("aa", "bb", "cc")):
        await store.put((name(text), content(i)))
    await load(store, Taken(), ("aa", 300_000))
    await store.put((name("dd"), content(4)))
    assert await store.storage.exists([name(text) for text in ("aa", "bb", "cc", "dd")]) == [True, False, True, True]
    assert store.storage.statistics()["hits"] == 1


# --- files: what the page cache has ---------------------------------------------------------------


@pytest.fixture
async def store(tmp_path: Path, open_storage: Open) -> Harness:
    return await open_storage(FileStorage(file_config(tmp_path, 64 * 1024**2)))


async def stored(store: Harness, nbytes: int) -> Path:
    """One object on the disk, and its file."""
    [outcome] = await put(store.storage, [blob(store, content(1, nbytes))])
    assert outcome.found is Found.STORED
    assert isinstance(store.storage, FileStorage)
    [file] = (p for p in Path(store.storage.path).rglob("*") if p.is_file() and p.stat().st_size == nbytes)
    return file


def blob(store: Harness, data: bytes) -> Blob:
    return Blob(name("aa"), store.buffer(len(data), data))


def forget(file: Path) -> None:
    """Have the page cache drop a file."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if pages_in_memory(file):
        pytest.skip("this file system keeps its files in memory")


@pytest.mark.parametrize("native", [True, False], ids=["native", "Python"])
@pytest.mark.parametrize("nbytes", [5000, 512 * 1024 + 8192, 1_000_000, LARGE, 5 * 1024**2 + 4097])
@pytest.mark.parametrize("there", [0, 4096], ids=["nothing there", "its end there"])
async def test_a_file_that_the_page_cache_does_not_hold_is_drained_all_the_same(
    store: Harness, monkeypatch: pytest.MonkeyPatch, nbytes: int, there: int, native: bool
) -> None:
    monkeypatch.setattr(file_io, "NATIVE", native and file_io.NATIVE)
    file = await stored(store, nbytes)
    forget(file)
    with file.open("rb") as opened:
        assert len(os.pread(opened.fileno(), there, nbytes - there)) == there
    drain = Taken()
    assert await load(store, drain, ("aa", nbytes)) == [FOUND]
    assert drain.objects == {0: content(1, nbytes)}


@pytest.mark.usefixtures("files_in_python")
async def test_a_file_that_cannot_be_read_fails_and_is_set_aside(
    store: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stored(store, 5000)

    def preadv(_fd: int, _buffers: Sequence[memoryview], _offset: int, _flags: int = 0) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", preadv)
    [outcome] = await load(store, Taken(), ("aa", 5000))
    assert outcome.found is Found.FAILED
    assert await store.storage.exists([name("aa")]) == [False]
