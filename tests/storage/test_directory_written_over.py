"""A store at its capacity writes new objects over the files of those that they displace (directory.py, `write`)."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import random
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.storage.harness import file_config, put_stranger, skip_without_direct_io
from tests.support.blobs import get, put
from transferd.runtime.compat import timeout
from transferd.storage import file_io
from transferd.storage.base import FOUND, MISSING, STORED, Blob, Found
from transferd.storage.file import FileStorage
from transferd.storage.paths import temporary_of

NBYTES = 300_000


pytestmark = pytest.mark.usefixtures("files_both_ways")


@pytest.fixture(params=["cached", "direct"])
async def store(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[FileStorage]:
    """Room for two objects."""
    if request.param == "direct":
        skip_without_direct_io(tmp_path)
    storage = FileStorage(file_config(tmp_path, 2 * NBYTES, direct_io=request.param == "direct"), unit=1)
    await storage.open()
    yield storage
    await storage.close()


def name(text: str) -> str:
    return f"demo/0123456789abcdef/RL-1/{text}/0"


def content(text: str, nbytes: int = NBYTES) -> bytes:
    return random.Random(text).randbytes(nbytes)


def blob(text: str, nbytes: int = NBYTES, data: bytes | None = None) -> Blob:
    return Blob(name(text), memoryview(bytearray(content(text, nbytes) if data is None else data)))


async def read(store: FileStorage, text: str, nbytes: int = NBYTES) -> tuple[Any, bytes]:
    wanted = blob(text, data=b"\xaa" * nbytes)
    [outcome] = await get(store, [wanted])
    return outcome, bytes(wanted.data)


def files(tmp_path: Path) -> dict[str, int]:
    """Of every file of an object, or of one that is not finished, its inode."""
    return {path.name: path.stat().st_ino for path in (tmp_path / "objects").rglob("*") if path.is_file()}


async def test_the_file_is_the_same_and_its_bytes_are_the_new_objects(store: FileStorage, tmp_path: Path) -> None:
    await put(store, [blob("aa")])
    await put(store, [blob("bb")])
    before = files(tmp_path)
    assert await put(store, [blob("cc")]) == [STORED]
    kept = before["aa@0"] if file_io.NATIVE else files(tmp_path)["cc@0"]
    assert files(tmp_path) == {"bb@0": before["bb@0"], "cc@0": kept}
    assert await read(store, "aa") == (MISSING, b"\xaa" * NBYTES)
    assert await read(store, "bb") == (FOUND, content("bb"))
    assert await read(store, "cc") == (FOUND, content("cc"))
    await store.close()
    directories = [path for path in (tmp_path / "objects").rglob("*") if path.is_dir() and path.name == "aa"]
    assert directories == [], "the fan directory of the displaced object has gone"


async def test_a_file_with_another_link_is_not_written_over(store: FileStorage, tmp_path: Path) -> None:
    await put(store, [blob("aa")])
    await put(store, [blob("bb")])
    [path] = (tmp_path / "objects").rglob("aa@0")
    copy = tmp_path / "backup"
    os.link(path, copy)
    assert await put(store, [blob("cc")]) == [STORED]
    assert copy.read_bytes() == content("aa")
    assert await read(store, "cc") == (FOUND, content("cc"))


@pytest.mark.parametrize("other", [NBYTES // 2, NBYTES + NBYTES // 2])
async def test_an_object_of_another_length_is_written_over(store: FileStorage, tmp_path: Path, other: int) -> None:
    await put(store, [blob("aa", other)])
    await put(store, [blob("bb", 2 * NBYTES - other)])
    [path] = (tmp_path / "objects").rglob("aa@0")
    before = path.stat().st_ino
    assert await put(store, [blob("cc", NBYTES // 2)]) == [STORED]
    [path] = (tmp_path / "objects").rglob("cc@0")
    assert path.read_bytes() == content("cc", NBYTES // 2)
    assert path.stat().st_ino == before or not file_io.NATIVE
    assert await read(store, "cc", NBYTES // 2) == (FOUND, content("cc", NBYTES // 2))


@pytest.mark.parametrize("stranger", ["fifo", "directory", "link", "longer", "shorter"])
async def test_a_file_that_replaced_the_displaced_object_is_not_written_over(
    store: FileStorage, tmp_path: Path, stranger: str
) -> None:
    """A FIFO would hang the thread that opens it. A file of another length gets the new one's."""
    await put(store, [blob("aa")])
    await put(store, [blob("bb")])
    [path] = (tmp_path / "objects").rglob("aa@0")
    kept = tmp_path / "kept"
    kept.write_bytes(content("aa"))
    path.unlink()
    if stranger in ("longer", "shorter"):
        path.write_bytes(content("aa", NBYTES + (1000 if stranger == "longer" else -1000)))
    else:
        put_stranger(path, stranger, kept)
    async with timeout(30):
        assert await put(store, [blob("cc")]) == [STORED]
    assert await read(store, "cc") == (FOUND, content("cc"))
    assert await put(store, [blob("dd")]) == [STORED], "and the store goes on"
    assert kept.read_bytes() == content("aa")


@pytest.mark.usefixtures("files_in_python")
async def test_an_object_that_is_being_read_is_not_written_over(
    store: FileStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(store, [blob("aa")])
    await put(store, [blob("bb")])
    await read(store, "bb")  # so that aa is the next to go
    begun, go_on, preadv = threading.Event(), threading.Event(), os.preadv

    def held(*args: Any) -> int:
        monkeypatch.setattr(os, "preadv", preadv)
        begun.set()
        go_on.wait(30)
        return preadv(*args)

    before = files(tmp_path)
    monkeypatch.setattr(os, "preadv", held)
    reading = asyncio.ensure_future(read(store, "aa"))
    assert await asyncio.to_thread(begun.wait, 30)
    await put(store, [blob("bb")])  # used again: aa, which the read has used, is older
    assert await put(store, [blob("cc")]) == [STORED]
    assert (await store.exists([name("aa")])) == [False]
    assert files(tmp_path)["cc@0"] != before["aa@0"]
    go_on.set()
    assert await reading == (FOUND, content("aa"))
    assert await put(store, [blob("dd")]) == [STORED], "the read has ended, so the next one may"
    assert await read(store, "dd") == (FOUND, content("dd"))


@pytest.mark.usefixtures("files_in_python")
@pytest.mark.parametrize("call", ["pwrite", "open"])
async def test_a_write_over_that_fails_leaves_neither_object_and_no_file(
    store: FileStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    await put(store, [blob("aa")])
    await put(store, [blob("bb")])

    def refused(*_: Any, **__: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refused)
        [outcome] = await put(store, [blob("cc")])
    assert outcome.found is Found.FAILED
    assert files(tmp_path).keys() == {"bb@0"}
    assert await store.exists([name(text) for text in ("aa", "bb", "cc")]) == [False, True, False]
    assert store.statistics()["bytes"] == NBYTES
    assert await put(store, [blob("cc")]) == [STORED]


async def test_a_file_that_another_program_has_a_lease_on_is_replaced_and_not_waited_for(
    store: FileStorage, tmp_path: Path
) -> None:
    """A file server takes leases on the files that it serves. The kernel lets it keep one for 45 s."""
    await put(store, [blob("aa")])
    await put(store, [blob("bb")])
    [path] = (tmp_path / "objects").rglob("aa@0")
    ignored = signal.signal(signal.SIGIO, signal.SIG_IGN)  # the kernel asks for the lease with it
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        assert await put(store, [blob("cc")]) == [STORED]
        assert os.pread(fd, NBYTES, 0) == content("aa")
    finally:
        os.close(fd)
        signal.signal(signal.SIGIO, ignored)
    assert files(tmp_path).keys() == {"bb@0", "cc@0"}
    assert await read(store, "cc") == (FOUND, content("cc"))


async def test_the_directory_of_a_file_that_was_written_over_goes_also_if_something_is_in_the_way(
    store: FileStorage, tmp_path: Path
) -> None:
    await put(store, [blob("aa")])
    await put(store, [blob("bb")])
    [path] = (tmp_path / "objects").rglob("bb@0")
    (path.parent.parent / "cc" / "cc@0").mkdir(parents=True)  # in the way of the new object
    [outcome] = await put(store, [blob("cc")])
    assert outcome.found is Found.STORED
    await store.close()
    assert not list((tmp_path / "objects").rglob("aa"))
    assert [path.name for path in (tmp_path / "objects").rglob("cc@0") if path.is_file()] == ["cc@0"]


async def test_a_file_that_was_being_written_over_is_removed_at_the_next_start(tmp_path: Path) -> None:
    storage = FileStorage(file_config(tmp_path, 2 * NBYTES), unit=1)
    await storage.open()
    await put(storage, [blob("aa")])
    [path] = (tmp_path / "objects").rglob("aa@0")
    path.rename(temporary_of(str(path), 7))  # as a write does first
    await storage.close()
    again = FileStorage(file_config(tmp_path, 2 * NBYTES), unit=1)
    await again.open()
    assert (files(tmp_path), again.statistics()["objects"]) == ({}, 0)
    await again.close()
