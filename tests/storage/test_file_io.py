"""`storage.file.direct_io`: objects go past the page cache (file_io.py, DirectIO)."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.storage.harness import file_config, skip_without_direct_io
from tests.support.blobs import get, put
from tests.support.page_cache import pages_in_memory
from transferd.daemon.preflight import _examine_store
from transferd.errors import ConfigError
from transferd.storage import file_io
from transferd.storage.base import FOUND, MISSING, STORED, Blob, Found
from transferd.storage.batch import Damaged
from transferd.storage.file import FileStorage
from transferd.storage.file_io import UNIT, CachedIO, DirectIO, direct_io_problem


class Libc:
    """The real C library, in which some functions fail with these codes."""

    def __init__(self, **codes: int) -> None:
        self._codes = codes
        self._real = file_io._libc

    def __getattr__(self, function: str) -> Any:
        if function not in self._codes:
            return getattr(self._real, function)

        def fails(*_: Any) -> int:
            ctypes.set_errno(self._codes[function])
            return -1

        return fails


CAPACITY = 64 * 1024**2
LENGTHS = [1, UNIT - 1, UNIT, UNIT + 1, 2 * UNIT, 5 * UNIT + 128, 2 * 1024**2 + 128]


def name(number: int) -> str:
    return f"demo/0123456789abcdef/RL-1/{number:040x}/0"


def content(number: int, nbytes: int) -> bytes:
    return random.Random(number).randbytes(nbytes)


def memory(nbytes: int, start: int = 0) -> memoryview:
    """Of the caller. start: bytes after the beginning of a page."""
    return memoryview(mmap.mmap(-1, nbytes + start))[start:]


def blob(number: int, nbytes: int, start: int = 0) -> Blob:
    data = memory(nbytes, start)
    data[:] = content(number, nbytes)
    return Blob(name(number), data)


async def read(store: FileStorage, number: int, nbytes: int, start: int = 0) -> tuple[Any, bytes]:
    """With some memory after the object's, which nothing may change."""
    room = memory(nbytes + UNIT, start)
    room[:] = b"\xaa" * len(room)
    [outcome] = await get(store, [Blob(name(number), room[:nbytes])])
    assert bytes(room[nbytes:]) == b"\xaa" * UNIT
    return outcome, bytes(room[:nbytes])


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[FileStorage]:
    skip_without_direct_io(tmp_path)
    storage = FileStorage(file_config(tmp_path, CAPACITY, direct_io=True))
    await storage.open()
    yield storage
    await storage.close()


@pytest.mark.parametrize("nbytes", LENGTHS)
@pytest.mark.parametrize("start", [0, 128])
async def test_objects_of_any_length_and_from_any_memory_come_back(store: FileStorage, nbytes: int, start: int) -> None:
    assert await put(store, [blob(1, nbytes, start)]) == [STORED]
    assert os.stat(store._directory.path(name(1))).st_size == nbytes
    assert await read(store, 1, nbytes) == (FOUND, content(1, nbytes))
    assert await read(store, 1, nbytes, 128) == (FOUND, content(1, nbytes))


async def test_neither_a_put_nor_a_get_leaves_an_object_in_the_page_cache(store: FileStorage, tmp_path: Path) -> None:
    nbytes = LENGTHS[-1]
    pages = -(-nbytes // mmap.PAGESIZE)
    cached = tmp_path / "cached"
    cached.write_bytes(content(1, nbytes))
    assert pages_in_memory(cached) == pages
    assert await put(store, [blob(1, nbytes)]) == [STORED]
    file = Path(store._directory.path(name(1)))
    if pages_in_memory(file) == pages:
        pytest.skip("this file system keeps its files in memory")
    assert pages_in_memory(file) <= 1, "the footer's, which is less than a unit"
    for start in (0, 128):
        assert await read(store, 1, nbytes, start) == (FOUND, content(1, nbytes))
        assert pages_in_memory(file) <= 1


async def test_a_store_is_the_same_with_and_without_it(tmp_path: Path) -> None:
    skip_without_direct_io(tmp_path)
    nbytes = LENGTHS[-1]
    for number, direct_io in enumerate([False, True, False, True]):
        storage = FileStorage(file_config(tmp_path, CAPACITY, direct_io=direct_io))
        await storage.open()
        for older in range(number):
            assert await read(storage, older, nbytes) == (FOUND, content(older, nbytes))
        assert await put(storage, [blob(number, nbytes)]) == [STORED]
        assert await read(storage, number, nbytes) == (FOUND, content(number, nbytes))
        await storage.close()


async def test_the_scrub_leaves_the_page_cache_as_it_was(store: FileStorage) -> None:
    nbytes = LENGTHS[-1]
    assert await put(store, [blob(1, nbytes)]) == [STORED]
    file = Path(store._directory.path(name(1)))
    fd = os.open(file, os.O_RDONLY)
    os.fsync(fd)  # what is not on the disk yet stays in memory
    os.close(fd)
    examination = store._directory.examination(name(1))
    assert sum(examination.pieces(memory(UNIT))) > 0
    assert examination.nbytes == nbytes
    assert pages_in_memory(file) <= 1


@pytest.mark.parametrize("length", ["shorter", "longer"])
async def test_a_file_of_another_length_is_no_object(store: FileStorage, length: str) -> None:
    nbytes = LENGTHS[-1]
    assert await put(store, [blob(1, nbytes)]) == [STORED]
    os.truncate(store._directory.path(name(1)), nbytes - 1 if length == "shorter" else nbytes + 1)
    assert (await read(store, 1, nbytes))[0] == MISSING


@pytest.mark.usefixtures("files_in_python")
async def test_a_file_that_becomes_shorter_while_it_is_read_is_no_object(
    store: FileStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbytes = LENGTHS[-1]
    assert await put(store, [blob(1, nbytes)]) == [STORED]
    preadv, path = os.preadv, store._directory.path(name(1))

    def cut(fd: int, buffers: Any, offset: int) -> int:
        os.truncate(path, UNIT)
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", cut)
    assert (await read(store, 1, nbytes))[0] == MISSING


@pytest.mark.usefixtures("files_in_python")
async def test_a_write_that_the_medium_refuses_is_not_repeated_through_the_page_cache(
    store: FileStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbytes = LENGTHS[-1]
    calls = []

    def refused(*arguments: Any) -> int:
        calls.append(arguments[0])
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refused)
        [outcome] = await put(store, [blob(1, nbytes)])
    assert outcome.found is Found.FAILED
    assert not os.path.exists(store._directory.path(name(1)))
    assert await put(store, [blob(1, nbytes)]) == [STORED]
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", refused)
        assert (await read(store, 1, nbytes))[0].found is Found.FAILED
    assert len(calls) == 2


@pytest.mark.parametrize("refuses", ["open", "pwrite"])
async def test_a_file_system_without_it_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    real_open, real_pwrite, direct = os.open, os.pwrite, os.O_DIRECT

    def open_(path: str, flags: int, *more: int, **named: Any) -> int:
        if flags & direct and refuses == "open":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return real_open(path, flags & ~direct, *more, **named)

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        if refuses == "pwrite":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_pwrite(fd, data, offset)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "pwrite", pwrite)
    storage = FileStorage(file_config(tmp_path, CAPACITY, direct_io=True))
    with pytest.raises(ConfigError, match=r"storage\.file\.direct_io: .*has no direct I/O") as refusal:
        await storage.open()
    assert str(tmp_path) in str(refusal.value)
    with pytest.raises(ConfigError, match=r"storage\.file\.direct_io: .*has no direct I/O"):
        _examine_store(str(tmp_path / "not yet"), file_config(tmp_path, CAPACITY, direct_io=True), ())
    _examine_store(str(tmp_path), file_config(tmp_path, CAPACITY), ())
    await storage.close()
    assert not list((tmp_path / "objects").iterdir()), "nor is a file left"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
async def test_a_full_disk_says_nothing_about_what_its_file_system_can_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A store may well have filled it itself; it starts, and what is there makes room."""
    skip_without_direct_io(tmp_path)

    def full(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    storage = FileStorage(file_config(tmp_path, CAPACITY, direct_io=True))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        patch.setattr(file_io, "_libc", Libc(fallocate=code))
        assert direct_io_problem(str(tmp_path)) == ""
        await storage.open()
    assert storage._directory._io.preallocates
    assert await put(storage, [blob(1, 5 * UNIT + 128)]) == [STORED]
    assert await read(storage, 1, 5 * UNIT + 128) == (FOUND, content(1, 5 * UNIT + 128))
    await storage.close()


@pytest.mark.parametrize(("code", "has"), [(errno.EOPNOTSUPP, False), (errno.ENOSYS, False), (errno.ENOSPC, True)])
def test_a_file_system_that_cannot_allocate_blocks_is_not_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, has: bool
) -> None:
    io = CachedIO()
    assert not io.preallocates, "until it is known"
    monkeypatch.setattr(file_io, "_libc", Libc(fallocate=code))
    with (tmp_path / "empty").open("wb") as file:
        io.probe(file.fileno())
    assert io.preallocates == has


@pytest.mark.parametrize("io", [CachedIO(), DirectIO()], ids=["through the page cache", "past it"])
@pytest.mark.parametrize("nbytes", [1, UNIT, 512 * 1024 + 77])
def test_a_file_that_has_become_shorter_is_damaged_and_never_half_an_object(
    tmp_path: Path, io: CachedIO, nbytes: int
) -> None:
    path = tmp_path / "object"
    path.write_bytes(content(1, nbytes))
    if io.flags:
        skip_without_direct_io(tmp_path)
    fd = os.open(path, os.O_RDWR | io.flags)
    try:
        whole = memory(nbytes)
        io.read(fd, whole)
        assert whole == content(1, nbytes)
        os.ftruncate(fd, nbytes - 1)
        with pytest.raises(Damaged):
            io.read(fd, memory(nbytes))
    finally:
        os.close(fd)


def test_only_a_refusal_of_direct_io_is_ignored() -> None:
    with file_io.unless_refused():
        raise OSError(errno.EINVAL, "alignment")
    with pytest.raises(OSError, match="worn out"), file_io.unless_refused():
        raise OSError(errno.EIO, "worn out")


def test_a_file_goes_through_the_page_cache_from_then_on(tmp_path: Path) -> None:
    skip_without_direct_io(tmp_path)
    fd = os.open(tmp_path / "object", os.O_CREAT | os.O_RDWR | os.O_DIRECT)
    try:
        with pytest.raises(OSError, match="Invalid argument"):
            os.pwrite(fd, b"of no unit", 1)
        file_io.through_the_cache(fd)
        assert os.pwrite(fd, b"of no unit", 1) == 10
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR, "and nothing else has changed"
    finally:
        os.close(fd)
